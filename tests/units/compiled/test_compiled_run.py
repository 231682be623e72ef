"""The compiled run of an audit, on real code: defects that only compiled code has, and the same code without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcheck.compiled.accuracy.judge import accuracy_run, judge_accuracy, measure_compiled_run
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.limits import Limits
from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.numerics import measure_numerics, record

LOW = torch.bfloat16
BAD = (Verdict.FAIL, Verdict.WARN, Verdict.INCOMPLETE)
Forward = Callable[[nn.Module, Tensor, bool], Any]


class Model(nn.Module):
    """A linear layer, with what else the cases need; `forward_of` gets whether the defect is there."""

    def __init__(self, forward_of: Forward, planted: bool) -> None:
        super().__init__()
        self.forward_of, self.planted = forward_of, planted
        self.linear, self.norm = nn.Linear(32, 8), nn.LayerNorm(32)
        self.gate = nn.Parameter(torch.zeros(32))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.empty = nn.Parameter(torch.empty(0, 32))

    def forward(self, x: Tensor) -> Any:
        return self.forward_of(self, x, self.planted and torch.compiler.is_compiling())


def compiled_run(model: nn.Module, *args: Tensor, loss: Callable[[Any], Tensor] | None = None) -> Run:
    """Judge the compiled run of an audit in bfloat16, compiled by aot_eager, which is quick."""
    subject = Subject((torch.compile(model, backend="aot_eager"), args), name="model", loss=loss)
    eager = measure_numerics(subject, LOW, compared=True)
    return accuracy_run(measure_compiled_run(subject, eager, LOW), Limits())


def judged(forward: Forward, planted: bool, loss: Callable[[Any], Tensor] | None = None) -> Run:
    torch.manual_seed(0)
    return compiled_run(Model(forward, planted), torch.randn(16, 32), loss=loss)


def troubles(run: Run) -> dict[str, Finding]:
    return {finding.check: finding for finding in run.findings if finding.verdict in BAD}


def too_large(model: Any, x: Tensor, planted: bool) -> Tensor:
    y: Tensor = model.linear(x)
    return 3 * y if planted else y


def beside_an_empty_parameter(model: Any, x: Tensor, planted: bool) -> Tensor:
    return too_large(model, torch.cat([x, model.empty]), planted)


def index(model: Any, x: Tensor, planted: bool) -> tuple[Tensor, Tensor]:
    y = model.linear(x)
    best = y.argmax(-1)
    return y, (best + 1) % 8 if planted else best


def index_alone(model: Any, x: Tensor, planted: bool) -> Tensor:
    return index(model, x, planted)[1]


def buffer(model: Any, x: Tensor, planted: bool) -> Tensor:
    y: Tensor = model.linear(x)
    model.mean.lerp_(y.detach().float().mean(0), 0.9 if planted else 0.1)
    return y


def counter(model: Any, x: Tensor, planted: bool) -> Tensor:
    model.calls += 2 if planted else 1
    y: Tensor = model.linear(x)
    return y


def argument(model: Any, x: Tensor, planted: bool) -> Tensor:
    y: Tensor = model.linear(x)
    if planted:
        x.mul_(3)
    return y


def argument_of_both(model: Any, x: Tensor, planted: bool) -> Tensor:
    y: Tensor = model.linear(x)
    x.mul_(3 if planted else 2)
    return y


def weight(model: Any, x: Tensor, planted: bool) -> Tensor:
    y: Tensor = model.linear(x)
    if planted:
        with torch.no_grad():
            model.gate.add_(1)
    return y


def dtype(model: Any, x: Tensor, planted: bool) -> Tensor:
    y: Tensor = model.norm(x)
    return y.bfloat16() if planted else y


def container(model: Any, x: Tensor, planted: bool) -> Any:
    y = model.linear(x)
    return [y, y] if planted else (y,)


def small_gradient(model: Any, x: Tensor, planted: bool) -> Tensor:
    gate = 2 * model.gate.detach() - model.gate if planted else model.gate
    y: Tensor = model.linear(x + 0.02 * gate)
    return y


def small_gradient_beside_kinks(model: Any, x: Tensor, planted: bool) -> Tensor:
    return small_gradient(model, x, planted).relu()


def masked(model: Any, x: Tensor, planted: bool) -> Tensor:
    y = model.linear(x) * (model.mean > -1)
    return 1.3 * y if planted else y


def noise(model: Any, x: Tensor, planted: bool) -> tuple[Tensor, Tensor]:
    y = model.linear(x)
    zero = (y - y.mean(-1, keepdim=True)).detach().sum()
    return y, zero + 1e6 if planted else zero


DEFECTS: dict[str, tuple[Forward, tuple[str, ...]]] = {
    "a parameter without elements": (beside_an_empty_parameter, ("precision-loss", "compiled-error")),
    "integers": (index, ("compiled-error",)),
    "integers alone": (index_alone, ("compiled-error",)),
    "a buffer": (buffer, ("compiled-error",)),
    "a buffer of integers": (counter, ("compiled-error",)),
    "an argument that compiled code alone overwrites": (argument, ("compiled-error",)),
    "an argument that both overwrite": (argument_of_both, ("compiled-error",)),
    "a weight that forward writes": (weight, ("compiled-error",)),
    "a coarser dtype": (dtype, ("compiled-dtype", "compiled-error")),
    "a gradient that is small beside the others": (small_gradient, ("precision-loss", "compiled-gradient")),
    "such a gradient in a model with kinks": (small_gradient_beside_kinks, ("precision-loss", "compiled-gradient")),
    "what a mask leaves": (masked, ("precision-loss", "compiled-error")),
    "an output that is zero but for rounding": (noise, ("precision-loss", "compiled-error")),
    "a container": (container, ("compiled-dtype",)),
}
"""Each with the checks that fail."""


@pytest.mark.parametrize("name", DEFECTS)
def test_what_compiled_code_alone_does_fails_and_the_same_code_without_it_is_silent(name: str) -> None:
    forward, checks = DEFECTS[name]
    sound = judged(forward, planted=False)
    assert troubles(sound) == {}
    assert ("compiled-error", Verdict.PASS) in [(f.check, f.verdict) for f in sound.findings]
    found = troubles(judged(forward, planted=True))
    assert {check: found[check].verdict for check in checks} == dict.fromkeys(checks, Verdict.FAIL)


def test_a_change_that_eager_mode_does_not_make_is_named_with_its_size() -> None:
    (finding,) = troubles(judged(argument, planted=True)).values()
    assert "it changes input args.0 by" in finding.message
    assert finding.unit == "Euclidean norm"


def test_results_beyond_the_memory_of_a_run_are_counted_and_the_others_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "KEPT_BYTES", 600)  # the output has 256 bytes, the gradient of the weight 1024
    assert troubles(judged(too_large, planted=False)) == {}
    run = judged(too_large, planted=True)
    assert troubles(run)["compiled-error"].verdict is Verdict.FAIL
    assert run.coverage.unseen["gradients beyond the memory that one run keeps"] == 1


def test_a_run_that_cannot_be_repeated_is_incomplete() -> None:
    generator = torch.Generator().manual_seed(0)

    @torch.compiler.disable
    def draw() -> Tensor:
        return torch.rand(8, generator=generator)

    def forward(model: Any, x: Tensor, planted: bool) -> Tensor:
        y: Tensor = model.linear(x)
        return y + draw()

    found = troubles(judged(forward, planted=False))
    assert found["precision-loss"].verdict is Verdict.INCOMPLETE
    assert "two eager runs with equal seeds differ" in found["precision-loss"].message
    assert "compiled-error" not in found


def test_of_what_is_zero_but_for_rounding_alone_there_is_no_verdict() -> None:
    def forward(model: Any, x: Tensor, planted: bool) -> Tensor:
        return noise(model, x, planted)[1]

    run = judged(forward, planted=False)
    assert {f.verdict for f in run.findings if f.check in ("compiled-error", "coverage")} == {Verdict.SKIP}
    (reason,) = (reason for reason in run.coverage.unseen if reason.startswith("outputs"))
    assert "the data determine no digit of it" in reason
    assert troubles(judged(forward, planted=True))["compiled-error"].verdict is Verdict.FAIL


def test_parameters_that_wait_for_their_shape_are_compared_once_they_have_it() -> None:
    run = compiled_run(nn.Sequential(nn.LazyLinear(8), nn.GELU()), torch.randn(16, 32))
    assert troubles(run) == {}
    assert run.coverage.seen["gradients"] == 2


def test_an_update_of_the_users_optimizer_is_judged_where_the_gradient_of_compiled_code_is_wrong() -> None:
    options = CompileOptions("aot_eager")
    for planted in (False, True):
        torch.manual_seed(0)
        subject = Subject((Model(small_gradient, planted), torch.randn(16, 32)))
        run = judge_accuracy(
            Plan.of(subject, steps=2),
            dtype=LOW,
            optimizer=lambda weights: torch.optim.Adam(weights, lr=0.1),
            options=options,
        )
        assert run.coverage.seen["updates"] == 3
        assert ("update gate" in str(troubles(run).get("compiled-error"))) is planted
        assert bool(troubles(run)) is planted


def test_elements_of_updates_that_rounding_decides_are_counted_as_unseen() -> None:
    def forward(model: Any, x: Tensor, planted: bool) -> Tensor:
        y: Tensor = model.linear(torch.cat([x[:, :16], torch.zeros_like(x[:, 16:])], -1))
        return y

    subject = Subject((Model(forward, planted=False), torch.randn(16, 32)))
    run = judge_accuracy(
        Plan.of(subject, steps=2), dtype=LOW, optimizer=torch.optim.Adam, options=CompileOptions("aot_eager")
    )
    assert not run.failed
    assert run.coverage.unseen["elements of updates whose gradient is zero but for rounding"] >= 8 * 16


class Experts(nn.Module):
    """One of two experts for each token; compiled code takes the other one for the tokens that are `turned`."""

    def __init__(self, turned: Tensor) -> None:
        super().__init__()
        self.router, self.turned = nn.Linear(32, 2, bias=False), turned
        self.experts = nn.Parameter(torch.randn(2, 32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        if torch.compiler.is_compiling():
            chosen = torch.where(self.turned, 1 - chosen, chosen)
        return torch.einsum("nij,nj->ni", self.experts[chosen], x)


@pytest.mark.parametrize(("rows", "verdict"), [(slice(1), Verdict.WARN), (slice(1, 9), Verdict.FAIL)])
def test_decisions_that_turn_near_a_tie_are_a_warning_and_others_a_failure(rows: slice, verdict: Verdict) -> None:
    torch.manual_seed(0)
    x, turned = torch.randn(16, 32), torch.zeros(16, dtype=torch.bool)
    turned[rows] = True
    model = Experts(turned).requires_grad_(False)
    scores = model.router.weight
    scores[1] += (scores[0] - scores[1]) @ x[0] / x[0].square().sum() * x[0]  # those of the first token become equal
    assert (x @ (scores[0] - scores[1]))[0].abs() < 1e-5
    found = troubles(compiled_run(model, x))
    assert found["compiled-error"].verdict is verdict
    assert ("precision-loss" in found) is (verdict is Verdict.FAIL)
