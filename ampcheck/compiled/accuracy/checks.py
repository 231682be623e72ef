"""Is compiled code as good as eager mode? Pure functions from `AccuracyStats` to findings.

Compiled code that differs from eager mode is not wrong: fused kernels round less often, and are mostly nearer to
float64. It fails where it is worse than eager mode, by more than `AccuracyStats.limit` allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from ampcheck.catalog.compiled import COMPILED_DTYPE, COMPILED_ERROR, COMPILED_EXCEPTION, COMPILED_GRADIENT
from ampcheck.catalog.numerics import COVERAGE
from ampcheck.compiled.accuracy.stats import (
    AOT_EAGER,
    BACKWARD_AUTOCAST,
    EMULATE,
    EMULATED,
    INTEGERS,
    AccuracyStats,
    Deviation,
)
from ampcheck.core.check import Check
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Scalar, Table, Verdict, Where
from ampcheck.core.text import listed
from ampcheck.numerics.stats import LOST
from ampcheck.torchtools.unsupported import cannot_run

VALUES = ("output", "loss", "update", "buffer")
GRADIENTS = ("gradient",)
LISTED = 4
ROWS = 60
_PHASES = {"output": "forward", "loss": "forward", "buffer": "forward", "gradient": "backward", "update": "update"}


def check_compiled_exception(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Eager mode and compiled code accept the same.

    Data that eager mode refuses in every precision is invalid, and compiled code computes garbage with it. Data that
    eager mode refuses in low precision alone, and compiled code does not, is a warning.
    """
    raised, check, subject = stats.exceptions, COMPILED_EXCEPTION, who(stats)
    if raised.missing:
        return [check.skip(subject, f"not judged: {cannot_run(raised.missing)}")]
    if raised.compiled and raised.eager:
        return [check.skip(subject, f"eager mode raises, and so does compiled code: {raised.eager}")]
    if raised.compiled:
        message = f"what runs in eager mode must run compiled; compiled code raised {raised.compiled}"
        hint = "compile with backend='aot_eager' to tell tracing from code generation, and report the smaller model"
        return [check.fail(subject, message, where=raised.where, hint=hint)]
    if not stats.graphs:
        return [check.skip(subject, "nothing was compiled: see coverage")]
    if raised.eager and not raised.float32:
        message = (
            f"what runs compiled must run in eager mode; in {stats.format} eager mode raised {raised.eager}, and "
            "compiled code did not"
        )
        hint = "eager mode is what runs at a graph break and without a compiler: bring the operands to one dtype"
        return [check.warn(subject, message, where=raised.where, hint=hint)]
    if raised.eager:
        message = (
            f"what eager mode refuses compiled code must refuse too; eager mode raised {raised.eager}, and compiled "
            "code gave a result"
        )
        hint = "check the data before the compiled region: compiled kernels leave such checks out"
        return [check.fail(subject, message, where=raised.where, hint=hint)]
    return [passed(stats, check, "eager mode and compiled code ran to the end", stats.graphs)]


def check_compiled_dtype(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Compiled code returns the dtypes, shapes and structure of eager mode."""
    if skipped := not_run(stats, COMPILED_DTYPE):
        return [skipped]
    eager, compiled = stats.eager_shapes, stats.compiled_shapes
    paths = list(dict.fromkeys((*eager, *compiled)))
    wrong = [path for path in paths if eager.get(path) != compiled.get(path)]
    if not wrong:
        text = f"{len(paths)} outputs and containers have eager mode's dtype, shape and type"
        return [passed(stats, COMPILED_DTYPE, text, len(paths))]
    differences = "; ".join(
        f"{path} is {eager.get(path, 'absent')} in eager mode and {compiled.get(path, 'absent')} compiled"
        for path in wrong[:LISTED]
    )
    message = f"compiled code must give what eager mode gives; {len(wrong)} of {len(paths)} differ: {differences}"
    hint = "cast the result where its dtype matters, or call the op that makes it with autocast disabled"
    where = Where("forward")
    return [
        COMPILED_DTYPE.fail(who(stats), message, where=where, observed=len(wrong), limit=0.0, unit="outputs", hint=hint)
    ]


def check_compiled_error(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Outputs, loss, updated weights and buffers are as accurate as those of eager mode."""
    if skipped := not_comparable(stats, COMPILED_ERROR, VALUES):
        return [skipped]
    findings = _judged(stats, COMPILED_ERROR, VALUES, limits)
    return [*findings, *_hidden_overflow(stats), *_finer_than_promised(stats, limits)]


def check_compiled_gradient(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Gradients of weights and inputs are as accurate as those of eager mode."""
    if skipped := not_comparable(stats, COMPILED_GRADIENT, GRADIENTS):
        return [skipped]
    return _judged(stats, COMPILED_GRADIENT, GRADIENTS, limits)


def check_coverage(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Something was compiled and compared."""
    unseen = "; ".join(f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items())
    raised, subject = stats.exceptions, who(stats)
    if raised.eager and raised.compiled and not raised.missing:
        message = f"what is judged must run to its end; eager mode raises {raised.eager}, and compiled code raises too"
        hint = "give inputs with which the model runs, and an optimizer that takes its parameters"
        return [COVERAGE.fail(subject, message, where=raised.where, hint=hint)]
    if raised.eager or raised.compiled:
        return [COVERAGE.skip(subject, "a run raised, so nothing was compared")]
    if not stats.graphs and stats.unsupported:
        return [COVERAGE.skip(subject, f"nothing was compiled, and so nothing judged: {stats.unsupported}")]
    if not stats.graphs:
        message = "a compiled run must compile something; torch.compile made no graph and everything ran eager"
        hint = "see TORCH_LOGS=graph_breaks, and whether the model is excluded by torch._dynamo.disable"
        where = Where("compile")
        return [COVERAGE.fail(subject, message, where=where, observed=0.0, limit=1.0, unit="graphs", hint=hint)]
    if stats.incomparable:
        return [COVERAGE.skip(subject, f"nothing was compared: {stats.incomparable}")]
    if not stats.deviations:
        message = "a verdict needs evidence; no output, gradient or update was compared"
        hint = "give inputs with which the model computes something"
        return [COVERAGE.fail(subject, message, observed=0.0, limit=1.0, unit="tensors", hint=hint)]
    if not stats.comparable:
        verdict = Verdict.INCOMPLETE if any(d.nan for d in stats.deviations) else Verdict.SKIP
        return [COVERAGE.finding(verdict, subject, f"nothing was compared: {unseen}")]
    text = f"looked at {stats.coverage}" + (f"; not looked at: {unseen}" if unseen else "")
    count = len(stats.comparable)
    return [COVERAGE.passed(subject, text, count, observed=count, limit=1.0, unit="tensors")]


CHECKS: Mapping[str, Callable[[AccuracyStats, Limits], list[Finding]]] = MappingProxyType(
    {
        COMPILED_EXCEPTION.slug: check_compiled_exception,
        COMPILED_DTYPE.slug: check_compiled_dtype,
        COMPILED_ERROR.slug: check_compiled_error,
        COMPILED_GRADIENT.slug: check_compiled_gradient,
        COVERAGE.slug: check_coverage,
    }
)


def check_accuracy(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> list[Finding]:
    """The findings of the named checks, all by default; exceptions and coverage are always among them."""
    wanted = CHECKS if checks is None else {*checks, "compiled-exception", "coverage"}
    return [finding for slug, check in CHECKS.items() if slug in wanted for finding in check(stats, limits)]


def who(stats: AccuracyStats) -> str:
    """The subject and its arm, as findings name them."""
    backend = "" if stats.backend == "inductor" else f" by {stats.backend}"
    return f"{stats.subject} [{stats.arm}, compiled{backend}]"


def passed(
    stats: AccuracyStats, check: Check, text: str, seen: int, observed: float | None = None, limit: float | None = None
) -> Finding:
    """A pass that rests on `seen` graphs or tensors, with what else was compared."""
    text = f"{text} ({stats.coverage})"
    return check.passed(who(stats), text, seen, observed=observed, limit=limit, unit="relative error")


def not_run(stats: AccuracyStats, check: Check) -> Finding | None:
    """A skip where an arm raised or nothing was compiled."""
    if stats.exceptions.eager or stats.exceptions.compiled:
        return check.skip(who(stats), "a run raised before it was complete: see compiled-exception")
    return None if stats.graphs else check.skip(who(stats), "nothing was compiled: see coverage")


def not_comparable(stats: AccuracyStats, check: Check, kinds: Collection[str]) -> Finding | None:
    """A skip where there is nothing to compare."""
    if skipped := not_run(stats, check):
        return skipped
    if stats.incomparable:
        return check.skip(who(stats), f"not comparable: {stats.incomparable}")
    if not any(d.kind in kinds for d in stats.deviations):
        reason = stats.no_gradients if kinds == GRADIENTS else "the calls give no tensor"
        return check.skip(who(stats), f"nothing to compare: {reason}")
    return None


def _judged(stats: AccuracyStats, check: Check, kinds: tuple[str, ...], limits: Limits) -> list[Finding]:
    factor = limits.precision
    excess = stats.excess(factor, kinds)
    bad = [d for d in excess if not stats.excused(d, factor)]
    judged = [d for d in stats.comparable if d.kind in kinds]
    unknown = _unknown(stats, check, kinds)
    if bad:
        return [_worse(stats, check, bad, judged, Verdict.FAIL, factor), *unknown]
    if excess:
        return [_worse(stats, check, list(excess), judged, Verdict.WARN, factor), *unknown]
    if not judged:
        return unknown
    known = [d for d in judged if d.worst_eager <= LOST] or judged  # the error of what is zero but for rounding is none
    worst = max(known, key=lambda d: _times(stats, d, factor))
    text = (
        f"at most {worst.least_compiled:.2g} from {_judge(stats)}, in {worst}, where eager mode lies "
        f"{worst.worst_eager:.2g} away"
    )
    return [passed(stats, check, text, len(judged), worst.least_compiled, stats.limit(worst, factor)), *unknown]


def _unknown(stats: AccuracyStats, check: Check, kinds: tuple[str, ...]) -> list[Finding]:
    """A skip for the tensors that have no limit, by its reason; NaN on all sides leaves the check incomplete."""
    reasons: dict[str, list[str]] = {}
    for d in stats.deviations:
        if d.kind in kinds and d.unknown and not d.lost and not d.nan:
            reasons.setdefault(d.unknown, []).append(str(d))
    found = [check.skip(who(stats), f"not comparable: {listed(names)}: {reason}") for reason, names in reasons.items()]
    if spoiled := [d for d in stats.deviations if d.kind in kinds and d.nan]:
        count = sum(d.nan for d in spoiled)
        text = (
            f"what is compared must be a number; {count:,} elements of {listed(map(str, spoiled))} are NaN in "
            f"{_judge(stats)} and compiled code alike, so nothing is known of them"
        )
        hint = "an audit names the op that makes the first NaN, or the input that holds one: see nonfinite-reference"
        where = Where(_PHASES[spoiled[0].kind], _module(spoiled[0]))
        found.append(
            check.incomplete(who(stats), text, where=where, observed=count, limit=0.0, unit="elements", hint=hint)
        )
    return found


def _worse(
    stats: AccuracyStats,
    check: Check,
    excess: list[Deviation],
    judged: list[Deviation],
    verdict: Verdict,
    factor: float,
) -> Finding:
    worst = max(excess, key=lambda d: (d.lost, _times(stats, d, factor)))
    first = min(excess, key=lambda d: (d.step, d.kind != "output"))
    observed, limit, unit = worst.least_compiled, stats.limit(worst, factor), "relative error"
    if worst.lost:
        observed, limit, unit = float(worst.lost), 0.0, "elements"
        message = (
            f"compiled code must be finite where eager mode and {_judge(stats)} are, and nowhere else; {worst.lost:,} "
            f"elements of {worst} are inf or NaN on one side alone; {len(excess)} of {len(judged)} tensors fail"
        )
    else:
        message = (
            f"compiled code must lie as near to {_judge(stats)} as eager mode does, {limit:.2g} at most here; "
            f"{_far(worst)}, and {worst.worst_eager:.2g} in eager mode; {len(excess)} of {len(judged)} are beyond "
            f"their limit ({_derived(stats, worst, factor)})"
        )
    if first.step and stats.steps > 1:
        message += f"; up to step {first.step - 1} they agree"
    if verdict is Verdict.WARN and worst.lost:
        message += f"; eager mode overflows itself on such data, in {worst.eager_nonfinite:,} elements"
        hint = "it is the edge of overflow: see overflow of an audit"
    elif verdict is Verdict.WARN:
        message += f"; a decision near a tie explains it: {stats.near_ties:,} turn when the data are rounded"
        hint = "compute the scores that are decided upon in float32"
    else:
        cause, hint = _mended(stats)
        message += cause
    where = Where(_PHASES[worst.kind], _module(worst), step=first.step if stats.steps > 1 else None)
    return check.finding(
        verdict, who(stats), message, where=where, observed=observed, limit=limit, unit=unit, hint=hint
    )


def _judge(stats: AccuracyStats) -> str:
    """`float64`, without how it was reached."""
    return stats.reference.partition(",")[0]


def _far(worst: Deviation) -> str:
    if worst.dtype in INTEGERS:
        return f"{worst.least_compiled:.2g} of the elements of {worst} differ"
    return f"{worst} lies {worst.least_compiled:.2g} away"


def _derived(stats: AccuracyStats, worst: Deviation, factor: float) -> str:
    """Where the limit comes from."""
    floor = worst.grain + stats.float32_floor(factor, worst.float32)
    draws = f"on {len(worst.eager)} draws of the data" if len(worst.eager) > 1 else "on these data"
    usual = f" or its usual error of {worst.rounded:.2g}" if worst.rounded > worst.worst_eager else ""
    return f"{factor**2:g} times eager mode's error {draws}{usual}, and {floor:.2g} for storage and the order of sums"


def _mended(stats: AccuracyStats) -> tuple[str, str]:
    """The stage that errs and the setting that mends it, from the trials."""
    tried = {trial.rung: trial for trial in stats.trials}
    off, emulated, aot = tried.get(BACKWARD_AUTOCAST), tried.get(EMULATED), tried.get(AOT_EAGER)
    if off is not None and off.mends:
        return (
            "; AOTAutograd traces the backward pass under the autocast of the forward call, which eager mode leaves",
            f'set {BACKWARD_AUTOCAST} = "off": tried, and it mends this (pytorch/pytorch#153044, #179804)',
        )
    if aot is not None and not aot.mends:
        raised = f" (it raised {aot.raised})" if aot.raised else ""
        return (
            f"; backend='aot_eager' does not mend it{raised}: tracing or differentiation errs, before Inductor",
            "look at what Dynamo traced: state that changes between calls, attributes and counters read in forward",
        )
    if emulated is not None and emulated.mends:
        return (
            "; it is gone with Inductor's casts emulated: fused kernels leave out roundings that the model asks for",
            f"set {EMULATE} = True: tried, and it mends this; or keep the cast out of the compiled region",
        )
    if aot is not None:
        return (
            "; backend='aot_eager' mends it, so Inductor's kernels err, and emulated casts do not help",
            "run the region with backend='aot_eager' or torch.compiler.disable until Inductor is mended; report it",
        )
    return "", "assert_compiled tries the compiler's settings and stages; ampcheck blame names the place"


def _hidden_overflow(stats: AccuracyStats) -> list[Finding]:
    """Compiled code that is finite where eager mode overflows: no failure of compiled code, but the two disagree."""
    hidden = [d for d in stats.deviations if d.eager_nonfinite and not d.nonfinite]
    if not hidden:
        return []
    worst = max(hidden, key=lambda d: d.eager_nonfinite)
    message = (
        f"eager mode overflows where compiled code does not: {worst.eager_nonfinite:,} elements of {worst} are inf or "
        f"NaN in eager mode, and {worst.nonfinite:,} compiled; {len(hidden)} tensors are so"
    )
    hint = "the overflow is there and fusion hides it: a graph break brings it back; see overflow of an audit"
    where = Where(_PHASES[worst.kind], _module(worst))
    observed = worst.eager_nonfinite
    return [
        COMPILED_ERROR.warn(who(stats), message, where=where, observed=observed, limit=0.0, unit="elements", hint=hint)
    ]


def _finer_than_promised(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """A float32 output that has float32's digits compiled, and 16 bits' in eager mode.

    Both are right for what they are, and a consumer that decides by the value (a quantisation scale) decides otherwise.
    Where compiled code has no more digits than eager mode, as behind any 16-bit matmul, they only differ by rounding.
    """
    if stats.autocast or format_of(stats.format).bits > 16:
        return []
    factor = limits.precision
    found = []
    for d in stats.deviations:
        floor = d.grain + stats.float32_floor(factor, d.float32)
        coarse = d.worst_eager > factor**2 * floor
        if d.kind == "output" and d.dtype == "float32" and max(d.compiled) <= floor and coarse:
            found.append(d)
    if not found:
        return []
    worst = max(found, key=lambda d: d.between)
    limit = worst.grain + stats.float32_floor(factor, worst.float32)
    message = (
        f"a float32 output promises float32's digits; {worst} has those of {stats.format} in eager mode, "
        f"{worst.worst_eager:.2g} from {_judge(stats)}, and compiled code, which fuses the roundings away, differs "
        f"from it by {worst.between:.2g}"
    )
    hint = "cast to float32 before the last computation instead of after it; then both agree"
    where, unit = Where("forward", step=worst.step if stats.steps > 1 else None), "relative difference"
    return [
        COMPILED_ERROR.warn(who(stats), message, where=where, observed=worst.between, limit=limit, unit=unit, hint=hint)
    ]


def _times(stats: AccuracyStats, deviation: Deviation, factor: float) -> float:
    limit = stats.limit(deviation, factor)
    return deviation.least_compiled / limit if limit else 0.0


def _module(deviation: Deviation) -> str:
    """The module of a weight or buffer; outputs and inputs belong to the root."""
    if deviation.kind in ("output", "loss") or deviation.name.startswith("input "):
        return ""
    return deviation.name.rpartition(".")[0]


def tables(stats: AccuracyStats, limits: Limits) -> tuple[Table, ...]:
    """Every tensor with its errors and limit, the nearest to its limit first."""
    rows: list[tuple[float, Sequence[Scalar]]] = []
    for d in stats.deviations:
        limit = stats.limit(d, limits.precision)
        verdict = "beyond" if stats.beyond(d, limits.precision) else "not comparable" if d.unknown else "within"
        times = d.least_compiled / limit if limit else 0.0
        rows.append((times, (d.kind, d.name, d.step, d.dtype, d.worst_eager, d.least_compiled, limit, verdict)))
    if not rows:
        return ()
    rows.sort(key=lambda row: -row[0])
    note = f"relative to {stats.reference}, Euclidean norms"
    if len(rows) > ROWS:
        note = f"the {ROWS} nearest to their limit of {len(rows)}; {note}"
    columns = ("kind", "name", "step", "dtype", "eager", "compiled", "limit", "verdict")
    return (Table(f"Eager and compiled: {who(stats)}", columns, [r for _, r in rows[:ROWS]], "compiled-error", note),)
