"""The verdicts on what was noted: pure, without a model."""

from __future__ import annotations

from dataclasses import replace

from checks.compile.records import CLEAN, again, broken, failed

from ampcheck.checks import REGISTRY
from ampcheck.compiled.graph.checks import GRAPH_CHECKS, check_graph, tables
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Coverage, Verdict
from ampcheck.records.graphs import GraphStats


def test_a_clean_run_passes_each_check_that_looked_at_something() -> None:
    assert [(f.check, f.verdict.value) for f in check_graph(CLEAN, GraphLimits())] == [
        ("graph-break", "pass"),
        ("recompile", "pass"),
        ("eager-fallback", "pass"),
    ]


def test_nothing_compiled_is_a_failure_and_declined_is_a_skip_with_the_reason() -> None:
    nothing = GraphStats("net", coverage=Coverage({"graphs": 0, "compiled runs": 0}))
    assert failed(nothing) == ["coverage"]
    declined = replace(nothing, breaks=(broken(3),))
    assert [f.verdict.value for f in check_graph(declined, GraphLimits(max_breaks=1))] == ["skip"]
    assert "Data-dependent branching" in check_graph(declined, GraphLimits(max_breaks=1))[0].message


def test_an_unknown_pytorch_gives_one_skip_and_no_other_verdict() -> None:
    (finding,) = check_graph(replace(CLEAN, unsupported="PyTorch 9 is new", breaks=(broken(3),)), GraphLimits())
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
