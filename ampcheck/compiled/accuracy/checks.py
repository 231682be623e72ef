"""Is compiled code right? Pure functions from `AccuracyStats` to findings.

Compiled code that differs from eager mode is not wrong: fused kernels round less often, and are mostly nearer to
float64. It fails where it lies further from float64 than rounding explains, and eager mode does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from ampcheck.catalog.compiled import COMPILED_DTYPE, COMPILED_ERROR, COMPILED_EXCEPTION, COMPILED_GRADIENT
from ampcheck.catalog.numerics import COVERAGE
from ampcheck.compiled.accuracy.stats import (
    AOT_EAGER,
    BACKWARD_AUTOCAST,
    EMULATE,
    EMULATED,
    NOISE,
    AccuracyStats,
    unknown,
)
from ampcheck.core.arm import armed
from ampcheck.core.check import Check, Evidence
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import cannot_run, listed
from ampcheck.numerics.record import CHANGES
from ampcheck.shadow.bounds import FLOOR, SLACK
from ampcheck.shadow.compare import CAST, FLOAT32, INTEGERS, ResultError

VALUES = ("output", "loss", "update", "buffer", "input")
GRADIENTS = ("gradient",)
Checks: TypeAlias = Mapping[str, Callable[[AccuracyStats, Limits], list[Finding]]]
LISTED = 4
_PHASES = {"gradient": "backward", "update": "update"}
"""Of a result, by its kind; forward by default."""


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
        hint = "compile with backend='aot_eager': where it raises as well, tracing is at fault, else code generation"
        return [check.fail(subject, message, where=raised.where, hint=hint)]
    if stats.declined.startswith("Observed exception"):
        message = "what runs in eager mode must run compiled; traced by Dynamo it raises, and falls back to eager "
        message += f"mode without a warning ({stats.declined})"
        hint = "see TORCH_LOGS=graph_breaks; fullgraph=True and torch.export raise here"
        return [check.warn(subject, message, where=Where("compile"), hint=hint)]
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
    if skipped := _not_run(stats, COMPILED_DTYPE):
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
    where, count = Where("forward"), len(wrong)
    return [COMPILED_DTYPE.fail(who(stats), message, where=where, observed=count, limit=0.0, unit="outputs", hint=hint)]


def _check_results(check: Check, kinds: tuple[str, ...], stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Results of these kinds are as near to float64 as rounding allows."""
    if lowered := check_lowered(stats, check, kinds):
        return lowered
    if skipped := not_comparable(stats, check, kinds):
        return [skipped]
    judged = [e for e in stats.comparable if e.kind in kinds]
    others = _unknown(stats, check, kinds)
    findings = [compared(stats, check, kinds, judged, limits), *others] if judged or not others else others
    return findings if kinds == GRADIENTS else [*findings, *_hidden_overflow(stats), *_finer_than_eager(stats)]


def check_lowered(stats: AccuracyStats, check: Check, kinds: Collection[str]) -> list[Finding]:
    """Compiled code computes no op in 16 bits that eager mode computes in float32; other roundings may hide it."""
    lowered = stats.lowered_in(kinds)
    if not lowered or stats.exceptions.eager or stats.exceptions.compiled:
        return []
    others = f", and {len(lowered) - 1} more ops so" if len(lowered) > 1 else ""
    message = (
        f"compiled code must compute in 16 bits only what eager mode does; it computes {lowered[0].op} of this line in "
        f"16 bits, and eager mode in float32{others}"
    )
    if failures := [] if stats.incomparable else stats.failures(tuple(kinds)):
        worst = max(failures, key=lambda e: (e.lost, e.times))
        far = f"lies {worst.error:.2g} from float64, {worst.eager_error:.2g} in eager mode"
        message += f"; {worst} {f'has {worst.lost:,} elements that are inf or NaN' if worst.lost else far}"
    stage, hint = _stage(stats)
    if not stage and lowered[0].phase == "backward":
        hint = f'set {BACKWARD_AUTOCAST} = "off", or enter autocast inside the compiled region (pytorch/pytorch#179804)'
    evidence: Evidence = {"where": lowered[0], "observed": len(lowered), "limit": 0.0, "unit": "ops", "hint": hint}
    return [check.fail(who(stats), message + stage, **evidence)]


def check_coverage(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Something was compiled and compared."""
    unseen = "; ".join(f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items())
    raised, subject = stats.exceptions, who(stats)
    if raised.eager and raised.compiled and not raised.missing:
        message = f"the subject must run to its end; eager mode raises {raised.eager}, and compiled code raises too"
        hint = "give inputs with which the model runs, and an optimizer that takes its parameters"
        return [COVERAGE.fail(subject, message, where=raised.where, hint=hint)]
    if raised.eager or raised.compiled:
        return [COVERAGE.skip(subject, "a run raised, so nothing was compared")]
    if not stats.graphs and stats.unsupported:
        return [COVERAGE.skip(subject, f"nothing was compiled, and so nothing judged: {stats.unsupported}")]
    if not stats.graphs:
        message = "the subject must compile at least one graph; torch.compile made none and everything ran eager"
        hint = "see TORCH_LOGS=graph_breaks, and whether the model is excluded by torch._dynamo.disable"
        where = Where("compile")
        return [COVERAGE.fail(subject, message, where=where, observed=0.0, limit=1.0, unit="graphs", hint=hint)]
    if stats.incomparable:
        return [COVERAGE.skip(subject, f"nothing was compared: {stats.incomparable}")]
    if not stats.errors:
        message = "a verdict needs evidence; no output, gradient or update was compared"
        hint = "give inputs with which the model computes something"
        return [COVERAGE.fail(subject, message, observed=0.0, limit=1.0, unit="tensors", hint=hint)]
    if not stats.comparable:
        verdict = Verdict.INCOMPLETE if any(e.nan for e in stats.errors) else Verdict.SKIP
        return [COVERAGE.finding(verdict, subject, f"nothing was compared: {unseen}")]
    text = f"looked at {stats.coverage}" + (f"; not looked at: {unseen}" if unseen else "")
    count = len(stats.comparable)
    return [COVERAGE.passed(subject, text, count, observed=count, limit=1.0, unit="tensors")]


CHECKS: Checks = MappingProxyType(
    {
        COMPILED_EXCEPTION.slug: check_compiled_exception,
        COMPILED_DTYPE.slug: check_compiled_dtype,
        COMPILED_ERROR.slug: partial(_check_results, COMPILED_ERROR, VALUES),
        COMPILED_GRADIENT.slug: partial(_check_results, COMPILED_GRADIENT, GRADIENTS),
        COVERAGE.slug: check_coverage,
    }
)


def check_accuracy(
    stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None, table: Checks = CHECKS
) -> list[Finding]:
    """The findings of the named checks of a table, all by default; exceptions and coverage are always among them."""
    names = table if checks is None else {*checks, COMPILED_EXCEPTION.slug, COVERAGE.slug}
    return [finding for slug, check in table.items() if slug in names for finding in check(stats, limits)]


def who(stats: AccuracyStats) -> str:
    """The subject and how it ran, as findings name them."""
    backend = "" if stats.backend == "inductor" else stats.backend
    return armed(stats.subject, replace(stats.arm, backend=backend))


def passed(
    stats: AccuracyStats, check: Check, text: str, seen: int, observed: float | None = None, limit: float | None = None
) -> Finding:
    """A pass that rests on `seen` graphs or tensors, with what else was compared."""
    text = f"{text} ({stats.coverage})"
    return check.passed(who(stats), text, seen, observed=observed, limit=limit, unit="relative error")


def _not_run(stats: AccuracyStats, check: Check) -> Finding | None:
    if stats.exceptions.eager or stats.exceptions.compiled:
        return check.skip(who(stats), "a run raised before it was complete: see compiled-exception")
    return None if stats.graphs else check.skip(who(stats), "nothing was compiled: see coverage")


def not_comparable(stats: AccuracyStats, check: Check, kinds: Collection[str]) -> Finding | None:
    """A skip where nothing was compiled, or nothing of these kinds can be compared."""
    if skipped := _not_run(stats, check):
        return skipped
    if stats.incomparable:
        return check.skip(who(stats), f"not comparable: {stats.incomparable}")
    if not stats.of(kinds):
        dropped = [reason for reason in stats.coverage.unseen if reason.startswith(tuple(kinds))]
        reason = (stats.no_gradients if kinds == GRADIENTS else "") or listed(dropped) or "the calls give no tensor"
        return check.skip(who(stats), f"nothing to compare: {reason}")
    return None


def compared(
    stats: AccuracyStats, check: Check, kinds: tuple[str, ...], judged: Sequence[ResultError], limits: Limits
) -> Finding:
    """What the comparison with exact results and with eager mode found in results of these kinds."""
    if not judged:
        return check.skip(who(stats), f"not comparable: {listed(map(str, stats.of(kinds)))}: {NOISE}")
    if failures := [e for e in judged if e.fails(limits.precision)]:
        return _worse(stats, check, failures, judged, Verdict.FAIL)
    if excess := [e for e in stats.excess(kinds) if not e.at_fault]:
        return _worse(stats, check, excess, judged, Verdict.WARN)
    worst = max(judged, key=lambda e: (e.dtype not in INTEGERS, e.times))
    text = f"at most {worst.whole:.2g} from float64, in {worst}, where eager mode lies {worst.eager_error:.2g} away"
    if worst.dtype in INTEGERS:
        text = "the integers are those of eager mode"
    return passed(stats, check, text, len(judged), worst.whole, worst.limit)


def _unknown(stats: AccuracyStats, check: Check, kinds: tuple[str, ...]) -> list[Finding]:
    """A skip for the results of which nothing is known, by its reason; NaN on all sides leaves the check incomplete."""
    reasons: dict[str, list[str]] = {}
    for e in stats.errors:
        reason = unknown(e)
        if e.kind in kinds and reason not in ("", NOISE) and not e.nan:
            reasons.setdefault(reason, []).append(str(e))
    skips = [check.skip(who(stats), f"not comparable: {listed(names)}: {reason}") for reason, names in reasons.items()]
    spoiled = [e for e in stats.errors if e.kind in kinds and e.nan]
    if not spoiled:
        return skips
    count = sum(e.nan for e in spoiled)
    text = (
        f"results must be numbers to be compared; {count:,} elements of {listed(map(str, spoiled))} are NaN in both "
        "runs and in float64"
    )
    hint = "an audit names the op that makes the first NaN, or the input that holds one: see nonfinite-reference"
    where = where_of(spoiled[0])
    evidence = check.incomplete(who(stats), text, where=where, observed=count, limit=0.0, unit="elements", hint=hint)
    return [*skips, evidence]


def _worse(
    stats: AccuracyStats, check: Check, excess: Sequence[ResultError], judged: Sequence[ResultError], verdict: Verdict
) -> Finding:
    worst = max(excess, key=lambda e: (e.lost, e.times))
    first = min(excess, key=lambda e: (e.step, e.kind != "output"))
    observed, limit, unit = worst.error, worst.limit, "relative error"
    tail = f"{len(excess)} of {len(judged)} results are beyond their limit"
    if worst.absent:
        message = f"compiled code must give what eager mode gives; it gives no {worst} of its shape; {tail}"
    elif worst.lost:
        observed, limit, unit = float(worst.lost), 0.0, "elements"
        message = (
            f"compiled code must be finite where eager mode and float64 are, and nowhere else; {worst.lost:,} "
            f"elements of {worst} are inf or NaN on one side alone; {len(excess)} of {len(judged)} results fail"
        )
    elif worst.dtype in INTEGERS:
        observed, limit = worst.apart, 0.0
        message = (
            f"integers of compiled code must be those of eager mode; {100 * worst.apart:.3g}% of the elements of "
            f"{worst} differ; {tail}"
        )
    elif worst.kind in CHANGES and not worst.size:
        observed, limit, unit = worst.norm, 0.0, "Euclidean norm"
        message = (
            f"compiled code must change what eager mode changes, and nothing else; it changes {worst} by "
            f"{worst.norm:.2g} (Euclidean norm), and eager mode does not; {tail}"
        )
    elif worst.verdict == CAST:
        observed, limit = worst.apart, worst.eager_error / 2
        message = (
            f"compiled code must round where the model casts to 16 bits and back; {worst} lies {worst.apart:.2g} from "
            f"eager mode, which lies {worst.eager_error:.2g} from what float64 gives without these casts; {tail}"
        )
    else:
        message = (
            f"compiled code must lie as near to float64 as rounding allows, {limit:.2g} at most here; {worst} lies "
            f"{observed:.2g} away, and {worst.eager_error:.2g} in eager mode; {tail} (moving the data by a rounding "
            f"moves it by {worst.seen.spread:.2g})"
        )
    if first.step and stats.steps > 1:
        message += f"; up to step {first.step - 1} they agree"
    if verdict is Verdict.WARN and worst.lost:
        message += f"; eager mode overflows itself on such data, in {worst.eager.lost if worst.eager else 0:,} elements"
        hint = "values are close to the maximum of the format; run `ampcheck audit` and see `overflow`"
    elif verdict is Verdict.WARN:
        message += "; a decision near a tie explains it, which turns when the data are rounded"
        hint = "compute the scores that are decided upon in float32"
    else:
        stage, hint = _stage(stats)
        message += stage
    born = [s.where for s in stats.inside.sites if s.born] if stats.inside is not None and worst.lost else []
    where = replace(next(iter(born), where_of(worst)), step=first.step if stats.steps > 1 else None)
    return check.finding(
        verdict, who(stats), message, where=where, observed=observed, limit=limit, unit=unit, hint=hint
    )


def _stage(stats: AccuracyStats) -> tuple[str, str]:
    """The stage at fault and the setting that passes, from the trials."""
    tried = {trial.name: trial for trial in stats.trials}
    off, emulated, aot = tried.get(BACKWARD_AUTOCAST), tried.get(EMULATED), tried.get(AOT_EAGER)
    if off is not None and off.passes:
        return (
            "; AOTAutograd traces the backward pass under the autocast of the forward call, which eager mode leaves",
            f'set {BACKWARD_AUTOCAST} = "off": tried, and it passes (pytorch/pytorch#153044, #179804)',
        )
    if aot is not None and not aot.passes:
        raised = f" (it raised {aot.raised})" if aot.raised else ""
        return (
            f"; it fails with backend='aot_eager' as well{raised}: tracing or differentiation errs, before Inductor",
            "look at what Dynamo traced: state that changes between calls, attributes and counters read in forward",
        )
    if emulated is not None and emulated.passes:
        return (
            "; it passes with Inductor's casts emulated: fused kernels leave out roundings that the model asks for",
            f"set {EMULATE} = True: tried, and it passes; or keep the cast out of the compiled region",
        )
    if aot is not None:
        return (
            "; it passes with backend='aot_eager', and fails with emulated casts: Inductor's kernels are at fault",
            "run the region with backend='aot_eager' or torch.compiler.disable until Inductor is fixed; report it",
        )
    return "", "assert_compiled tries the compiler's settings and stages; ampcheck blame names the place"


def _hidden_overflow(stats: AccuracyStats) -> list[Finding]:
    """Compiled code that is finite where eager mode overflows: no failure of compiled code, but the two disagree."""
    hidden = [e for e in stats.errors if e.hidden and not e.lost and not e.nan]
    if not hidden:
        return []
    worst = max(hidden, key=lambda e: e.hidden)
    message = (
        f"eager mode overflows where compiled code does not: {worst.hidden:,} elements of {worst} are inf or NaN in "
        f"eager mode alone; {len(hidden)} results are so"
    )
    hint = "the overflow is there and fusion hides it: a graph break brings it back; see overflow of an audit"
    where = where_of(worst)
    return [
        COMPILED_ERROR.warn(
            who(stats), message, where=where, observed=worst.hidden, limit=0.0, unit="elements", hint=hint
        )
    ]


def _finer_than_eager(stats: AccuracyStats) -> list[Finding]:
    """A float32 output that has float32's digits compiled, and 16 bits' in eager mode.

    Both are right for what they are, and a consumer that decides by the value (a quantisation scale) decides otherwise.
    Where compiled code has no more digits than eager mode, as behind any 16-bit matmul, they only differ by rounding.
    """
    if stats.autocast or format_of(stats.format).bits > 16:
        return []
    finer = []
    for e in stats.errors:
        limit = SLACK * FLOAT32 * (e.seen.spread / (e.unit or 1.0) + FLOOR)
        if e.kind == "output" and e.dtype == "float32" and e.whole <= limit < e.eager_error / SLACK:
            finer.append((e, limit))
    if not finer:
        return []
    worst, limit = max(finer, key=lambda pair: pair[0].apart)
    message = (
        f"a float32 output promises float32's digits; {worst} has those of {stats.format} in eager mode, "
        f"{worst.eager_error:.2g} from float64, and compiled code, which fuses the roundings away, differs from it by "
        f"{worst.apart:.2g}"
    )
    hint = "cast to float32 before the last computation instead of after it; then both agree"
    where, unit = Where("forward", step=worst.step if stats.steps > 1 else None), "relative difference"
    return [
        COMPILED_ERROR.warn(who(stats), message, where=where, observed=worst.apart, limit=limit, unit=unit, hint=hint)
    ]


def where_of(error: ResultError) -> Where:
    """The phase and module of a result."""
    return Where(_PHASES.get(error.kind, "forward"), module_of(error))


def module_of(error: ResultError) -> str:
    """The module of a weight or buffer; outputs and inputs belong to the root."""
    if error.kind in ("output", "loss", "input") or error.name.startswith("input "):
        return ""
    return error.name.rpartition(".")[0]
