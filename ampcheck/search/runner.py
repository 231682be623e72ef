"""One callable, run on examples: as the user runs it, compiled, and in wider formats.

It is copied once. Buffers, random streams and the inputs are restored after each run, so that an example gives the same
result however often, and in whatever order, it is run.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ampcheck.autocast.emulate import active
from ampcheck.autocast.missing import MissingKernels
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.formats import format_of
from ampcheck.core.subject import Call, Subject
from ampcheck.search.example import Example
from ampcheck.shadow import Shadow
from ampcheck.shadow.companions import MOVE, has_companions
from ampcheck.torchtools.copying import Prepared, forward_through, modules_of, prepare
from ampcheck.torchtools.pytree import is_plain, tensors
from ampcheck.torchtools.snapshot import preserved_objects

_LARGEST_INTEGER = torch.iinfo(torch.int64).max


@dataclass(slots=True)
class Result:
    """What a run returned, an object of type `kind`: tensors by path, Python numbers among them, or an exception."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    kind: str = ""
    error: BaseException | None = None


class Runner:
    """A copy of a subject in low precision.

    dtype: what autocast casts to, or, where `native`, the dtype of inputs or weights. draws: whether a run drew random
    numbers. dropped counts outputs that have no values to judge, substituted the ops that ran in float32 since no
    16-bit kernel is here.
    """

    def __init__(self, subject: Subject, dtype: torch.dtype, *, device: str = "cpu", native: bool = False) -> None:
        self.subject, self.dtype, self.device, self.native = subject, dtype, device, native
        self.draws = False
        self.substituted: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._low = prepare(subject, device=device)

    @property
    def name(self) -> str:
        """How findings name this run: `softmax [float16 native, eager]`."""
        emulation = active()
        emulated = f", {emulation.policy.device} emulated" if emulation is not None else ""
        return f"{self.subject.name} [{format_of(self.dtype).name}{' native' if self.native else ''}, eager{emulated}]"

    @property
    def root(self) -> torch.nn.Module | None:
        """The module whose paths findings have."""
        return self._low.root

    @property
    def plain(self) -> Callable[..., Any]:
        """The copy, to be compiled."""
        return self._low.model  # type: ignore[no-any-return]

    @contextmanager
    def run(
        self, example: Example, shadow: Shadow | None = None, function: Callable[..., Any] | None = None
    ) -> Iterator[Result]:
        """Run the example under autocast, or as it is in 16 bits. function: the compiled copy.

        Inside the block the outputs are those of the run; on leaving, buffers among them are restored.
        """
        own = example.copied(self.device)
        if shadow is not None:
            self._enter(shadow, own)
        missing = MissingKernels() if active() is not None and function is None else None
        autocast = torch.autocast(torch.device(self.device).type, self.dtype, enabled=not self.native)
        with self._around(self._low):
            with missing or nullcontext(), autocast, shadow or nullcontext():
                result = _result_of(self.plain if function is None else function, own)
            if shadow is not None:
                self._count(result, missing)
            yield result

    def float32_error(self, example: Example) -> str:
        """What the example raises in float32, in one line; "" for nothing."""
        own = example.copied(self.device).mapped(lambda t: t.float() if t.is_floating_point() else t)
        with self._around(self._float32):
            error = _result_of(self._float32.model, own).error
        return brief(error) if error is not None else ""

    def exact(self, example: Example) -> dict[str, torch.Tensor] | None:
        """The floating results in float64 without the casts of the model; None where it does not run in float64."""
        shadow = Shadow(judge=False)
        with self._around(self._float64):
            with shadow:
                result = _result_of(self._float64.model, example.copied(self.device))
            if result.error is not None:
                return None
            return {
                path: shadow.exact(t).clone() if t.is_floating_point() else t.clone()
                for path, t in result.outputs.items()
            }

    @contextmanager
    def differentiable(self) -> Iterator[Callable[..., Any]]:
        """The callable in float64."""
        with self._around(self._float64):
            yield self._float64.model

    @cached_property
    def _float32(self) -> Prepared:
        return prepare(self.subject, device=self.device, to=torch.float32)

    @cached_property
    def _float64(self) -> Prepared:
        return prepare(self.subject, device=self.device, to=torch.float64)

    @contextmanager
    def _around(self, prepared: Prepared) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the user's own run shows them
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._seeded())
            stack.enter_context(preserved_objects(prepared.model, prepared.root))
            yield

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Seed the random streams. Hypothesis restores Python's and numpy's, `assert_property` restores all."""
        device = torch.device(self.device)
        before = torch.get_rng_state()
        with torch.random.fork_rng([device], device_type=device.type) if device.type != "cpu" else nullcontext():
            torch.manual_seed(0) if device.type != "cpu" else torch.default_generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)  # the stream that functions draw from
            fresh = torch.get_rng_state()
            try:
                yield
            finally:
                self.draws = self.draws or not torch.equal(torch.get_rng_state(), fresh)
                torch.set_rng_state(before)

    def _enter(self, shadow: Shadow, example: Example) -> None:
        """Give the inputs their companions: they are exact, whatever their format.

        Subnormal ones have an absolute error in low precision, and kernels may take those of float32 for zero.
        """
        form = format_of(self.dtype)
        keeps = form.smallest_normal > format_of("float32").smallest_normal
        for tensor in example.floats().values():
            if has_companions(tensor):
                companions = shadow.store.of(tensor)
                companions.unit = min(companions.unit, form.unit_roundoff)
                exact, moved = shadow.store.exact(tensor), shadow.store.moved(tensor)
                small = (exact != 0) & (exact.abs() < form.smallest_normal)
                if bool(small.any()):
                    off = exact + (moved - exact).sign() * MOVE * form.smallest_normal if keeps else exact * 0
                    moved.copy_(torch.where(small, off, moved))

    def _count(self, result: Result, missing: MissingKernels | None) -> None:
        for op, times in (missing.ran if missing is not None else {}).items():
            self.substituted[op] += times
        if result.error is None and not result.outputs:
            self.dropped[f"results without tensors ({result.kind})"] += 1
        for path, tensor in list(result.outputs.items()):
            if tensor.layout is not torch.strided:
                self.dropped[f"outputs of layout {str(tensor.layout).removeprefix('torch.')}"] += 1
            elif not is_plain(tensor):
                self.dropped["outputs that are quantised, nested or on the device meta"] += 1
            else:
                continue
            del result.outputs[path]


def native_format(subject: Subject) -> torch.dtype | None:
    """The 16-bit dtype of most weights, or without weights of a buffer or input; None where autocast makes 16 bits."""
    modules = modules_of(subject.model)
    sizes: Counter[torch.dtype] = Counter()
    for weight in (weight for module in modules for weight in module.parameters()):
        if weight.is_floating_point() and not isinstance(weight, torch.nn.parameter.UninitializedParameter):
            sizes[weight.dtype] += weight.numel()
    if sizes:
        dtype = sizes.most_common(1)[0][0]
        return dtype if dtype.itemsize == 2 else None
    data = [buffer for module in modules for buffer in module.buffers()]
    data += [tensor for call in subject.calls for _, tensor in tensors((call.args, dict(call.kwargs)))]
    return next((t.dtype for t in data if t.is_floating_point() and t.dtype.itemsize == 2), None)


def _result_of(model: Callable[..., Any], example: Example) -> Result:
    try:
        value = forward_through([model], Call(example.args, example.kwargs))
    except UsageError:
        raise
    except BaseException as error:  # noqa: BLE001  # the user's model: its exception is a result
        return Result(error=as_result(error))
    kind = type(value).__name__
    if type(value) in (bool, int) and abs(value) <= _LARGEST_INTEGER:
        value = torch.tensor(value)
    return Result(dict(tensors(_numbers_as_tensors(value))), kind)


def _numbers_as_tensors(value: Any) -> Any:
    """Python floats, alone or in tuples, lists and dicts, are results too: as tensors without dimensions.

    An integer or bool beside tensors is none: it describes them (a count, their bytes), and may differ by dtype.
    """
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if type(value) in (tuple, list):
        return type(value)(_numbers_as_tensors(item) for item in value)
    if type(value) is dict:
        return {key: _numbers_as_tensors(item) for key, item in value.items()}
    return value
