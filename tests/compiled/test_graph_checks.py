"""The verdicts on what was noted: pure, without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.checks import REGISTRY
from ampcheck.compiled.graph.checks import GRAPH_CHECKS, check_graph, tables
from ampcheck.compiled.graph.stats import (
    Artifacts,
    Fallback,
    Graph,
    GraphBreak,
    GraphStats,
    Recompile,
    RunError,
)
from ampcheck.core.run import Coverage, Finding, Verdict, Where

CLEAN = GraphStats("net", graphs=(Graph("forward (net.py:3)", 4, 0.5),), ran=2, coverage=Coverage({"graphs": 1}))


def broken(line: int, times: int = 1) -> GraphBreak:
    return GraphBreak(Where("compile", file="net.py", line=line), "Data-dependent branching", "use where", times)


def again(kind: str = "shape", *, repeated: bool = False, late: bool = False) -> Recompile:
    return Recompile("forward (net.py:3)", Where("compile"), kind, "x.size()[0]", repeated, late, "mark it")


def found(stats: GraphStats, slug: str, **limits: int) -> list[Finding]:
    return [finding for finding in check_graph(stats, **limits) if finding.check == slug]


def failed(stats: GraphStats, **limits: int) -> list[str]:
    return [finding.check for finding in check_graph(stats, **limits) if finding.verdict is Verdict.FAIL]


def test_a_clean_run_passes_each_check_that_looked_at_something() -> None:
    assert [(f.check, f.verdict.value) for f in check_graph(CLEAN)] == [
        ("graph-break", "pass"),
        ("recompile", "pass"),
        ("eager-fallback", "pass"),
    ]


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 12))
def test_breaks_fail_exactly_when_a_call_has_more_than_the_limit(times: list[int], limit: int) -> None:
    stats = replace(CLEAN, breaks=tuple(broken(line, n) for line, n in enumerate(times)))
    expected = ["graph-break"] * len(times) if sum(times) > limit else []
    assert failed(stats, max_breaks=limit) == expected


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6), st.integers(0, 6), st.booleans())
def test_recompilations_count_when_late_or_repeated(ones: list[tuple[bool, bool]], limit: int, warm: bool) -> None:
    stats = replace(CLEAN, warm=warm, recompiles=tuple(again(repeated=r, late=late) for r, late in ones))
    count = sum(repeated or late for repeated, late in ones)
    assert bool(failed(stats, max_recompiles=limit)) == (count > limit)


@pytest.mark.parametrize(
    ("kind", "warm", "counts"), [("grad mode", True, 0), ("grad mode", False, 1), ("shape", False, 0)]
)
def test_without_a_warm_up_only_a_new_size_is_free(kind: str, warm: bool, counts: int) -> None:
    assert len(failed(replace(CLEAN, warm=warm, recompiles=(again(kind),)))) == counts


def test_recompilations_that_are_free_are_told_beside_those_that_fail() -> None:
    (finding,) = found(replace(CLEAN, warm=False, recompiles=(again("shape"), again("grad mode"))), "recompile")
    assert finding.verdict is Verdict.FAIL
    assert "there were 1;" in finding.message
    assert "1 recompilation to learn what varies (shape)" in finding.message


def test_recompilations_are_grouped_by_kind() -> None:
    ones = tuple(again(kind, late=True) for kind in ("shape", "grad mode", "shape"))
    messages = [f.message for f in found(replace(CLEAN, recompiles=ones), "recompile")]
    assert len(messages) == 2
    assert "2 of forward (net.py:3) by its guard on shape" in messages[0]
    assert "1 of forward (net.py:3) by its guard on the grad mode" in messages[1]


@pytest.mark.parametrize("cause", ["recompile limit", "backend error", "skipped"])
def test_what_ran_eager_fails_with_its_names(cause: str) -> None:
    stats = replace(CLEAN, fallbacks=(Fallback(("layers.8", "layers.9"), cause, "the reason"),))
    (finding,) = found(stats, "eager-fallback")
    assert finding.verdict is Verdict.FAIL
    assert finding.observed == 2
    assert "layers.8, layers.9" in finding.message
    assert "the reason" in finding.message
    assert finding.hint


def test_what_ran_eager_through_a_break_is_told_with_the_break() -> None:
    stats = replace(CLEAN, breaks=(broken(3),), fallbacks=(Fallback(("loop",), "graph break", "cut"),))
    assert failed(stats) == ["graph-break"]
    assert "eager because of breaks: loop" in found(stats, "graph-break")[0].message
    assert "loop" in found(stats, "eager-fallback", max_breaks=1)[0].message


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        (Artifacts("save", 2, 1), "pass"),
        (Artifacts("save", 0, 0), "fail"),
        (Artifacts("save", 0, 3), "fail"),
        (Artifacts("load", 2, 0, hits=1, later=1), "pass"),
        (Artifacts("load", 2, 0, hits=0, later=1), "fail"),
        (Artifacts("load", 0, 0), "fail"),
    ],
)
def test_artifacts_are_to_be_something_and_used(call: Artifacts, verdict: str) -> None:
    (finding,) = found(replace(CLEAN, artifacts=(call,)), "cache-artifacts")
    assert finding.verdict.value == verdict
    assert bool(finding.hint) == (verdict == "fail")


@pytest.mark.parametrize(
    ("asks", "device", "skips", "verdict"),
    [
        ("", "cuda", {}, None),
        ("", "cuda", {"cpu device": 1}, "skip"),
        ("mode='reduce-overhead'", "cpu", {"cpu device": 1}, "skip"),
        ("mode='reduce-overhead'", "cuda", {}, "pass"),
        ("mode='reduce-overhead'", "cuda:1", {"mutated inputs": 2}, "fail"),
        ("triton.cudagraphs", "cuda", {"mutated inputs": 2}, "fail"),
        ("mode='max-autotune'", "cuda", {"mutated inputs": 2}, "warn"),
        ("", "cuda", {"mutated inputs": 2}, "warn"),
        ("", "cpu", {"no reason given": 1}, "skip"),
    ],
)
def test_cuda_graphs_that_were_asked_for_are_used(
    asks: str, device: str, skips: dict[str, int], verdict: str | None
) -> None:
    findings = found(replace(CLEAN, wants_cudagraphs=asks, device=device, skips=skips), "cudagraph")
    assert [f.verdict.value for f in findings] == ([verdict] if verdict else [])
    assert not skips or verdict in (None, "skip") or "mutated inputs (2)" in findings[0].message


def test_an_output_that_was_overwritten_is_found() -> None:
    text = "RuntimeError: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run"
    stats = replace(CLEAN, error=RunError(text, "RuntimeError"))
    assert failed(stats) == ["cudagraph"]
    assert "mark_step_begin" in found(stats, "cudagraph")[0].hint


@pytest.mark.parametrize(
    ("stopped", "checks"),
    [
        (RunError("ValueError: x", "ValueError"), ["compiled-exception"]),
        (RunError("ValueError: x", "ValueError", eager="ValueError: x"), ["coverage"]),
        (RunError("ValueError: x", "ValueError", eager=None), ["coverage"]),
        (RunError("InvalidCxxCompiler: none", "InvalidCxxCompiler", machine="no compiler"), []),
        (RunError("ImportError: file too short", "ImportError", eager=None, machine="a broken file"), []),
    ],
)
def test_an_exception_is_the_compilers_or_the_subjects_own(stopped: RunError, checks: list[str]) -> None:
    assert failed(replace(CLEAN, error=stopped)) == checks


def test_nothing_compiled_is_a_failure_and_declined_is_a_skip_with_the_reason() -> None:
    nothing = GraphStats("net", coverage=Coverage({"graphs": 0, "compiled runs": 0}))
    assert failed(nothing) == ["coverage"]
    declined = replace(nothing, breaks=(broken(3),))
    assert [f.verdict.value for f in check_graph(declined, max_breaks=1)] == ["skip"]
    assert "Data-dependent branching" in check_graph(declined, max_breaks=1)[0].message


def test_an_unknown_pytorch_gives_one_skip_and_no_other_verdict() -> None:
    (finding,) = check_graph(replace(CLEAN, unsupported="PyTorch 9 is new", breaks=(broken(3),)))
    assert finding.verdict is Verdict.SKIP
    assert "PyTorch 9 is new" in finding.message


def test_tables_hold_the_evidence_and_empty_ones_are_left_out() -> None:
    assert [table.title for table in tables(CLEAN)] == ["Graphs: net"]
    stats = replace(
        CLEAN, breaks=(broken(3),), recompiles=(again(),), caches={"FX graph cache hits": 1}, modes={"eval": 1}
    )
    assert len(tables(stats)) == 5
    many = replace(CLEAN, graphs=CLEAN.graphs * 100)
    assert len(tables(many)[0].rows) == 60
    assert "of 100" in tables(many)[0].note


def test_each_check_has_a_page() -> None:
    assert set(GRAPH_CHECKS) <= set(REGISTRY)
