"""Compiled models: what the checks of this family share.

Compiled code that differs from eager mode is not wrong: fused kernels round less often, and are mostly nearer to
float64. It fails where it lies further from float64 than rounding explains, and eager mode does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import listed
from ampcheck.records.accuracy import AOT_EAGER, BACKWARD_AUTOCAST, EMULATE, EMULATED, NOISE, AccuracyStats, unknown
from ampcheck.records.graphs import GraphStats
from ampcheck.records.results import CAST, CHANGES, INTEGERS, ResultError

VALUES = ("output", "loss", "update", "buffer", "input")
GRADIENTS = ("gradient",)

_NAMES = 6
"""Names that a message about graphs lists."""

_PHASES = {"gradient": "backward", "update": "update"}
"""Of a result, by its kind; forward by default."""


def passed(
    stats: AccuracyStats, check: Check, text: str, seen: int, observed: float | None = None, limit: float | None = None
) -> Finding:
    """A pass that rests on `seen` graphs or tensors, with what else was compared."""
    text = f"{text} ({stats.coverage})"
    return check.passed(stats.name, text, seen, observed=observed, limit=limit, unit="relative error")


def not_run(stats: AccuracyStats, check: Check) -> Finding | None:
    """A skip where a run raised, or nothing was compiled."""
    if stats.exceptions.eager or stats.exceptions.compiled:
        return check.skip(stats.name, "a run raised before it was complete: see compiled-exception")
    return None if stats.graphs else check.skip(stats.name, "nothing was compiled: see coverage")


def not_comparable(stats: AccuracyStats, check: Check, kinds: Collection[str]) -> Finding | None:
    """A skip where nothing was compiled, or nothing of these kinds can be compared."""
    if skipped := not_run(stats, check):
        return skipped
    if stats.incomparable:
        return check.skip(stats.name, f"not comparable: {stats.incomparable}")
    if not stats.of(kinds):
        dropped = [reason for reason in stats.coverage.unseen if reason.startswith(tuple(kinds))]
        reason = (stats.no_gradients if kinds == GRADIENTS else "") or listed(dropped) or "the calls give no tensor"
        return check.skip(stats.name, f"nothing to compare: {reason}")
    return None


def results(
    stats: AccuracyStats,
    check: Check,
    kinds: tuple[str, ...],
    limits: Limits,
    alone: Sequence[Callable[[AccuracyStats], list[Finding]]] = (),
) -> list[Finding]:
    """Results of these kinds are as near to float64 as rounding allows; beside an audit, wherever eager mode's are.

    alone: what else is judged where it is not beside an audit.
    """
    if found := lowered(stats, check, kinds):
        return found
    if skipped := not_comparable(stats, check, kinds):
        return [skipped]
    judged = [e for e in stats.comparable if e.kind in kinds]
    if stats.beside:
        if all(unknown(error) not in ("", NOISE) for error in stats.of(kinds)):
            return [check.skip(stats.name, "not comparable: nothing is known of what eager mode gives")]
        return [_compared(stats, check, kinds, judged, limits)]
    others = _unknown(stats, check, kinds)
    findings = [_compared(stats, check, kinds, judged, limits), *others] if judged or not others else others
    return [*findings, *(finding for judge in alone for finding in judge(stats))]


def lowered(stats: AccuracyStats, check: Check, kinds: Collection[str]) -> list[Finding]:
    """Compiled code computes no op in 16 bits that eager mode computes in float32; other roundings may hide it."""
    ops = stats.lowered_in(kinds)
    if not ops or stats.exceptions.eager or stats.exceptions.compiled:
        return []
    others = f", and {len(ops) - 1} more ops so" if len(ops) > 1 else ""
    message = (
        f"compiled code must compute in 16 bits only what eager mode does; it computes {ops[0].op} of this line in "
        f"16 bits, and eager mode in float32{others}"
    )
    if failures := [] if stats.incomparable else stats.failures(tuple(kinds)):
        worst = max(failures, key=lambda e: (e.lost, e.times))
        far = f"lies {worst.error:.2g} from float64, {worst.eager_error:.2g} in eager mode"
        message += f"; {worst} {f'has {worst.lost:,} elements that are inf or NaN' if worst.lost else far}"
    stage, hint = _stage(stats)
    if not stage and ops[0].phase == "backward":
        hint = f'set {BACKWARD_AUTOCAST} = "off", or enter autocast inside the compiled region (pytorch/pytorch#179804)'
    evidence: Evidence = {"where": ops[0], "observed": len(ops), "limit": 0.0, "unit": "ops", "hint": hint}
    return [check.fail(stats.name, message + stage, **evidence)]


def _compared(
    stats: AccuracyStats, check: Check, kinds: tuple[str, ...], judged: Sequence[ResultError], limits: Limits
) -> Finding:
    """Return what the comparison with exact results and with eager mode found in results of these kinds."""
    if not judged:
        return check.skip(stats.name, f"not comparable: {listed(map(str, stats.of(kinds)))}: {NOISE}")
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
    skips = [check.skip(stats.name, f"not comparable: {listed(names)}: {reason}") for reason, names in reasons.items()]
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
    evidence = check.incomplete(stats.name, text, where=where, observed=count, limit=0.0, unit="elements", hint=hint)
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
        verdict, stats.name, message, where=where, observed=observed, limit=limit, unit=unit, hint=hint
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


def where_of(error: ResultError) -> Where:
    """The phase and module of a result."""
    return Where(_PHASES.get(error.kind, "forward"), module_of(error))


def module_of(error: ResultError) -> str:
    """The module of a weight or buffer; outputs and inputs belong to the root."""
    if error.kind in ("output", "loss", "input") or error.name.startswith("input "):
        return ""
    return error.name.rpartition(".")[0]


def seen_of(stats: GraphStats) -> int:
    """Graphs that were compiled and compiled runs."""
    return stats.coverage.seen.get("graphs", 0) + stats.coverage.seen.get("compiled runs", 0)


def passed_graphs(check: Check, stats: GraphStats, message: str, observed: float, limit: float) -> list[Finding]:
    """A pass; nothing where neither a graph nor a compiled run was seen, which `coverage` reports."""
    seen = seen_of(stats)
    return [check.passed(stats.subject, message, seen, observed=observed, limit=limit)] if seen else []


def broken(stats: GraphStats) -> list[str]:
    """Modules and functions that run eager because a graph break splits them."""
    return [
        name or "the model"
        for fallback in stats.fallbacks
        if fallback.cause == "graph break"
        for name in fallback.names
    ]


def names_of(names: Iterable[str]) -> str:
    """Names in a message, each once."""
    return listed(dict.fromkeys(names), _NAMES)
