"""The dtypes of each op under autocast: of its inputs, of its computation and of its result, eager and compiled.

The ops are those that reach autocast's dispatch key: with a rule or without, as a whole, before they decompose. Each
runs again by itself with the arguments that the model gave it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ampcheck.autocast.device import is_present
from ampcheck.autocast.emulate import Emulation, emulated_policy
from ampcheck.autocast.kernels import eligible
from ampcheck.autocast.probe import low_dtype
from ampcheck.autocast.state import device_type, short
from ampcheck.checks.compile.compiled_dtype import CHECK as COMPILED_DTYPE
from ampcheck.core.environment import quiet
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.run import Finding, Table, Verdict, Where
from ampcheck.core.subject import Kind, Subject, as_subject
from ampcheck.records.policy import APPEND_DTYPE, SET_DTYPE, Policy
from ampcheck.torchtools.copying import Prepared, forward_through, prepare
from ampcheck.torchtools.dynamo import reset
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.private import DispatchKey, DispatchKeySet, excluding_keys, has_kernel, op_names
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.restore import restoring
from ampcheck.torchtools.source import Scopes, overload, users_line

BATCH = 16
"""Ops that are compiled in one graph; where the graph fails, each of them is compiled alone."""


@dataclass(frozen=True, slots=True)
class OpDtype:
    """One op with tensors of these dtypes.

    op: the overload. rule: autocast's on the device, empty for none. inputs: the dtypes of its tensors in order of the
    schema. compute: the same as autocast passes them on. eager, compiled: the dtypes of its results, `empty` for a
    tensor without elements; where it raised instead, `eager_raised` and `compiled_raised` have the message. where: the
    first call in the model with these dtypes.
    """

    op: str
    rule: str
    inputs: tuple[str, ...]
    compute: tuple[str, ...]
    eager: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    eager_raised: str = ""
    compiled_raised: str = ""
    where: Where = field(default_factory=Where)


@dataclass(frozen=True, slots=True)
class OpDtypes:
    """The ops of a model under autocast to `dtype` on `device`.

    emulated: whether the CPU followed the policy of an absent device. ops: each op once for each choice of dtypes, in
    the order of the model's calls. unavailable: why nothing was compiled; empty where it was. raised: the exception
    that ended the model early. unseen: calls that were left out, reason to count.
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
        rows = []
        for op in self.ops:
            results = " ".join(op.eager) or op.eager_raised, " ".join(op.compiled) or op.compiled_raised
            rows.append([op.op, op.rule, " ".join(op.inputs), " ".join(op.compute), *results, str(op.where)])
        columns = ("op", "rule", "inputs", "computes in", "eager result", "compiled result", "first called in")
        note = f"The CPU followed the policy of {self.device}." if self.emulated else ""
        title = f"Ops of {self.subject} under {self.device} {self.dtype}"
        return Table(title, columns, rows, COMPILED_DTYPE.slug, note)


@restoring
def observe_ops(
    model: object,
    inputs: object = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype | str = "bfloat16",
    compile: bool = True,
    name: str = "subject",
) -> OpDtypes:
    """Run forward on the CPU, then every op that it sent through autocast by itself, in eager mode and compiled.

    model: a module, a callable or several blocks; inputs: the second part of the subject, such as a tuple of arguments
    or a mapping of keyword arguments; None where `model` is a whole subject. Nothing is changed. device: whose autocast
    policy; where the machine lacks it, the CPU follows its policy. dtype: what autocast casts to. compile: run Inductor
    too. Raises `UsageError` for an unknown device or dtype, or for what is no subject of the kinds forward, compile and
    regional.
    """
    subject = as_subject(model if inputs is None else (model, inputs), name)
    if subject.kind in (Kind.TRAINING, Kind.CALL):
        raise UsageError(f"{subject.name} is of kind '{subject.kind.value}': its ops can be observed through its model")
    kind, low = device_type(device), low_dtype(dtype)
    policy = emulated_policy(kind, low)
    emulated = kind != "cpu" and not is_present(kind)
    calls, raised, unseen = _record(subject, policy, low)
    context = Emulation(policy, low) if emulated or kind == "cpu" else torch.autocast(kind, low)
    with torch.no_grad(), context, quiet():  # of kernels that are deprecated or slow
        if not emulated:
            on_device = partial(map_tensors, lambda tensor: tensor.to(kind))
            calls = [_Call(call.op, *on_device((call.args, call.kwargs))) for call in calls]
        ops = [_eager(call) for call in calls]
        unavailable = "compile=False" if not compile else no_compiler("cpu" if emulated else kind)
        if not unavailable:
            ops = _compiled(calls, ops)
    return OpDtypes(subject.name, kind, short(low), emulated, tuple(ops), unavailable, raised, unseen)


def check_op_dtypes(stats: OpDtypes) -> list[Finding]:
    """Return whether every op gives the same dtypes compiled as in eager mode, and both accept the same."""
    if stats.unavailable and stats.ops:
        return [COMPILED_DTYPE.skip(stats.subject, f"nothing was compiled: {stats.unavailable}")]
    findings = []
    both = 0
    for op in stats.ops:
        call = f"{op.op} with inputs {' '.join(op.inputs)}"
        if op.eager_raised and op.compiled_raised:
            continue
        if op.eager_raised or op.compiled_raised:
            raises, runs = ("in eager mode", "compiled") if op.eager_raised else ("compiled", "in eager mode")
            reason = op.eager_raised or op.compiled_raised
            message = f"what runs {runs} must run {raises}: {call} raised {raises}, and did not {runs}: {reason}"
            findings.append(COMPILED_DTYPE.warn(stats.subject, message, where=op.where, hint=COMPILED_DTYPE.fix))
            continue
        both += 1
        if op.eager != op.compiled:
            message = (
                f"a compiled op must give the dtypes of eager mode under autocast: {call} gave {' '.join(op.eager)} "
                f"in eager mode and {' '.join(op.compiled)} compiled"
            )
            findings.append(COMPILED_DTYPE.fail(stats.subject, message, where=op.where, hint=COMPILED_DTYPE.fix))
    if not both:
        reason = f"the model raised {stats.raised}" if stats.raised else "which proves nothing"
        message = f"ops must be seen in eager mode and compiled: none was, {reason}"
        findings.append(COMPILED_DTYPE.fail(stats.subject, message))
    elif stats.raised:
        message = f"the whole model must be seen: it raised after {len(stats.ops)} ops: {stats.raised}"
        findings.append(COMPILED_DTYPE.warn(stats.subject, message))
    if not any(finding.verdict is Verdict.FAIL for finding in findings):
        message = f"{both} ops give the same dtypes compiled as in eager mode"
        findings.append(COMPILED_DTYPE.passed(stats.subject, message, both, observed=both, unit="ops"))
    return findings


@dataclass(frozen=True, slots=True)
class _Call:
    """An op with the arguments that the model gave it, detached. op: without results so far."""

    op: OpDtype
    args: tuple[object, ...]
    kwargs: dict[str, object]


def _record(subject: Subject, policy: Policy, low: torch.dtype) -> tuple[list[_Call], str, Mapping[str, int]]:
    """The calls of a forward run, each op once for each choice of dtypes; the exception; the calls left out."""
    calls: dict[tuple[object, ...], _Call] = {}
    unseen: Counter[str] = Counter()
    names = _called(prepare(subject), low, policy)
    prepared = prepare(subject)
    scopes = Scopes(prepared.root)
    outside = DispatchKeySet(DispatchKey.AutocastCPU)

    def observe(op: str, rule: str, args: Any, kwargs: dict[str, Any], cast: torch.dtype | None) -> None:
        inputs = [tensor for _, tensor in tensors((args, kwargs))]
        dtype_arguments = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        key = (op, *(tensor.dtype for tensor in inputs), *dtype_arguments)
        if key in calls or not any(tensor.is_floating_point() for tensor in inputs):
            return
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in inputs):
            unseen["a call with a subclass of Tensor"] += 1
            return
        target = torch.float32 if rule in (SET_DTYPE, APPEND_DTYPE) and eligible(args[0]) else cast
        compute = [target if target is not None and eligible(tensor) else tensor.dtype for tensor in inputs]
        where = Where("forward", scopes.current, op, *users_line(sys._getframe()))
        dtypes = tuple(short(tensor.dtype) for tensor in inputs)
        record = OpDtype(op, rule, dtypes, tuple(map(short, compute)), where=where)
        with torch.no_grad(), excluding_keys(outside):  # else it would see its own calls
            calls[key] = _Call(record, *map_tensors(lambda tensor: tensor.detach().clone(), (args, kwargs)))

    with scopes.watched():
        raised = _run(prepared, low, Emulation(policy, observe=observe, also=names))
    return list(calls.values()), raised, unseen


def _run(prepared: Prepared, low: torch.dtype, emulation: Emulation) -> str:
    """Forward; the message of its exception."""
    with quiet(), emulation, torch.autocast("cpu", low):
        try:
            for call in prepared.calls:
                with preserved_state():
                    forward_through(prepared.blocks, call)
        except BaseException as error:  # noqa: BLE001  # the user's model: earlier ops count
            return brief(as_result(error))
    return ""


def _called(prepared: Prepared, low: torch.dtype, policy: Policy) -> list[str]:
    """The functional overloads of the ops that the model itself calls, not of those that ops are made of.

    The latter have results for PyTorch's own use, such as the statistics that a norm saves for backward.
    """
    from torch.autograd.profiler_legacy import profile  # the newer one writes to the terminal

    with quiet(), profile() as profiled:  # type: ignore[no-untyped-call]
        _run(prepared, low, Emulation(policy))
    events = profiled.function_events or ()
    packets = {event.name for event in events if "::" in event.name and not _inside_op(event)}
    names = [name for name in op_names() if name.partition(".")[0] in packets]
    return [name for name in names if has_kernel(name) and _is_functional(name)]


def _inside_op(event: Any) -> bool:
    parent = event.cpu_parent
    return parent is not None and ("::" in parent.name or _inside_op(parent))


def _is_functional(name: str) -> bool:
    """Return whether an op makes new tensors: one that writes, or returns a view, has no dtype of its own."""
    with suppress(AttributeError, RuntimeError):  # an overload for TorchScript alone
        schema = overload(name)._schema
        return not schema.is_mutable and all(v.alias_info is None for v in (*schema.arguments, *schema.returns))
    return False


def _eager(call: _Call) -> OpDtype:
    try:
        return replace(call.op, eager=_dtypes(overload(call.op.op)(*call.args, **call.kwargs)))
    except Exception as error:  # noqa: BLE001  # that it raises is a result
        return replace(call.op, eager_raised=brief(error))


def _compiled(calls: Sequence[_Call], ops: Sequence[OpDtype]) -> list[OpDtype]:
    """The ops with their compiled dtypes: several in one graph where all of them compile, otherwise each alone."""
    results: dict[int, OpDtype] = {}

    def compile_together(numbers: Sequence[int]) -> None:
        outputs = _in_one_graph([calls[number] for number in numbers])
        for number, output in zip(numbers, outputs, strict=True):
            results[number] = replace(ops[number], compiled=_dtypes(output))

    healthy = [number for number, op in enumerate(ops) if not op.eager_raised]
    for begin in range(0, len(healthy), BATCH):
        try:
            compile_together(healthy[begin : begin + BATCH])
        except Exception:  # noqa: BLE001, PERF203  # by one of them, which the next loop finds
            continue
    for number, op in enumerate(ops):
        if number not in results:
            try:
                compile_together([number])
            except Exception as error:  # noqa: BLE001  # that it raises is a result
                results[number] = replace(op, compiled_raised=brief(error))
    return [results[number] for number in range(len(ops))]


def _in_one_graph(calls: Sequence[_Call]) -> list[object]:
    """The results of the ops, compiled together by Inductor without a graph break."""
    ops: list[Callable[..., object]] = [overload(call.op.op) for call in calls]

    def together(arguments: list[tuple[Any, Any]]) -> list[object]:
        return [op(*args, **kwargs) for op, (args, kwargs) in zip(ops, arguments, strict=True)]

    reset()  # else our batches would reach the limit of recompiles
    compiled: Callable[..., list[object]] = torch.compile(together, fullgraph=True, dynamic=False)
    return compiled([(call.args, call.kwargs) for call in calls])


def no_compiler(device: str) -> str:
    """Why Inductor does not work on a device here; empty where it does."""
    try:
        reset()
        torch.compile(torch.neg, fullgraph=True)(torch.zeros(1, device=device))
    except Exception as error:  # noqa: BLE001  # each missing part raises something else
        return f"torch.compile does not work here: {brief(error)}"
    return ""


def _dtypes(result: object) -> tuple[str, ...]:
    """Of every tensor; one without elements is `empty`: batch norm in evaluation returns two such tensors besides."""
    return tuple(short(tensor.dtype) if tensor.numel() else "empty" for _, tensor in tensors(result))
