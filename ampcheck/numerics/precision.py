"""Did the values keep their digits? Pure functions from `NumericsStats` to findings."""

from __future__ import annotations

import math

from ampcheck.catalog.numerics import PRECISION_LOSS
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.numerics.arms import UNCOMPARED
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.findings import incomplete, not_reached, passed, who
from ampcheck.numerics.stats import LOST, NumericsStats, TensorError, gradient_module


def check_precision_loss(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Outputs and gradients lie no further from float64 than rounding explains; module outputs tell where it began.

    See `NumericsStats.error_limit` for the limit. Where a discrete decision (a topk, a mask) fell otherwise before
    the first excess, the values beyond are other quantities: a warning. An output that agrees with float64 to less
    than two bits fails whatever explains it.
    """
    check = PRECISION_LOSS
    if skipped := not_reached(stats, check):
        return [skipped]
    if not stats.comparable:
        text = "the model draws random numbers, and compiled code draws others than eager code: not comparable"
        return [check.skip(who(stats), text)]
    if stats.unrepeated > stats.unit_roundoff:
        text = (
            f"two runs in {stats.reference} with equal seeds lie {stats.unrepeated:.2g} apart: nothing to compare with"
        )
        hint = "draw random numbers from the generators of PyTorch, numpy or Python, and keep clocks out of forward"
        return [incomplete(stats, check, text, hint)]
    if not any(e.kind == "output" for e in stats.errors):
        hint = "let the factory's model return the tensors that matter; what a model keeps to itself is not compared"
        reason = UNCOMPARED if UNCOMPARED in stats.coverage.unseen else "no floating tensor"
        return [incomplete(stats, check, f"the subject returns {reason}, so no output was compared", hint)]
    found = []
    if (misplaced := [e for e in stats.errors if e.misplaced]) and not stats.flipped(limits.precision):
        found.append(_misplaced(stats, misplaced))
    for kind in ("output", "gradient"):
        excess = [e for e in stats.errors if e.kind == kind and stats.beyond(e, limits.precision)]
        excess = [e for e in excess if not e.nonfinite and not e.misplaced]
        coarse = [e for e in excess if stats.coarse_kernel(e, limits.precision)]
        if coarse:
            found.append(_coarse(stats, coarse, limits))
        if len(coarse) < len(excess):
            found.append(_lost(stats, kind, [e for e in excess if e not in coarse], limits))
    if found:
        return found
    if any(e.nonfinite for e in stats.errors):
        text = "values that are inf or NaN have no error: see overflow and nonfinite-gradient"
        return [check.skip(who(stats), text)]
    if (module := _first_beyond(stats, limits)) is not None and not stats.flipped(limits.precision):
        return [_recovered(stats, module, limits)]
    judged = [e for e in stats.errors if stats.known(e) and e.kind != "module"]
    if stats.reference_nonfinite and stats.uncompared:
        text = "no output has an element that is finite in the reference: see nonfinite-reference"
        return [incomplete(stats, check, text)]
    if not judged:
        text = f"no output or gradient can be compared: not even float32 knows one to the digits of {stats.format}"
        return [check.skip(who(stats), text)]
    worst = max(judged, key=lambda e: e.error / stats.error_limit(e, limits.precision))
    text = f"at most {worst.error:.2g} from {stats.reference}, in {_named(worst)}"
    limit = stats.error_limit(worst, limits.precision)
    return [passed(stats, check, text, len(judged), worst.error, limit, "relative error")]


def _misplaced(stats: NumericsStats, misplaced: list[TensorError]) -> Finding:
    """Infinities of float64 in whose place a number stands: a mask that low precision does not keep."""
    first, count = misplaced[0], sum(e.misplaced for e in misplaced)
    message = (
        f"infinities must be in the same places and of the same sign as in {stats.reference}; {count:,} are not, the "
        f"first in {_named(first)}"
    )
    hint = "write masks with a boolean mask and -inf in the format itself, after the last cast"
    where = Where(phase="forward")
    return PRECISION_LOSS.fail(who(stats), message, where=where, observed=count, limit=0, unit="elements", hint=hint)


def _lost(stats: NumericsStats, kind: str, excess: list[TensorError], limits: Limits) -> Finding:
    own = [e for e in excess if not stats.shared(e)]
    excess = own or excess
    worst = max(excess, key=lambda e: e.error / stats.error_limit(e, limits.precision))
    limit = min(stats.error_limit(worst, limits.precision), LOST if kind == "output" else math.inf)
    where, origin = _origin(stats, worst, limits)
    message = (
        f"{kind}s must lie within {limit:.2g} of {stats.reference}; {_named(worst)} lies {worst.error:.2g} away, and "
        f"{len(excess)} of {sum(e.kind == kind for e in stats.errors)} are beyond their limit ({limits.precision:g} "
        f"standard deviations of rounding in {stats.format}, {stats.chain} roundings in a row, sensitivity "
        f"{worst.sensitivity:.2g}){origin}"
    )
    verdict = Verdict.FAIL
    hint = (
        "compute what leads to this output in float32, or reorder it: subtract before rounding, accumulate in "
        "float32, rescale; what a module is given is made by its parent"
    )
    if not own:
        verdict = Verdict.WARN
        message += f"; float32 lies {worst.in_float32:.2g} away as well, so that low precision is not at fault"
        hint = "mend the arithmetic itself: not even float32 keeps these digits (an absorbed term, a cancellation)"
    elif (op := _inexact_op(stats, where.phase)) is not None:
        message += f"; {_place(op.where)} alone lies {op.error:.2g} from float64 on the same inputs"
        hint = "an op that is wrong on its own inputs is a kernel's defect: try another backend for it, and report it"
    if flip := stats.flipped(limits.precision):
        verdict = Verdict.WARN
        message += (
            f"; {flip.changed:,} of {flip.numel:,} decisions of {_place(flip.where)} fell otherwise, which rounding "
            "explains, and what follows is another quantity"
        )
        hint = "compute the scores that are decided upon in float32"
    return PRECISION_LOSS.finding(
        verdict, who(stats), message, where=where, observed=worst.error, limit=limit, unit="relative error", hint=hint
    )


def _origin(stats: NumericsStats, worst: TensorError, limits: Limits) -> tuple[Where, str]:
    """Where the loss is first seen, and how to say so."""
    if worst.kind == "gradient":
        return Where(phase="backward", module=gradient_module(worst.name)), ""
    if stats.flips and not stats.followed and not stats.flipped(limits.precision):
        flip = stats.flips[0]
        return flip.where, (
            f"; it begins where {flip.changed:,} of {flip.numel:,} decisions of {_place(flip.where)} fall otherwise, "
            f"upon values that lie {flip.error:.2g} away"
        )
    modules = sorted((e for e in stats.errors if e.kind == "module"), key=lambda e: e.order)
    # Half of what is lost: the module that loses it is seldom the one at whose output the line is crossed.
    first = next((e for e in modules if stats.beyond(e, limits.precision) or e.error > LOST / 2), None)
    if first is None:
        return Where(phase="forward"), ""
    module = _module(first)
    return Where(phase="forward", module=module), f"; it is first seen at the output of {module or '(the root)'}"


def _coarse(stats: NumericsStats, coarse: list[TensorError], limits: Limits) -> Finding:
    """Gradients that a kernel of the CPU library blurs: a fact of this machine, a warning for the model."""
    worst = max(coarse, key=lambda e: e.error)
    op = stats.coarse_kernel(worst, limits.precision)
    assert op is not None
    limit = stats.error_limit(worst, limits.precision)
    message = (
        f"gradients must lie within {limit:.2g} of {stats.reference}; {_named(worst)} lies {worst.error:.2g} away, "
        f"which the CPU kernel of {_place(op.where)} explains: it sums {op.terms:,} terms in {stats.format}"
    )
    hint = "kernels on a GPU sum in float32; on this CPU keep the module in float32 if its gradient matters"
    return PRECISION_LOSS.warn(
        who(stats), message, where=op.where, observed=worst.error, limit=limit, unit="relative error", hint=hint
    )


def _recovered(stats: NumericsStats, module: TensorError, limits: Limits) -> Finding:
    """A module that loses digits which outputs and gradients do not miss: a warning."""
    limit = stats.error_limit(module, limits.precision)
    message = (
        f"module outputs must lie within {limit:.2g} of {stats.reference}; {_named(module)} lies {module.error:.2g} "
        "away, and outputs and gradients do not suffer with these inputs"
    )
    where = Where(phase="forward", module=_module(module))
    hint = "keep this module in float32 if other inputs may depend on it"
    return PRECISION_LOSS.warn(
        who(stats), message, where=where, observed=module.error, limit=limit, unit="relative error", hint=hint
    )


def _first_beyond(stats: NumericsStats, limits: Limits) -> TensorError | None:
    modules = [e for e in stats.errors if e.kind == "module"]
    beyond = (e for e in modules if stats.beyond(e, limits.precision) and not stats.shared(e))
    return min(beyond, key=lambda e: e.order, default=None)


def _inexact_op(stats: NumericsStats, phase: str) -> OpFacts | None:
    """The op that is furthest from float64 on its own inputs, if one rounding of its result does not explain it."""
    worst = max((op for op in stats.ops if op.where.phase == phase), key=lambda op: op.error, default=None)
    # One op rounds its result once; 16 unit roundoffs leave room for kernels that round their sums in pieces.
    return worst if worst is not None and worst.error > 16 * stats.unit_roundoff else None


def _place(where: Where) -> str:
    line = f" ({where.file}:{where.line})" if where.file else ""
    return f"{where.op.removeprefix('aten::')} in {where.module or '(the root)'}{line}"


def _module(error: TensorError) -> str:
    """The module path of an error that is named `path[call 1]:path.in.output`."""
    return error.name.partition(":")[0].partition("[")[0]


def _named(error: TensorError) -> str:
    return f"{error.kind} {error.name}".strip()
