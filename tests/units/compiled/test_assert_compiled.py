"""assert_compiled judges accuracy and graphs; the checks that are named select the family that runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_cases import EAGER, Branching, Net, X, double

from ampcheck.compiled import assert_compiled as module
from ampcheck.compiled.accuracy.checks import CHECKS as ACCURACY_CHECKS
from ampcheck.compiled.assert_compiled import CHECKS, assert_compiled
from ampcheck.compiled.graph.checks import GRAPH_CHECKS
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Verdict
from ampcheck.core.subject import Subject


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The families that ran."""
    ran: list[str] = []
    for family in ("judge_graph", "judge_accuracy"):
        judge = getattr(module, family)

        def recorded(*args: Any, family: str = family, judge: Any = judge, **kwargs: Any) -> Any:
            ran.append(family)
            return judge(*args, **kwargs)

        monkeypatch.setattr(module, family, recorded)
    return ran


def test_by_default_both_families_are_judged_and_reported_in_one_run(families: list[str]) -> None:
    run = assert_compiled(Net(), (X,), options=EAGER)
    assert families == ["judge_graph", "judge_accuracy"]
    checks = {finding.check for finding in run.of(Verdict.PASS)}
    assert checks >= {"graph-break", "recompile", "eager-fallback", "compiled-error", "compiled-gradient"}
    assert set(run.coverage.seen) >= {"graphs", "compiled runs", "outputs", "gradients"}


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ("graph-break", ["judge_graph"]),
        (GRAPH_CHECKS, ["judge_graph"]),
        (["compiled-error"], ["judge_accuracy"]),
        (["compiled-exception", "coverage"], ["judge_accuracy"]),
        (tuple(ACCURACY_CHECKS), ["judge_accuracy"]),
        (["recompile", "compiled-gradient"], ["judge_graph", "judge_accuracy"]),
        (CHECKS, ["judge_graph", "judge_accuracy"]),
    ],
)
def test_a_family_of_which_no_check_is_named_does_not_run(
    checks: Any, expected: list[str], families: list[str]
) -> None:
    run = assert_compiled(Net(), (X,), options=EAGER, checks=checks)
    assert families == expected
    named = {checks} if isinstance(checks, str) else set(checks)
    assert {finding.check for finding in run.findings} <= named | {"compiled-exception", "coverage"}


def test_a_graph_break_is_a_failure_and_a_limit_allows_it() -> None:
    with pytest.raises(AssertionError, match="graph-break"):
        assert_compiled(Branching(), (X,), options=EAGER, checks="graph-break")
    assert_compiled(Branching(), (X,), options=EAGER, checks="graph-break", graphs=GraphLimits(max_breaks=1))


def test_several_dtypes_are_judged_one_after_the_other(families: list[str]) -> None:
    run = assert_compiled(Net(), (X,), dtype=["bfloat16", "float32"], options=EAGER, checks="compiled-dtype")
    assert families == ["judge_accuracy"] * 2
    assert {f.subject for f in run.findings} == {
        "Net [bfloat16, compiled by eager]",
        "Net [float32, compiled by eager]",
    }


def test_of_code_that_compiles_by_itself_the_graphs_alone_are_judged(families: list[str]) -> None:
    compiled = torch.compile(double, backend="eager")
    run = assert_compiled(Subject(lambda: compiled(X), name="use"))
    assert families == ["judge_graph"]
    assert not run.failed
    with pytest.raises(UsageError, match="through its model"):
        assert_compiled(lambda: compiled(X), checks="compiled-error")
