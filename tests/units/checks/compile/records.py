"""Records of compiled runs, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ampcheck.compiled.accuracy.checks import check_accuracy
from ampcheck.compiled.graph.checks import check_graph
from ampcheck.core.arm import Arm
from ampcheck.core.limits import GraphLimits, Limits
from ampcheck.core.run import Coverage, Finding, Verdict, Where
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.records.graphs import Graph, GraphBreak, GraphStats, Recompile
from ampcheck.records.results import Examination, ResultError
from ampcheck.shadow.compare import with_verdict
from ampcheck.shadow.freedom import Freedom

CLEAN = GraphStats("net", graphs=(Graph("forward (net.py:3)", 4, 0.5),), ran=2, coverage=Coverage({"graphs": 1}))


def broken(line: int, times: int = 1) -> GraphBreak:
    return GraphBreak(Where("compile", file="net.py", line=line), "Data-dependent branching", "use where", times)


def again(kind: str = "shape", *, repeated: bool = False, late: bool = False) -> Recompile:
    return Recompile("forward (net.py:3)", Where("compile"), kind, "x.size()[0]", repeated, late, "mark it")


def found(stats: GraphStats, slug: str, **limits: int) -> list[Finding]:
    return [finding for finding in check_graph(stats, GraphLimits(**limits)) if finding.check == slug]


def failed(stats: GraphStats, **limits: int) -> list[str]:
    return [finding.check for finding in check_graph(stats, GraphLimits(**limits)) if finding.verdict is Verdict.FAIL]


U16, U32 = 2.0**-8, 2.0**-24


def error(kind: str = "output", name: str = "", step: int = 0, **facts: Any) -> ResultError:
    """A result with an error of one rounding of float32; `error=` makes it larger, and beyond."""
    off, eager = facts.pop("error", U32), facts.pop("eager_error", U32)
    flagged = int(facts.pop("beyond", off > 32 * U32))
    seen = Examination(100, flagged=flagged, error=off, spread=U32, limit=32 * U32 if flagged else 0.0, impact=off)
    plain = ResultError(
        (kind, name, step), "float32", seen, U32, off,
        eager=Examination(100, error=eager), eager_norm=eager, apart=off, judged=100,
    )  # fmt: skip
    return replace(plain, **facts)


def stats(*errors: ResultError, freedom: Freedom | None = None, casts: bool = False, **facts: Any) -> AccuracyStats:
    whole = AccuracyStats("model", Arm("bfloat16"), "bfloat16", autocast=True, graphs=1)
    judged = tuple(with_verdict(e, freedom or Freedom(), casts=casts) for e in errors)
    return replace(whole, errors=judged, coverage=Coverage({"outputs": len(errors)}), **facts)


def verdicts(record: AccuracyStats, check: str) -> list[Verdict]:
    return [f.verdict for f in check_accuracy(record, Limits()) if f.check == check]


def only(record: AccuracyStats, check: str, verdict: Verdict) -> Finding:
    (finding,) = [f for f in check_accuracy(record, Limits()) if f.check == check and f.verdict is verdict]
    return finding
