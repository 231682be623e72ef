"""Which ops a model sends through autocast: where, under which rule, in which dtypes before and after.

The calls are recorded by kernels on the CPU's autocast key, so they are seen as autocast sees them: neither ops that
run inside another op's autocast kernel nor ops outside a region.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from ampcheck.autocast.emulate import Emulation, emulated_policy
from ampcheck.autocast.kernels import eligible
from ampcheck.autocast.missing import MissingKernels
from ampcheck.autocast.probe import low_dtype
from ampcheck.autocast.state import device_type, devices, registered, short
from ampcheck.core.environment import quiet
from ampcheck.core.errors import UsageError, as_result, brief, message_of
from ampcheck.core.run import Where
from ampcheck.core.subject import Call, Kind, Subject, as_subject
from ampcheck.records.policy import APPEND_DTYPE, BANNED, OWN, SET_DTYPE, OpCall, PolicyCalls, Raised
from ampcheck.stream.trace import Trace
from ampcheck.torchtools.copying import forward_through, loss_of, prepare
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.private import has_kernel_for, op_names
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.source import Scopes, naming_users_errors, users_line, users_place


@naming_users_errors
def measure_calls(
    subject: object, *, device: str = "cuda", dtype: torch.dtype | str = torch.float16, release: str | None = None
) -> PolicyCalls:
    """Run forward, loss and backward on the CPU under the device's autocast policy, and record what reached autocast.

    subject: a `Subject` of the kinds forward, compile and regional, or its shape. It is copied, never changed; each
    block runs eager. device: whose policy; the device itself may be absent. dtype: what autocast casts to. release: of
    PyTorch, whose policy is followed; the installed one by default. An exception of the model is recorded in `raised`.
    Raises `UsageError` for another kind of subject, an unknown device, dtype or release.
    """
    subject = as_subject(subject)
    if subject.kind in (Kind.TRAINING, Kind.CALL):
        what = "a training loop" if subject.kind is Kind.TRAINING else "a callable without arguments"
        raise UsageError(
            f"{subject.name} is {what}: a lock needs a model with its inputs, (module, args); a test that runs "
            "anything else can be locked with @pytest.mark.ampcheck(lock=True)"
        )
    low = low_dtype(dtype)
    prepared = prepare(subject)
    recorder = CallRecorder(device, low, model=prepared.root, release=release)
    trace = Trace(prepared.root)
    error: BaseException | None = None
    no_backward = ""
    substitutes = nullcontext() if recorder.device == "cpu" else MissingKernels()
    with seeded(), quiet(), recorder.recording(), substitutes, trace:
        try:
            for call in prepared.calls:
                loss = _forward(prepared.blocks, call, low, subject)
                no_backward = _backward(loss) or no_backward
        except BaseException as caught:  # noqa: BLE001  # the user's model: its exception is a result
            error = as_result(caught)
    raised = _raised(error, recorder, trace) if error is not None else None
    return replace(recorder.calls(subject.name, low), raised=raised, no_backward=no_backward)


def _forward(blocks: Sequence[Callable[..., object]], call: Call, low: torch.dtype, subject: Subject) -> object:
    """Run the blocks under autocast; the subject's loss, or the mean of squares of its outputs."""
    with torch.enable_grad(), torch.autocast("cpu", low), preserved_state():
        result = forward_through(blocks, call)
        if subject.loss is not None:
            return loss_of(subject.loss, result)
    outputs = [t for _, t in tensors(result) if t.is_floating_point() and t.requires_grad and t.numel()]
    losses = [t.float().square().mean() for t in outputs if t.layout is torch.strided and not t.is_nested]
    return sum(losses[1:], losses[0]) if losses else None


def _backward(loss: object) -> str:
    """Run backward where there is a loss with a gradient; the message of its exception."""
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        try:
            with preserved_state():
                loss.backward()  # type: ignore[no-untyped-call]
        except BaseException as error:  # noqa: BLE001  # the user's model: its exception is a result
            return brief(as_result(error))
    return ""


def _raised(error: BaseException, recorder: CallRecorder, trace: Trace) -> Raised:
    banned = recorder.banned
    if banned is not None and recorder.policy.ops[banned.op].raises in message_of(error):
        return Raised(brief(error), banned.op, banned.where)
    through = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    if trace.failed is not None and Trace.see.__code__ in through:  # not one that the model caught
        return Raised(brief(error), trace.failed.where.op, trace.failed.where)
    return Raised(brief(error), "", Where("forward", "", "", *users_place(error)))


class CallRecorder:
    """Records the calls that reach autocast under the device's policy.

    device: whose policy. dtype: for which the policy is read; calls are recorded for every dtype of autocast inside.
    model: whose module paths are recorded. release: of PyTorch, whose policy is followed; the installed one by default.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype = torch.float16,
        *,
        model: torch.nn.Module | None = None,
        release: str | None = None,
    ) -> None:
        self.device = device_type(device)
        self.policy = emulated_policy(self.device, dtype, release)
        self.banned: OpCall | None = None
        self._scopes = Scopes(model)
        self._counts: dict[torch.dtype, Counter[OpCall]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The CPU follows the device's policy inside, and every call that reaches autocast is recorded."""
        ops = {op for device in devices() for op in registered(device)}
        ops |= {op for op in op_names() if not op.startswith(OWN)}  # of some thousand names
        with self._scopes.watched(), Emulation(self.policy, observe=self._observe, also=ops):
            yield

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of autocast while calls were recorded."""
        return tuple(self._counts)

    def calls(self, subject: str, dtype: torch.dtype) -> PolicyCalls:
        """The calls that were recorded while autocast cast to `dtype`."""
        counts = self._counts.get(dtype, Counter())
        calls = sorted(
            (replace(call, count=count) for call, count in counts.items()),
            key=lambda call: (call.op, call.inputs, call.passed, call.module, call.file, call.line or 0),
        )
        has_kernel = has_kernel_for
        composite = {op for op in {call.op for call in calls} if has_kernel(op, "CompositeImplicitAutograd")}
        name = short(dtype)
        return PolicyCalls(subject, self.device, name, self.policy, tuple(calls), frozenset(composite))

    def _observe(
        self, op: str, rule: str, args: tuple[object, ...], kwargs: dict[str, object], cast: torch.dtype | None
    ) -> None:
        values = (*args, *kwargs.values())
        inputs = " ".join(text for value in values if (text := _dtypes(value, None)))
        passed = " ".join(text for value in values if (text := _dtypes(value, cast)))
        if rule == BANNED:
            passed = "raises"
        elif rule in (SET_DTYPE, APPEND_DTYPE) and eligible(args[0]):
            passed += "" if any(isinstance(value, torch.dtype) for value in values) else " dtype=float32"
        call = OpCall(op, rule, inputs, passed, self._scopes.current, *users_line(sys._getframe(), inside=_MEASURED))
        self._counts.setdefault(torch.get_autocast_dtype("cpu"), Counter())[call] += 1
        if rule == BANNED:
            self.banned = call


_MEASURED = inspect.unwrap(measure_calls).__code__
"""The code whose callers are not the model's."""


def _dtypes(value: object, cast: torch.dtype | None) -> str:
    """The dtypes of an argument's tensors after a cast of the eligible ones; empty where it holds no tensor."""
    if isinstance(value, torch.Tensor):
        dtype = cast if cast is not None and eligible(value) else value.dtype
        return short(dtype)
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return f"[{'|'.join(sorted({text for item in value if (text := _dtypes(item, cast))}))}]"
    return ""
