"""At the edge of a domain and of overflow: what is inf or NaN excuses nothing and hides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampcheck.compiled.accuracy import arms
from ampcheck.compiled.accuracy.arms import Plan, Trajectory, nudge
from ampcheck.compiled.accuracy.compare import Draw, deviations
from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.accuracy.ladder import measure_bench
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.formats import format_of
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.torchtools.copying import prepare


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
    run = judge_accuracy((root_at_its_edge, [at_the_edge()]), options=CompileOptions(multiplied(1.5)))
    (failure,) = found(run, "compiled-error")
    assert failure.verdict is Verdict.FAIL
    assert failure.limit is not None
    assert failure.limit < 0.01


def test_data_at_the_edge_of_the_domain_are_no_failure_of_healthy_code() -> None:
    for way in (root_at_its_edge, lambda x, t: torch.sqrt(2 - x) + t):
        run = judge_accuracy((way, [at_the_edge()]), options=CompileOptions("aot_eager"))
        assert not run.failed
        assert found(run, "compiled-error")[0].verdict is Verdict.PASS


@pytest.mark.parametrize("function", [lambda x, t: torch.sqrt(x - 1) + t, lambda x, t: torch.sqrt(1 / x - 0.5) + t])
def test_a_nudge_that_leaves_the_domain_is_tried_with_other_signs(function: Callable[..., Tensor]) -> None:
    x, t = at_the_edge()
    x = torch.where(x == 1, 1 / x if function(x, t)[0] == t[0] else 2.0, x)
    bench = measure_bench(Subject((function, [(x, t)])), Plan(backward=False), torch.float32)
    assert len(bench.hairs) > 1
    assert any(bool(hair.values["output", "", 0].isfinite().all()) for hair in bench.hairs)


def test_a_run_with_other_decisions_that_raises_or_is_not_finite_moves_no_limit() -> None:
    def arm(*values: float) -> Trajectory:
        return Trajectory(values={("output", "", 0): torch.tensor(values, dtype=torch.float64)})

    right, draw = arm(1.0, 2.0), Draw(arm(1.0, 2.0), arm(1.0, 2.0))
    for broken in (arm(math.nan, 2.0), arm(math.inf, 2.0), Trajectory()):
        (only,) = deviations([draw, draw], [right], [broken, arm(1.0, 2.1)], [broken, arm(1.0, 2.2)])
        assert only.float32 == pytest.approx(0.1 / math.sqrt(5))
        assert only.turned == pytest.approx(0.2 / math.sqrt(5))
        (only,) = deviations([draw, draw], [right], [broken], [broken])
        assert (only.float32, only.turned) == (math.inf, 0.0)


def test_nan_on_the_users_data_alone_fails_whatever_other_data_give() -> None:
    given = torch.rand(64) + 0.5

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            poisoned = any(isinstance(a, Tensor) and a.shape == given.shape and torch.equal(a, given) for a in args)
            return tuple(out * math.nan if poisoned else out for out in graph.forward(*args))

        return run

    run = judge_accuracy((lambda x: torch.sin(x) * 2, [(given,)]), options=CompileOptions(backend))
    (failure,) = found(run, "compiled-error")
    assert failure.verdict is Verdict.FAIL
    assert "64 elements of output are inf or NaN" in failure.message


def test_one_infinity_in_eager_mode_leaves_the_other_elements_compared() -> None:
    given = torch.linspace(-2, 2, 1000).half()
    given[0] = 300.0
    wrong = judge_accuracy((lambda x: x * x, [(given,)]), options=CompileOptions(multiplied(1.9)))
    assert Verdict.FAIL in {f.verdict for f in found(wrong, "compiled-error")}
    right = judge_accuracy((lambda x: x * x, [(given,)]), options=CompileOptions("aot_eager"))
    assert not right.failed


def test_a_nudge_moves_every_value_of_float64_by_one_rounding_of_float32() -> None:
    u = format_of("float32").unit_roundoff
    x = torch.rand(256, dtype=torch.float64) + 0.5
    for amount, seed, ways in ((u, 1, {-1.0, 1.0}), (u, None, {1.0}), (-u, None, {-1.0})):
        prepared = prepare(Subject((torch.sin, [(x,)])))
        nudge(prepared, amount, seed)
        moved = (prepared.calls[0].args[0] / x - 1) / u
        assert torch.allclose(moved.abs(), torch.ones_like(x), rtol=1e-6)
        assert set(moved.round().tolist()) == ways


def test_what_float64_could_not_keep_is_counted_and_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "KEPT_BYTES", 1600)  # two outputs and a gradient of 512 bytes, or one of 1,024
    subject = (lambda x: (x.sin(), x.cos()), [(torch.rand(128, requires_grad=True),)])
    run = judge_accuracy(subject, options=CompileOptions("aot_eager"))
    assert run.coverage.seen["outputs"] == 1
    assert run.coverage.unseen["outputs beyond the memory that one run keeps"] == 1


def test_nan_in_float64_eager_mode_and_compiled_code_alike_is_no_pass() -> None:
    made = judge_accuracy((lambda x: torch.log(-x.abs() - 1), [(torch.randn(8),)]), options=CompileOptions("aot_eager"))
    assert [f.verdict for f in found(made, "compiled-error")] == [Verdict.INCOMPLETE]
    assert "8 elements of output are NaN in float64 and compiled code alike" in found(made, "compiled-error")[0].message
    assert found(made, "coverage")[0].verdict is Verdict.INCOMPLETE


def test_infinities_that_the_model_means_are_compared_in_place_and_sign() -> None:
    def masked(x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, -math.inf)

    run = judge_accuracy((masked, [(torch.linspace(-1, 1, 9),)]), options=CompileOptions("aot_eager"))
    assert [f.verdict for f in found(run, "compiled-error")] == [Verdict.PASS]
    swapped = judge_accuracy((masked, [(torch.linspace(-1, 1, 9),)]), options=CompileOptions(multiplied(-1.0)))
    assert Verdict.FAIL in {f.verdict for f in found(swapped, "compiled-error")}
