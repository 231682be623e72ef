"""Which dtypes each op of a model is given, computes in and gives back under autocast, in eager mode and compiled.

The ops are those that reach autocast's dispatch key: with a rule or without, as a whole, before they fall apart into
others. Each runs again by itself with the arguments that the model gave it.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampcheck.autocast.emulate import Emulation, emulated_policy
from ampcheck.autocast.kernels import eligible
from ampcheck.autocast.policy import APPEND_DTYPE, SET_DTYPE, Policy
from ampcheck.autocast.probe import low_dtype
from ampcheck.autocast.state import device_type
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.run import Coverage, Finding, Run, Table, Verdict, Where, passed, verify
from ampcheck.core.subject import Kind, Subject, as_subject
from ampcheck.torchtools.copying import Prepared, forward_through, prepare
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.restore import restoring
from ampcheck.torchtools.source import Scopes, overload, users_line

BATCH = 16
"""Ops that are compiled in one graph; where the graph fails, each of them is compiled alone."""


@dataclass(frozen=True, slots=True)
class OpDtype:
    """One op with tensors of these dtypes.

    op: the overload. rule: autocast's on the device, empty for none. given: the dtypes of its tensors in order of the
    schema. compute: the same as autocast hands them down. eager, compiled: the dtypes of what it gives back, `empty`
    for a tensor without elements; where it raised instead, `eager_raised` and `compiled_raised` say so in one line.
    where: the first place in the model that calls it so.
    """

    op: str
    rule: str
    given: tuple[str, ...]
    compute: tuple[str, ...]
    eager: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    eager_raised: str = ""
    compiled_raised: str = ""
    where: Where = field(default_factory=Where)


@dataclass(frozen=True, slots=True)
class OpDtypes:
    """The ops of a model under autocast to `dtype` on `device`.

    emulated: whether the CPU stood in for the device. ops: each op once for each choice of dtypes, in the order in
    which the model calls them. unavailable: why nothing was compiled; empty where it was. raised: what broke the model
    off. unseen: calls that were left out, reason to count.
    """

    subject: str
    device: str
    dtype: str
    emulated: bool
    ops: tuple[OpDtype, ...]
    unavailable: str = ""
    raised: str = ""
    unseen: Mapping[str, int] = field(default_factory=dict)

    def table(self) -> Table:
        """One row an op."""
        rows = [
            [
                o.op,
                o.rule,
                " ".join(o.given),
                " ".join(o.compute),
                " ".join(o.eager) or o.eager_raised,
                " ".join(o.compiled) or o.compiled_raised,
                str(o.where),
            ]
            for o in self.ops
        ]
        columns = ("op", "rule", "given", "computes in", "eager gives", "compiled gives", "first called in")
        note = f"The CPU stood in for {self.device}." if self.emulated else ""
        return Table(f"Ops of {self.subject} under {self.device} {self.dtype}", columns, rows, "compiled-dtype", note)


@restoring
def observe_ops(
    model: Any,
    inputs: Any = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype | str = "bfloat16",
    compile: bool = True,
    name: str = "subject",
) -> OpDtypes:
    """Run forward on the CPU, then every op that it sent through autocast by itself, in eager mode and compiled.

    model: a module, a callable or several blocks; inputs: what stands beside it in a subject, such as a tuple of
    arguments or a mapping of keyword arguments. A whole subject stands alone. Nothing is changed.
    device: whose autocast policy; where the machine lacks it, the CPU follows its policy. dtype: what autocast casts
    to. compile: run Inductor too. Raises `UsageError` for an unknown device or dtype, or for what is no subject of
    the kinds forward, compile and regional.
    """
    subject = as_subject(model if inputs is None else (model, inputs), name)
    if subject.kind in (Kind.TRAINING, Kind.CALL):
        raise UsageError(f"{subject.name} is of kind '{subject.kind.value}': its ops can be observed through its model")
    kind, low = device_type(device), low_dtype(dtype)
    policy = emulated_policy(kind, low)
    calls, raised, unseen = _record(subject, policy, low)
    emulated = kind != "cpu" and not _present(kind)
    unavailable = "" if compile else "compile=False"
    with torch.no_grad(), _under(policy, low, emulated), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that are deprecated or slow
        if not emulated:
            calls = [replace(call, args=_moved(call.args, kind), kwargs=_moved(call.kwargs, kind)) for call in calls]
        calls = [call.with_eager() for call in calls]
        unavailable = unavailable or _no_compiler(kind if not emulated else "cpu")
        if not unavailable:
            calls = _compiled(calls)
    dtype_name = str(low).removeprefix("torch.")
    found = tuple(call.found for call in calls)
    return OpDtypes(subject.name, kind, dtype_name, emulated, found, unavailable, raised, unseen)


def check_op_dtypes(stats: OpDtypes) -> list[Finding]:
    """Whether every op gives the same dtypes compiled as in eager mode, and both accept the same."""
    check = "compiled-dtype"
    if stats.unavailable and stats.ops:
        return [Finding(check, Verdict.SKIP, stats.subject, f"nothing was compiled: {stats.unavailable}")]
    findings = []
    for op in stats.ops:
        call = f"{op.op} given {' '.join(op.given)}"
        if op.eager_raised and op.compiled_raised:
            continue
        if op.eager_raised or op.compiled_raised:
            one, other = ("in eager mode", "compiled") if op.eager_raised else ("compiled", "in eager mode")
            reason = op.eager_raised or op.compiled_raised
            message = f"what runs {other} must run {one}: {call} raised {one}, and did not {other}: {reason}"
            hint = "bring its arguments to one dtype before the call"
            findings.append(Finding(check, Verdict.WARN, stats.subject, message, op.where, hint=hint))
        elif op.eager != op.compiled:
            message = (
                f"a compiled op must give the dtypes of eager mode under autocast: {call} gave {' '.join(op.eager)} "
                f"in eager mode and {' '.join(op.compiled)} compiled"
            )
            hint = "cast its result where the dtype matters, or call it with autocast disabled"
            findings.append(Finding(check, Verdict.FAIL, stats.subject, message, op.where, hint=hint))
    both = sum(bool(not op.eager_raised and not op.compiled_raised) for op in stats.ops)
    if not both:
        reason = f"the model raised {stats.raised}" if stats.raised else "which proves nothing"
        message = f"ops must be seen in eager mode and compiled: none was, {reason}"
        findings.append(Finding(check, Verdict.FAIL, stats.subject, message))
    elif stats.raised:
        message = f"the whole model must be seen: it raised after {len(stats.ops)} ops: {stats.raised}"
        findings.append(Finding(check, Verdict.WARN, stats.subject, message))
    if not any(finding.verdict is Verdict.FAIL for finding in findings):
        message = f"{both} ops give the same dtypes compiled as in eager mode"
        findings.append(passed(check, stats.subject, message, both, observed=both, unit="ops"))
    return findings


def assert_op_dtypes(
    model: Any, inputs: Any = None, *, device: str = "cpu", dtype: torch.dtype | str = "bfloat16", name: str = "subject"
) -> Run:
    """Raise `AssertionError` where an op of the model gives another dtype compiled than in eager mode."""
    __tracebackhide__ = True
    stats = observe_ops(model, inputs, device=device, dtype=dtype, name=name)
    coverage = Coverage({"ops under autocast": len(stats.ops)}, stats.unseen)
    return verify(Run(environment(), tuple(check_op_dtypes(stats)), coverage, (stats.table(),)))


@dataclass(frozen=True, slots=True)
class _Call:
    """An op with the arguments that the model gave it, detached."""

    found: OpDtype
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return overload(self.found.op)(*self.args, **self.kwargs)

    def with_eager(self) -> _Call:
        try:
            return replace(self, found=replace(self.found, eager=_dtypes(self.run())))
        except Exception as error:  # noqa: BLE001  # that it raises is what is told
            return replace(self, found=replace(self.found, eager_raised=brief(error)))


def _record(subject: Subject, policy: Policy, low: torch.dtype) -> tuple[list[_Call], str, Mapping[str, int]]:
    """The calls of a forward run, each op once for each choice of dtypes; what the model raised; what was left out."""
    found: dict[tuple[Any, ...], _Call] = {}
    unseen: Counter[str] = Counter()
    names = _called(prepare(subject), low, policy)
    prepared = prepare(subject)
    scopes = Scopes(prepared.root)
    outside = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def observe(op: str, rule: str, args: tuple[Any, ...], kwargs: dict[str, Any], cast: torch.dtype | None) -> None:
        given = [tensor for _, tensor in tensors((args, kwargs))]
        wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        key = (op, *(tensor.dtype for tensor in given), *wanted)
        if key in found or not any(tensor.is_floating_point() for tensor in given):
            return
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in given):
            unseen["a call with a subclass of Tensor"] += 1
            return
        module, _ = scopes.current
        file, line = users_line(sys._getframe())
        handed = torch.float32 if rule in (SET_DTYPE, APPEND_DTYPE) and eligible(args[0], "cpu") else cast
        compute = [handed if handed is not None and eligible(tensor, "cpu") else tensor.dtype for tensor in given]
        where = Where(phase="forward", module=module, op=op, file=file, line=line)
        told = OpDtype(op, rule, _names([tensor.dtype for tensor in given]), _names(compute), where=where)
        with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(outside):  # else it would see its own calls
            held = map_tensors(lambda tensor: tensor.detach().clone(), (args, kwargs))
        found[key] = _Call(told, *held)

    with scopes.watched():
        emulation = Emulation(policy, observe=observe, also=names)
        raised = _run(prepared, low, emulation)
    return list(found.values()), raised, unseen


def _run(prepared: Prepared, low: torch.dtype, emulation: Emulation) -> str:
    """Forward; what it raised."""
    with warnings.catch_warnings(), emulation, torch.autocast("cpu", low):
        warnings.simplefilter("ignore")
        try:
            for call in prepared.calls:
                forward_through(prepared.blocks, call)
        except BaseException as error:  # noqa: BLE001  # the user's model: what ran before counts
            return brief(as_result(error))
    return ""


def _called(prepared: Prepared, low: torch.dtype, policy: Policy) -> list[str]:
    """The functional overloads of the ops that the model itself calls, not of those that ops are made of.

    What an op is made of has results for PyTorch's own use: the statistics that a norm saves for backward.
    """
    from torch.autograd.profiler_legacy import profile  # the newer one writes to the terminal

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile() as seen:  # type: ignore[no-untyped-call]
            _run(prepared, low, Emulation(policy))
    packets = {event.name for event in seen.function_events or () if "::" in event.name and not _inside_op(event)}
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.partition(".")[0] in packets]
    return [name for name in names if torch._C._dispatch_has_kernel(name) and _is_function(name)]


def _inside_op(event: Any) -> bool:
    parent = event.cpu_parent
    return parent is not None and ("::" in parent.name or _inside_op(parent))


def _is_function(name: str) -> bool:
    """Whether an op makes new tensors from others: what writes, or gives a view, has no dtype of its own."""
    try:
        schema = overload(name)._schema
    except (AttributeError, RuntimeError):  # an overload for TorchScript alone
        return False
    aliases = [*schema.arguments, *schema.returns]
    return not schema.is_mutable and all(value.alias_info is None for value in aliases)


@contextmanager
def _under(policy: Policy, low: torch.dtype, emulated: bool) -> Iterator[None]:
    if emulated or policy.device == "cpu":
        with Emulation(policy, low):
            yield
    else:
        with torch.autocast(policy.device, low):
            yield


def _compiled(calls: Sequence[_Call]) -> list[_Call]:
    """With what each call gives compiled: several in one graph where all of them compile, otherwise each alone."""
    done: dict[int, _Call] = {}
    healthy = [number for number, call in enumerate(calls) if not call.found.eager_raised]
    for begin in range(0, len(healthy), BATCH):
        numbers = healthy[begin : begin + BATCH]
        try:
            results = _in_one_graph([calls[number] for number in numbers])
        except Exception:  # noqa: BLE001  # one of them does; which, is found below
            continue
        for number, result in zip(numbers, results, strict=True):
            call = calls[number]
            done[number] = replace(call, found=replace(call.found, compiled=_dtypes(result)))
    for number, call in enumerate(calls):
        if number not in done:
            try:
                (result,) = _in_one_graph([call])
                done[number] = replace(call, found=replace(call.found, compiled=_dtypes(result)))
            except Exception as error:  # noqa: BLE001  # that it raises is what is told
                done[number] = replace(call, found=replace(call.found, compiled_raised=brief(error)))
    return [done[number] for number in range(len(calls))]


def _in_one_graph(calls: Sequence[_Call]) -> list[Any]:
    """What the ops give, compiled together by Inductor without a graph break."""
    ops: list[Callable[..., Any]] = [overload(call.found.op) for call in calls]

    def together(given: list[tuple[Any, Any]]) -> list[Any]:
        return [op(*args, **kwargs) for op, (args, kwargs) in zip(ops, given, strict=True)]

    torch._dynamo.reset()  # else the limit of recompiles would fall on our batches
    made = torch.compile(together, fullgraph=True, dynamic=False)
    results: list[Any] = made([(call.args, call.kwargs) for call in calls])
    return results


def _no_compiler(device: str) -> str:
    """Why Inductor does not work here; empty where it does."""
    try:
        torch._dynamo.reset()
        torch.compile(torch.neg, fullgraph=True)(torch.zeros(1, device=device))
    except Exception as error:  # noqa: BLE001  # each missing part raises something else
        return f"torch.compile does not work here: {brief(error)}"
    return ""


def _present(device: str) -> bool:
    module = getattr(torch, device, None)
    return module is not None and bool(module.is_available())


def _moved(value: Any, device: str) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), value)


def _dtypes(result: Any) -> tuple[str, ...]:
    """Of every tensor that holds something: batch norm in evaluation returns two empty ones besides."""
    held = [tensor for _, tensor in tensors(result)]
    return tuple(_names([tensor.dtype])[0] if tensor.numel() else "empty" for tensor in held)


def _names(dtypes: Sequence[torch.dtype]) -> tuple[str, ...]:
    return tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
