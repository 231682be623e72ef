"""What `audit` says of the checks that are selected, and of a callable whose ops it cannot follow."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck.audit import audit
from ampcheck.autocast.guards.guard import GUARD_CHECKS
from ampcheck.checks import for_kind
from ampcheck.compiled.accuracy.checks import CHECKS as ACCURACY_CHECKS
from ampcheck.compiled.graph.checks import GRAPH_CHECKS
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Kind
from ampcheck.numerics.checks import OBSERVABLE
from ampcheck.training.judge import CHECKS

MODEL = nn.Linear(4, 4), (torch.ones(2, 4),)


def finding(run: Run, check: str) -> Finding:
    (found,) = (finding for finding in run.findings if finding.check == check)
    return found


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Overflows float16 from values of 256 on."""
    return x / (x * x).mean(-1, keepdim=True).sqrt()


def pooled(scale: float) -> Callable[[], torch.Tensor]:
    def compute() -> torch.Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.stack(list(pool.map(normalise, torch.full((4, 8), scale, dtype=torch.float16))))

    return compute


@pytest.mark.parametrize("checks", [None, ["overflow", "silent-zero"], ["tf32"]])
@pytest.mark.parametrize(("scale", "verdict"), [(300.0, Verdict.WARN), (3.0, Verdict.INCOMPLETE)])
def test_a_callable_that_computes_in_other_threads_is_no_full_pass(
    checks: Collection[str] | None, scale: float, verdict: Verdict
) -> None:
    run = audit(pooled(scale), checks=checks)
    coverage = finding(run, "coverage")
    assert coverage.verdict is verdict
    assert "ops of other threads were not judged" in coverage.message
    assert ("another thread made an infinity" in coverage.message) is (scale > 256)
    assert run.coverage.unseen["ops of other threads"] >= 16
    assert coverage.hint


def test_the_same_callable_in_this_thread_is_judged() -> None:
    def compute(scale: float) -> torch.Tensor:
        return torch.stack(list(map(normalise, torch.full((4, 8), scale, dtype=torch.float16))))

    assert audit(lambda: compute(300.0), checks=["overflow"]).failed
    sound = audit(lambda: compute(3.0))
    assert not sound.failed
    assert finding(sound, "coverage").verdict is Verdict.PASS


def test_masks_of_another_thread_are_no_values_that_became_infinite() -> None:
    def compute() -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            masked = pool.submit(lambda: torch.ones(2, 2).masked_fill(torch.eye(2).bool(), -torch.inf))
            return masked.result().softmax(-1)

    assert finding(audit(compute), "coverage").verdict is Verdict.INCOMPLETE


def test_ops_of_a_callable_are_counted_once() -> None:
    run = audit(lambda: torch.ones(3).half() * 2, checks=["overflow", "autocast-state"])
    assert run.coverage.seen["ops"] == 3


def test_integers_alone_are_evidence_in_a_callable_and_in_a_block() -> None:
    def sample() -> int:
        return int((torch.arange(10) % 3).max())

    assert finding(audit(sample, checks=["overflow"]), "coverage").verdict is Verdict.PASS
    with ampcheck.watch(checks=["overflow", "integer-cast"]) as seen:
        sample()
    assert finding(seen.run, "coverage").verdict is Verdict.PASS


def test_limits_of_a_callable_subject_count() -> None:
    def deviation() -> float:
        values = 1000 + torch.rand(64, generator=torch.Generator().manual_seed(0)) * 0.1
        return (values.half() - 1000).float().std().item()

    assert audit(deviation, checks=["precision-loss"]).failed
    lenient = ampcheck.Subject(deviation, limits={"precision": 1e9})
    assert not audit(lenient, checks=["precision-loss"]).failed
    with pytest.raises(UsageError, match="unknown limit 'precison'"):
        audit(ampcheck.Subject(deviation, limits={"precison": 3.0}))


@pytest.mark.parametrize("subject", [MODEL, lambda: torch.ones(2).sum()])
def test_a_selection_of_nothing_is_refused(subject: Any) -> None:
    with pytest.raises(UsageError, match="checks selects nothing"):
        audit(subject, checks=[])
    with pytest.raises(UsageError, match="checks selects nothing"):
        ampcheck.watch(checks=[]).__enter__()


@pytest.mark.parametrize(
    ("subject", "check"),
    [
        (MODEL, "resume"),
        (MODEL, "autocast-scope"),
        (lambda: None, "low-precision-error"),
        (lambda: None, "policy-gap"),
    ],
)
def test_a_selection_of_which_nothing_applies_is_refused(subject: Any, check: str) -> None:
    with pytest.raises(UsageError, match=rf"is judged by .*; asked for was {check}"):
        audit(subject, checks=[check])


@pytest.mark.parametrize(
    ("subject", "check", "reason"),
    [
        (MODEL, "resume", "to which this check does not apply"),
        (MODEL, "dtype", "declares no dtypes"),
        (MODEL, "graph-break", "compile=False"),
        (MODEL, "compiled-error", "compile=False"),
        (lambda: torch.ones(2).half() + 1, "resume", "nothing that this check looks at"),
        (lambda: torch.ones(2).half() + 1, "cache-artifacts", ""),
    ],
)
def test_a_selected_check_that_did_not_run_is_incomplete_with_its_reason(subject: Any, check: str, reason: str) -> None:
    run = audit(subject, checks=["overflow", check], dtype="float16", compile=False)
    lacking = finding(run, check)
    assert lacking.verdict is Verdict.INCOMPLETE
    assert "not judged: " in lacking.message
    assert reason in lacking.message


@pytest.mark.parametrize("check", ["graph-break", "compiled-error"])
def test_an_assertion_of_a_selected_check_that_did_not_run_does_not_hold(check: str) -> None:
    with pytest.raises(AssertionError, match=f"\\[{check}\\] incomplete: .*selected and not judged: compile=False"):
        ampcheck.assert_numerics(*MODEL, dtype="float16", checks=["overflow", check], compile=False)


def test_an_assertion_of_checks_that_ran_holds() -> None:
    run = ampcheck.assert_numerics(*MODEL, dtype="float16", checks=["overflow", "integer-cast"], compile=False)
    assert not run.of(Verdict.FAIL)


@pytest.mark.parametrize("value", [None, "no", 1])
def test_compile_is_true_or_false(value: Any) -> None:
    with pytest.raises(UsageError, match="compile must be True or False"):
        audit(MODEL, compile=value)


@pytest.mark.needs_torch("2.7", "torch.compiler.save_cache_artifacts")
def test_caches_of_a_callable_are_judged_where_its_functions_are_compiled() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).sin()

    def saves(load: bool) -> torch.Tensor:
        torch.compiler.reset()
        torch.compile(function)(torch.ones(4))
        data, _ = torch.compiler.save_cache_artifacts()
        torch.compiler.reset()
        if load:
            torch.compiler.load_cache_artifacts(data)
        return torch.compile(function)(torch.ones(4)).sum()

    def loads_in_vain() -> torch.Tensor:
        saves(load=True)
        data, _ = torch.compiler.save_cache_artifacts()
        torch.compiler.load_cache_artifacts(data)
        return torch.ones(4).sum()

    for checks in (None, ["overflow", "cache-artifacts"]):
        run = audit(lambda: saves(load=True), checks=checks)
        assert not run.failed, run.of(Verdict.FAIL)
        assert {f.verdict for f in run.findings if f.check == "cache-artifacts"} == {Verdict.PASS}
        assert Verdict.PASS not in {f.verdict for f in run.findings if f.check == "coverage"}
        assert [f.check for f in audit(loads_in_vain, checks=checks).of(Verdict.FAIL)] == ["cache-artifacts"]


def test_every_check_that_judges_a_callable_can_be_selected_for_it() -> None:
    of_compiled_code = {*GRAPH_CHECKS, *ACCURACY_CHECKS}
    judged = {*GUARD_CHECKS, *OBSERVABLE, *CHECKS, *of_compiled_code}
    assert judged == set(for_kind(Kind.CALL))
    assert set(GUARD_CHECKS) <= set(for_kind(Kind.TRAINING))
