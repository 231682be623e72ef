"""At the edge of a domain and of overflow: what is inf or NaN excuses nothing and hides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.numerics import record


def multiplied(by: float) -> Callable[..., Any]:
    """A backend whose results are all so many times too large."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return lambda *args: tuple(out * by for out in graph.forward(*args))

    return backend


def found(run: Run, check: str) -> list[Finding]:
    return [f for f in run.findings if f.check == check]


def root_at_its_edge(x: Tensor, t: Tensor) -> Tensor:
    return torch.sqrt(x - 1) + t


def at_the_edge() -> tuple[Tensor, Tensor]:
    x = 1 + torch.linspace(0.1, 1, 32)
    x[::2] = 1.0  # a step down from here has no root
    return x, torch.full((32,), 0.5)


def test_data_that_a_rounding_takes_out_of_the_domain_excuse_no_garbage() -> None:
    run = judge_accuracy(Plan.of((root_at_its_edge, [at_the_edge()])), options=CompileOptions(multiplied(1.5)))
    (failure,) = found(run, "compiled-error")
    assert failure.verdict is Verdict.FAIL
    assert failure.limit is not None
    assert failure.limit < 0.01


def test_data_at_the_edge_of_the_domain_are_no_failure_of_healthy_code() -> None:
    for way in (root_at_its_edge, lambda x, t: torch.sqrt(2 - x) + t):
        run = judge_accuracy(Plan.of((way, [at_the_edge()])), options=CompileOptions("aot_eager"))
        assert not run.failed
        assert found(run, "compiled-error")[0].verdict is Verdict.PASS


def test_nan_on_the_users_data_alone_fails_whatever_other_data_give() -> None:
    given = torch.rand(64) + 0.5

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            poisoned = any(isinstance(a, Tensor) and a.shape == given.shape and torch.equal(a, given) for a in args)
            return tuple(out * math.nan if poisoned else out for out in graph.forward(*args))

        return run

    run = judge_accuracy(Plan.of((lambda x: torch.sin(x) * 2, [(given,)])), options=CompileOptions(backend))
    (failure,) = found(run, "compiled-error")
    assert failure.verdict is Verdict.FAIL
    assert "64 elements of output are inf or NaN" in failure.message


def test_one_infinity_in_eager_mode_leaves_the_other_elements_compared() -> None:
    given = torch.linspace(-2, 2, 1000).half()
    given[0] = 300.0
    wrong = judge_accuracy(Plan.of((lambda x: x * x, [(given,)])), options=CompileOptions(multiplied(1.9)))
    assert Verdict.FAIL in {f.verdict for f in found(wrong, "compiled-error")}
    right = judge_accuracy(Plan.of((lambda x: x * x, [(given,)])), options=CompileOptions("aot_eager"))
    assert not right.failed


def test_what_float64_could_not_keep_is_counted_and_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "KEPT_BYTES", 3000)  # of a value with its companions, 16 bytes for each element
    subject = (lambda x: (x.sin(), x.cos()), [(torch.rand(128, requires_grad=True),)])
    run = judge_accuracy(Plan.of(subject), options=CompileOptions("aot_eager"))
    assert run.coverage.seen["outputs"] == 1
    assert run.coverage.unseen["outputs beyond the memory that one run keeps"] == 1


def test_nan_in_float64_eager_mode_and_compiled_code_alike_is_no_pass() -> None:
    made = judge_accuracy(
        Plan.of((lambda x: torch.log(-x.abs() - 1), [(torch.randn(8),)])), options=CompileOptions("aot_eager")
    )
    assert [f.verdict for f in found(made, "compiled-error")] == [Verdict.INCOMPLETE]
    assert "8 elements of output are NaN in both runs and in float64" in found(made, "compiled-error")[0].message
    assert found(made, "coverage")[0].verdict is Verdict.INCOMPLETE


def test_infinities_that_the_model_means_are_compared_in_place_and_sign() -> None:
    def masked(x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, -math.inf)

    run = judge_accuracy(Plan.of((masked, [(torch.linspace(-1, 1, 9),)])), options=CompileOptions("aot_eager"))
    assert [f.verdict for f in found(run, "compiled-error")] == [Verdict.PASS]
    swapped = judge_accuracy(Plan.of((masked, [(torch.linspace(-1, 1, 9),)])), options=CompileOptions(multiplied(-1.0)))
    assert Verdict.FAIL in {f.verdict for f in found(swapped, "compiled-error")}
