"""The audit of a subject: plan its checks, run them in stages, and return one `Run` with the evidence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ampcheck.autocast.asked import on_cpu_or_cuda
from ampcheck.autocast.device import Placement, place
from ampcheck.autocast.emulate import active
from ampcheck.checks.causes import with_causes
from ampcheck.checks.selection import select_checks, with_selected
from ampcheck.compiled.accuracy import checks as accuracy_checks
from ampcheck.compiled.graph import checks as graph_checks
from ampcheck.core.arguments import DType, parse_dtypes, parse_flag, parse_integer
from ampcheck.core.arm import Arm
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.plan import Plan
from ampcheck.core.progress import current_listener
from ampcheck.core.run import Finding, Run, Scalar, Verdict, merge
from ampcheck.core.source import with_excerpts
from ampcheck.core.subject import MODELS, Kind, Subject, as_subject, subject_of
from ampcheck.numerics import native_format
from ampcheck.outcome.raising import verify
from ampcheck.stages import audit_stages, run_stages
from ampcheck.torchtools.batches import played
from ampcheck.torchtools.restore import restoring
from ampcheck.torchtools.source import naming_users_errors
from ampcheck.training.loop import STEPS
from ampcheck.unchanged import audit_unchanged

_FULL_STEPS = 4
"""Times as many steps of a training loop are observed in a full audit."""


def audit(
    subject: object,
    *,
    device: str | None = None,
    dtype: DType | Sequence[DType] | None = None,
    autocast: bool | None = None,
    compile: bool = True,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    name: str = "",
    steps: int | None = None,
    horizon: int | None = None,
) -> Run:
    """Judge a subject in every dtype, eager and compiled, forward and backward.

    subject: a `Subject`, or a value from which one can be built:

    - `(module, args)`: forward and backward against float64.
    - `(module, [args, args])` and `([block, block], [args])`: also the graphs of the compiled subject, and compiled
      against eager code. If `dtype` is omitted, they run in their own dtypes and 16-bit autocast is not checked.
    - a training loop: all training checks and its use of autocast. `steps`: number of observed steps; `horizon`:
      number of planned steps, for `stagnation`; by default 10,000.
    - a callable without arguments: its values, the sums and norms and float32 products among them, against float64, and
      its use of autocast and of compiler caches. One that trains (it steps an optimizer) is judged as a training loop
      too, and ended after `steps` steps, by default 24.

    A loop and a callable run unchanged, but for their compiled functions: they run in eager mode where values are
    followed, as `coverage` then says. Those with compiled functions run once more as they are, and their graphs are
    judged. What they reach is restored after it. Only `device`, `compile`, `checks`, `limits`, `steps` and `horizon`
    apply. If the model is already compiled, eager runs use the original module and compiled runs keep its compile
    options.

    device: if it is not available, its autocast policy is emulated on the CPU, and every finding is labelled so; None
    is the CPU, or CUDA where the code asks for it by `.cuda()`, `torch.autocast("cuda")` or a `GradScaler`.
    Code that was written for CUDA runs as it stands then, see `emulate`; `cuda:3070` names a GPU; what needs CUDA
    itself, such as its own kernels, is `incomplete`.
    dtype: what autocast casts to, by default float16 and bfloat16. autocast: None decides by the model: one with
    16-bit weights or inputs runs without autocast, in its own dtype. compile: also run under `torch.compile`, which
    resets Dynamo. checks: names of checks, all by default; `coverage`, `nonfinite-reference` and whether the subject
    ran at all are always reported; one that does not apply is skipped, with the reason. limits: by default those of
    `[tool.ampcheck]` of the working directory. name: the subject's name in findings.

    Raises `UsageError` for a subject that cannot be judged, an unknown check, a selection of none or of such that judge
    other kinds of subjects alone, and an unknown device or dtype.
    """
    planned: dict[str, Any] = {"compile": compile, "checks": checks, "steps": steps, "horizon": horizon}
    judge = partial(judge_subject, subject, dtype=dtype, autocast=autocast, limits=limits, name=name, **planned)
    # The objects of a loop were made without CUDA: a scaler of it stays off.
    where = "cpu" if device is None and _is_loop(subject) else device
    return on_cpu_or_cuda(lambda there: judge(device=there), where)


def _is_loop(subject: object) -> bool:
    return isinstance(subject.shape if isinstance(subject, Subject) else subject, Mapping)


@restoring
@naming_users_errors
def judge_subject(
    subject: object,
    *,
    dtype: DType | Sequence[DType] | None = None,
    autocast: bool | None = None,
    limits: Limits | None = None,
    name: str = "",
    **planned: Any,
) -> Run:
    """Return what `audit` does. planned: fields of `Plan`, as the user passed them."""
    resolved = subject_of(subject, None, name) if name else as_subject(subject)
    plan, placement = _placed(Plan.of(resolved, limits, **planned))
    plan = _with_arms(plan, dtype, autocast) if resolved.kind in MODELS else _with_steps(plan)
    if resolved.kind in MODELS:
        with placement.entered():
            run = merge(run_stages(resolved.name, audit_stages(plan), current_listener()))
        run = replace(run, findings=tuple(_without_repeats(run.findings)))
    else:
        run = audit_unchanged(plan, placement.entered())
    run = with_selected(run, plan.subject, plan.checks, compiles=plan.compile)
    findings = with_excerpts(with_causes(run.findings))
    return replace(run, findings=findings, environment=_environment(placement), title=f"audit of {resolved.name}")


def _placed(plan: Plan) -> tuple[Plan, Placement]:
    """The plan with values that are checked, and where it runs."""
    subject = plan.subject
    for keyword, count in (("steps", plan.steps), ("horizon", plan.horizon)):
        if count is not None:
            parse_integer(count, keyword)
            if subject.kind in MODELS:
                kind = subject.kind.value
                raise UsageError(f"{keyword} applies to training loops; {subject.name} is of kind '{kind}'")
    parse_flag(plan.compile, "compile")
    checks, placement = select_checks(plan.checks, subject), place(plan.device)
    return replace(plan, checks=checks, device=placement.device, emulated=placement.emulated), placement


def _with_steps(plan: Plan) -> Plan:
    """The plan of a loop, whose batches are read once, or of a callable, with the steps of a full audit."""
    subject, steps = plan.subject, plan.steps
    default = (subject.shape.get("steps") if subject.kind is Kind.TRAINING else None) or STEPS
    parse_integer(default, f"steps of {subject.name}")
    if plan.full and steps is None:
        steps = _FULL_STEPS * default
    if subject.kind is Kind.TRAINING or subject.trains:
        current_listener().training(steps or default)
    if subject.kind is Kind.TRAINING:
        subject = played(subject, steps or default)
    return replace(plan, subject=subject, steps=steps)


def _with_arms(plan: Plan, dtype: DType | Sequence[DType] | None, autocast: bool | None) -> Plan:
    """The plan of a model with its arms: the 16-bit dtypes, eager and compiled, unless graphs alone are judged."""
    subject = plan.subject
    native = None if autocast else native_format(subject)
    if autocast is False and native is None:
        raise UsageError(f"autocast=False needs a model with 16-bit weights or inputs; {subject.name} has none")
    names = set(plan.checks or ())
    of_compiled = plan.compile and subject.kind is not Kind.FORWARD
    graphs_alone = names <= {*accuracy_checks.CHECKS, *graph_checks.COMPILER_CHECKS, "coverage"}
    own_dtypes = of_compiled and dtype is None and not autocast and graphs_alone
    dtypes = () if own_dtypes else _low_dtypes(dtype, plan.device)
    if native is not None:
        dtypes = (format_of(native).name,)
    modes = ("eager", "compiled") if plan.compile else ("eager",)
    of_graphs = plan.graphs or not names.isdisjoint(graph_checks.COMPILER_CHECKS)
    return replace(
        plan,
        arms=tuple(Arm(dtype, mode, native=native is not None) for dtype in dtypes for mode in modes),
        graphs=of_compiled or (plan.compile and of_graphs),
    )


def _without_repeats(findings: Sequence[Finding]) -> list[Finding]:
    """Without a failure that another stage found too and of which it says more: the line, or a setting that helps."""

    def adds(other: Finding, to: Finding) -> bool:
        if (other.check, other.verdict) != (to.check, to.verdict):
            return False
        if other.subject == to.subject and other.where == replace(to.where, op=other.where.op):  # a kernel has many ops
            return other.message != to.message and other.message.startswith(to.message)
        error, same = to.message.rpartition(" raised ")[2], other.message.rpartition(" raised ")[2]
        placed = other.where != to.where == replace(other.where, file="", line=None)
        return placed and error == same and other.subject in (to.subject, to.name)  # worded differently

    failed = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    return [f for f in findings if f.verdict is not Verdict.FAIL or not any(adds(other, f) for other in failed)]


def _environment(placement: Placement) -> dict[str, Scalar]:
    facts = environment(placement.device)
    emulated = placement.emulated or (emulation.policy.device if (emulation := active()) is not None else "")
    return {**facts, "autocast policy": f"{emulated}, emulated"} if emulated else facts


def _low_dtypes(dtype: DType | Sequence[DType] | None, device: str) -> tuple[str, ...]:
    names = parse_dtypes(("float16", "bfloat16") if dtype is None else dtype)
    if torch.device(device).type == "cuda" and "bfloat16" in names and not torch.cuda.is_bf16_supported():
        raise UsageError(f"dtype bfloat16 is not supported by device {device!r}: use dtype='float16'")
    return tuple(names)


def assert_numerics(
    model: object,
    inputs: object = None,
    *,
    device: str | None = None,
    dtype: DType | Sequence[DType] | None = None,
    autocast: bool | None = None,
    compile: bool = True,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    name: str = "",
) -> Run:
    """Assert that `model(*inputs)` is numerically safe in low precision, forward and backward.

    model, inputs: a module or function and its arguments (a tuple, a mapping of keyword arguments, or the one
    argument); or a `Subject` alone, which also takes a loss and declared dtypes. Keywords are those of `audit`. Returns
    the run; raises `AssertionError` with every failure, and `UsageError` as `audit` does.
    """
    __tracebackhide__ = True
    subject = subject_of(model, inputs, name)
    return verify(
        audit(subject, device=device, dtype=dtype, autocast=autocast, compile=compile, checks=checks, limits=limits)
    )
