"""`assert_dtypes`: modules and ops give the dtypes that are declared for them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from ampcheck.autocast.asked import cuda_where_asked
from ampcheck.autocast.device import place
from ampcheck.autocast.observe import OpDtype, OpDtypes, check_op_dtypes, observe_ops
from ampcheck.autocast.probe import low_dtype
from ampcheck.autocast.state import short
from ampcheck.checks.dtype.dtype import CHECK as DTYPE
from ampcheck.checks.dtype.dtype import of_modules
from ampcheck.core.arguments import DType
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Finding, Run
from ampcheck.core.subject import Subject, name_of
from ampcheck.outcome.raising import verify
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.restore import restoring


def measure_dtypes(
    model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[dict[str, tuple[str, ...]], int]:
    """Run `model(*args, **kwargs)` once, in the caller's autocast state and grad mode, and record what modules return.

    Returns the dtypes of the floating outputs of every module that ran, by module path (`""` is the root), and how many
    outputs there were. Tuples, dicts, dataclasses and model outputs are followed. The hooks are removed afterwards,
    also when the model raises.
    """
    dtypes: dict[str, dict[str, None]] = {}
    count = 0

    def record(names: list[str], module: torch.nn.Module, inputs: object, output: object) -> None:
        nonlocal count
        for _, tensor in tensors(output):
            if tensor.is_floating_point():
                count += 1
                for name in names:
                    dtypes.setdefault(name, {})[short(tensor.dtype)] = None

    paths: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(name)  # a shared module has several
    with ExitStack() as hooks:
        for module, names in paths.items():
            hooks.callback(module.register_forward_hook(partial(record, names)).remove)
        model(*args, **(kwargs or {}))
    return {name: tuple(of_name) for name, of_name in dtypes.items()}, count


@cuda_where_asked
@restoring
def assert_dtypes(
    model: object,
    inputs: object,
    expected: Mapping[str, torch.dtype | str | None],
    *,
    device: str | None = None,
    dtype: DType | None = None,
    name: str = "",
) -> Run:
    """Assert that modules and ops give the dtypes that `expected` declares for them.

    inputs: the arguments: a tuple, a mapping of keyword arguments, or the one argument. expected: `{pattern: dtype}`.
    A pattern of module paths has `*` for one part of a path and `**` for any number of them (`layers.*.norm`,
    `**.norm`, `""` for the root). A pattern with `::` is one of ops that autocast sees (`aten::softmax` for all of its
    overloads, `aten::softmax.int`, `aten::*norm*`); each such op must also give the same dtype compiled as in eager
    mode, and None declares that alone. A pattern that matches nothing fails.

    dtype: run under autocast to it; None leaves modules to the caller's autocast, and ops take its dtype, bfloat16
    where it is off. device: of autocast; where the machine lacks it, the CPU follows its policy. Without a dtype, call
    it under the autocast that you mean:

        with torch.autocast("cpu", torch.bfloat16):
            assert_dtypes(model, (x,), {"layers.*.norm": torch.float32, "head": torch.bfloat16})

    Returns the run; raises `AssertionError` with every module and op that differs, and `UsageError` for a model that is
    no module where paths are declared, and for an unknown device or dtype.
    """
    __tracebackhide__ = True
    device = device or "cpu"
    if not expected:
        raise UsageError("assert_dtypes needs at least one pattern: with none it would check nothing")
    modules = {key: format_of(wanted).name for key, wanted in expected.items() if "::" not in key}  # type: ignore[arg-type]
    of_ops = {key: wanted for key, wanted in expected.items() if "::" in key}
    ops = {key: None if wanted is None else format_of(wanted).name for key, wanted in of_ops.items()}
    subject = name or (model.name if isinstance(model, Subject) else name_of(model))
    run = Run(environment(), coverage=Coverage())
    if modules:
        run += _judge_modules(model, inputs, modules, subject, device, dtype)
    if ops:
        stats = observe_ops(model, inputs, device=device, dtype=dtype or _callers_dtype(device), name=subject)
        coverage = Coverage({"ops under autocast": len(stats.ops)}, stats.unseen)
        run += Run(findings=tuple(_check_ops(stats, ops)), coverage=coverage, tables=(stats.table(),))
    return verify(run)


def _judge_modules(model: Any, inputs: Any, declared: Mapping[str, str], subject: str, device: str, dtype: Any) -> Run:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"assert_dtypes needs a module, whose parts have paths; found {type(model).__name__}")
    args = () if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else (inputs,)
    kwargs = inputs if isinstance(inputs, Mapping) else None
    placement = place(device)
    low = None if dtype is None else low_dtype(dtype)
    kind = placement.emulated or torch.device(device).type
    with placement.entered(), nullcontext() if low is None else torch.autocast(kind, low):
        dtypes, outputs = measure_dtypes(model, args, kwargs)
    findings = of_modules(subject, dtypes, declared)
    return Run(findings=tuple(findings), coverage=Coverage({"modules": len(dtypes), "outputs": outputs}))


def _callers_dtype(device: str) -> torch.dtype:
    kind = device.partition(":")[0]
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.bfloat16


def _check_ops(stats: OpDtypes, declared: Mapping[str, str | None]) -> list[Finding]:
    """`dtype` of each op in eager mode, and `compiled-dtype` of all that match a pattern."""
    findings: list[Finding] = []
    matching: dict[OpDtype, None] = {}
    for pattern, wanted in declared.items():
        ops = [op for op in stats.ops if _matches(pattern, op.op)]
        matching |= dict.fromkeys(ops)
        results = [op for op in ops if not op.eager_raised]
        wrong = [op for op in results if wanted is not None and any(d not in (wanted, "empty") for d in op.eager)]
        if not results:
            names = ", ".join(sorted({op.op for op in stats.ops})[:8]) or "none"
            message = f"{pattern!r} must match an op that autocast sees and that runs; it matches none ({names}, ...)"
            message += f"; the model raised {stats.raised}" if stats.raised else ""
            findings.append(DTYPE.fail(stats.subject, message, hint="* stands for any part of the name of an op"))
        for op in wrong:
            message = f"{op.op} must give {wanted} ({pattern!r}); with inputs {' '.join(op.inputs)} it gave "
            message += " ".join(op.eager)
            hint = f"see ampcheck policy explain {op.op}; cast its inputs or its result in the model"
            findings.append(DTYPE.fail(stats.subject, message, where=op.where, hint=hint))
        if results and not wrong and wanted is not None:
            message = f"{len(results)} ops that {pattern!r} matches give {wanted}"
            findings.append(DTYPE.passed(stats.subject, message, len(results)))
    return [*findings, *(check_op_dtypes(replace(stats, ops=tuple(matching))) if matching else ())]


def _matches(pattern: str, op: str) -> bool:
    return fnmatchcase(op, pattern) or op.partition(".")[0] == pattern
