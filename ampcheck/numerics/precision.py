"""Did the values keep their digits, and did they run at all? Pure functions from `NumericsStats` to findings."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ampcheck.formats import format_of
from ampcheck.globs import matches
from ampcheck.numerics.findings import gradient_module, not_reached, passed, who
from ampcheck.numerics.ops import OpFacts
from ampcheck.numerics.stats import NumericsStats, TensorError
from ampcheck.record import Finding, Verdict, Where
from ampcheck.settings import Limits


def check_low_precision_error(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """What runs in float32 runs in low precision too."""
    slug = "compiled-exception" if stats.compiled else "low-precision-error"
    if stats.raised is None:
        return [passed(stats, slug, "forward and backward ran to the end", None, None)]
    narrow = "compiled" if stats.compiled else stats.format
    message = f"what runs {'in eager' if stats.compiled else 'in float32'} must run {narrow}; {stats.raised.message}"
    hint = (
        "reproduce with torch.compile(model, backend='aot_eager') to tell Inductor from tracing"
        if stats.compiled
        else "make the operands' dtypes meet with an explicit .to(), take constants from torch.finfo(x.dtype), "
        "and leave in-place and out= variants to tensors that autocast does not touch"
    )
    return [Finding(slug, Verdict.FAIL, who(stats), message, stats.raised.where, hint=hint)]


def check_precision_loss(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Outputs and gradients lie no further from float64 than rounding explains; module outputs tell where it began.

    See `NumericsStats.error_limit` for the limit. Where a discrete decision (a topk, a mask) fell otherwise before
    the first excess, the values beyond are other quantities: a warning. So is a tensor that agrees with float64 to
    less than two bits although rounding explains it.
    """
    check = "precision-loss"
    if skipped := not_reached(stats, check):
        return [skipped]
    if not stats.comparable:
        text = "the model draws random numbers, and compiled code draws others than eager code: not comparable"
        return [Finding(check, Verdict.SKIP, who(stats), text)]
    if not stats.errors:
        return [Finding(check, Verdict.SKIP, who(stats), "no floating output or gradient to compare")]
    found = []
    for kind in ("output", "gradient"):
        excess = [e for e in stats.errors if e.kind == kind and stats.beyond(e, limits.precision) and not e.nonfinite]
        if excess:
            found.append(_lost(stats, kind, excess, limits))
    blurred = [
        e
        for e in stats.errors
        if e.kind == "output" and e.known and 0.25 < e.error <= stats.error_limit(e, limits.precision)
    ]
    if blurred and not found:
        worst = max(blurred, key=lambda e: e.error)
        message = (
            f"{_named(worst)} agrees with {stats.reference} to {worst.error:.2g} only; rounding explains it, since the "
            f"model amplifies a rounding of its data {worst.sensitivity / stats.unit_roundoff:.0f}x"
        )
        hint = "keep the part of the model that amplifies in float32"
        found.append(
            Finding(
                check,
                Verdict.WARN,
                who(stats),
                message,
                Where(phase="forward"),
                worst.error,
                0.25,
                "relative error",
                hint,
            )
        )
    if found:
        return found
    judged = [e for e in stats.errors if e.known and e.kind != "module"]
    if not judged:
        text = f"not even float32 knows the {len(stats.errors)} tensors to the digits of {stats.format}"
        return [Finding(check, Verdict.SKIP, who(stats), text)]
    worst = max(judged, key=lambda e: e.error / stats.error_limit(e, limits.precision))
    text = f"at most {worst.error:.2g} from {stats.reference}, in {_named(worst)}"
    limit = stats.error_limit(worst, limits.precision)
    return [passed(stats, check, text, worst.error, limit, "relative error")]


def _lost(stats: NumericsStats, kind: str, excess: list[TensorError], limits: Limits) -> Finding:
    worst = max(excess, key=lambda e: e.error / stats.error_limit(e, limits.precision))
    limit = stats.error_limit(worst, limits.precision)
    total = sum(e.kind == kind for e in stats.errors)
    first = _first_beyond(stats, limits)
    message = (
        f"{kind}s must lie within {limit:.2g} of {stats.reference} ({limits.precision:g} standard deviations of "
        f"rounding in {stats.format}, with {stats.chain} roundings in a row and a sensitivity of "
        f"{worst.sensitivity:.2g}); "
        f"{_named(worst)} lies {worst.error:.2g} away, and {len(excess)} of {total} are beyond their limit"
    )
    where = Where(phase="backward" if kind == "gradient" else "forward")
    if kind == "gradient":
        where = Where(phase="backward", module=gradient_module(worst.name))
    elif first is not None:
        where = Where(phase="forward", module=first.name.partition(":")[0].partition("[")[0])
        message += f"; the first module beyond its limit is {first.name or '(the root)'}"
    hint = "keep this module in float32, or reorder it: subtract before rounding, accumulate in float32, rescale"
    if (op := _inexact_op(stats, where.phase, limits)) is not None:
        message += (
            f"; {op.where.op.removeprefix('aten::')} in {op.where.module or '(the root)'} alone lies {op.error:.2g} "
            f"from float64 on the same inputs ({op.where.file}:{op.where.line})"
        )
        hint = "an op that is wrong on its own inputs is a kernel's defect: try another backend for it, and report it"
    verdict = Verdict.FAIL
    if flip := stats.flipped(limits.precision):
        verdict = Verdict.WARN
        message += (
            f"; {flip.changed:,} of {flip.numel:,} decisions of {flip.where.op.removeprefix('aten::')} in "
            f"{flip.where.module or '(the root)'} fell otherwise, which rounding explains, and what follows is another "
            f"quantity"
        )
        hint = "compute the scores that are decided upon in float32"
    return Finding("precision-loss", verdict, who(stats), message, where, worst.error, limit, "relative error", hint)


def _first_beyond(stats: NumericsStats, limits: Limits) -> TensorError | None:
    modules = [e for e in stats.errors if e.kind == "module"]
    return next((e for e in sorted(modules, key=lambda e: e.order) if stats.beyond(e, limits.precision)), None)


def _inexact_op(stats: NumericsStats, phase: str, limits: Limits) -> OpFacts | None:
    """The op that is furthest from float64 on its own inputs, if one rounding of its result does not explain it."""
    worst = max((op for op in stats.ops if op.where.phase == phase), key=lambda op: op.error, default=None)
    # One op rounds its result once; 16 unit roundoffs leave room for kernels that round their sums in pieces.
    return worst if worst is not None and worst.error > 8 * limits.precision * stats.unit_roundoff else None


def _named(error: TensorError) -> str:
    return f"{error.kind} {error.name}".strip()


def check_loss_dtype(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """A loss of 16 bits has two or three digits: a warning."""
    check = "loss-dtype"
    if skipped := not_reached(stats, check):
        return [skipped]
    if stats.compiled:
        return []
    if not stats.losses:
        return [Finding(check, Verdict.SKIP, who(stats), "the subject gives no loss of its own")]
    low = [dtype for dtype in stats.losses if format_of(dtype).bits <= 16]
    if not low:
        return [passed(stats, check, f"the loss is {stats.losses[0]}", None, None)]
    digits = -math.log10(format_of(low[0]).unit_roundoff)
    message = f"a loss must be float32; it is {low[0]}, with {digits:.1f} decimal digits"
    hint = "compute the loss from output.float(), or under torch.autocast(enabled=False)"
    return [Finding(check, Verdict.WARN, who(stats), message, Where(phase="forward"), hint=hint)]


def check_declared_dtypes(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """The modules that the subject declares a dtype for give that dtype."""
    check = "dtype"
    if not stats.declared_dtypes or stats.compiled:
        return []
    if skipped := not_reached(stats, check):
        return [skipped]
    return check_dtypes(who(stats), stats.module_dtypes, stats.declared_dtypes)


def check_dtypes(subject: str, seen: Mapping[str, tuple[str, ...]], declared: Mapping[str, str]) -> list[Finding]:
    """Module outputs have the declared dtypes; a pattern that no module with a floating output matches fails."""
    found = []
    for pattern, wanted in declared.items():
        matching = {module: dtypes for module, dtypes in seen.items() if matches(pattern, module)}
        wrong = {module: dtypes for module, dtypes in matching.items() if set(dtypes) != {wanted}}
        if not matching:
            names = ", ".join(sorted(seen)[:8]) or "none"
            message = f"{pattern!r} must match a module that gives a floating output; it matches none ({names}, ...)"
            hint = "* stands for one part of a path, ** for any number of them"
            found.append(Finding("dtype", Verdict.FAIL, subject, message, hint=hint))
        for module, dtypes in wrong.items():
            message = f"{module or '(the root)'} must give {wanted} ({pattern!r}); it gave {', '.join(dtypes)}"
            hint = "look for a float32 parameter or constant that promotes the result, or for a missing .to(x.dtype)"
            found.append(Finding("dtype", Verdict.FAIL, subject, message, Where("forward", module), hint=hint))
        if matching and not wrong:
            text = f"{len(matching)} modules that {pattern!r} matches give {wanted}"
            found.append(Finding("dtype", Verdict.PASS, subject, text))
    return found


def check_coverage(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Something was looked at. Nothing looked at is a failure."""
    check = "coverage"
    total = stats.coverage.total
    unseen = "; ".join(f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items())
    if stats.compiled and not stats.graphs and stats.raised is None:
        message = "a compiled run must compile something; torch.compile made no graph and everything ran eager"
        hint = "see TORCH_LOGS=graph_breaks, and whether the model is excluded by torch._dynamo.disable"
        return [Finding(check, Verdict.FAIL, who(stats), message, Where(phase="compile"), 0.0, 1.0, "graphs", hint)]
    if not total and stats.raised is None:
        message = "a verdict needs evidence; no op, tensor or gradient was looked at"
        hint = "give inputs with which the model computes something"
        return [
            Finding(check, Verdict.FAIL, who(stats), message, observed=0.0, limit=1.0, unit="observations", hint=hint)
        ]
    text = f"looked at {stats.coverage}" + (f"; not looked at: {unseen}" if unseen else "")
    if stats.no_backward:
        text += f"; no backward: {stats.no_backward}"
    return [Finding(check, Verdict.PASS, who(stats), text, observed=float(total), limit=1.0, unit="observations")]
