"""The error limit follows from the format and the model: healthy arithmetic passes, a planted error fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from ampcheck import Finding, Limits, Run, Subject, Verdict, audit


def _run(model: object, *inputs: Tensor, dtype: str = "bfloat16", **options: object) -> Run:
    return audit(Subject((model, inputs), **options), dtype=dtype, compile=False, limits=Limits())  # type: ignore[arg-type]


def _bad(run: Run, check: str) -> list[Finding]:
    return [f for f in run.findings if f.check == check and f.verdict is Verdict.FAIL]


class Rough(nn.Module):
    """Adds an offset and takes it away again: 16 bits keep the digits of the sum, not those of the values."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.offset) - self.offset


def _stack(width: int, depth: int, activation: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), activation, nn.LayerNorm(width)]
    return nn.Sequential(*layers)


@settings(max_examples=25)
@given(
    width=st.sampled_from([8, 32, 96]),
    depth=st.integers(1, 8),
    activation=st.sampled_from([nn.GELU(), nn.ReLU(), nn.Tanh(), nn.SiLU()]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(["float16", "bfloat16"]),
)
def test_healthy_stacks_of_any_depth_pass(width: int, depth: int, activation: nn.Module, seed: int, dtype: str) -> None:
    run = _run(_stack(width, depth, activation, seed), torch.randn(4, width), dtype=dtype)
    assert not run.failed, [f.message for f in run.of(Verdict.FAIL)]


@pytest.mark.parametrize("depth", [2, 8])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gradient_that_is_the_rounding_of_the_output_alone_passes(dtype: str, depth: int) -> None:
    """The mean of squares of a normalised output is constant: its exact gradient is zero but for eps."""
    for seed in range(3):
        run = _run(_stack(96, depth, nn.GELU(), seed), torch.randn(4, 96), dtype=dtype)
        assert not run.failed, [f.message for f in run.of(Verdict.FAIL)]


_NORMS = [lambda: nn.BatchNorm1d(8), lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8)]


def _step(norm: nn.Module, dtype: torch.dtype, half: bool, body: nn.Module) -> Callable[[], None]:
    """A forward and backward pass of a user's own, with a norm of what a norm gives as its loss."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), body, norm), torch.randn(16, 8)
    if half:
        model, x = model.to(dtype), x.to(dtype)

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=not half):
            output = model(x)
        output.float().norm().backward()

    return step


@pytest.mark.parametrize("half", [False, True], ids=["autocast", "half"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", _NORMS, ids=["batch", "layer", "group"])
def test_a_loss_that_normalisation_makes_constant_passes_in_code_of_any_kind(
    norm: Callable[[], nn.Module], dtype: torch.dtype, half: bool
) -> None:
    run = audit(_step(norm(), dtype, half, nn.GELU()))
    assert not run.failed, [f.message for f in run.of(Verdict.FAIL)]
    assert _bad(audit(_step(norm(), dtype, half, Rough(1000))), "precision-loss")


@settings(max_examples=15)
@given(length=st.integers(1, 40), scale=st.floats(0.1, 10), dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_healthy_chains_of_elementwise_ops_pass(length: int, scale: float, dtype: torch.dtype) -> None:
    def chain(x: Tensor) -> Tensor:
        for step in range(length):
            x = x * (-1) ** step + torch.sin(x / (1 + scale) + step % 3) * 0.1  # bfloat16 rounds a phase of 40 by 0.1
        return x

    x = (torch.randn(64, generator=torch.Generator().manual_seed(length)) * scale).to(dtype)
    assert not _run(chain, x).failed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_planted_error_fails_and_names_the_first_module_that_has_it(dtype: str) -> None:
    offset = 1000 if dtype == "float16" else 100
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), Rough(offset), nn.Linear(32, 32))
    (output, *_) = _bad(_run(model, torch.randn(16, 32), dtype=dtype), "precision-loss")
    assert output.where.module == "2"
    assert output.observed > output.limit  # type: ignore[operator]


def test_the_limit_of_a_repository_is_used() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Rough(20), nn.Linear(32, 32))
    subject = Subject((model, torch.randn(16, 32)), limits={"precision": 100.0})
    assert not _bad(audit(subject, dtype="bfloat16", compile=False), "precision-loss")


def test_a_gradient_that_is_zero_but_for_rounding_is_not_compared() -> None:
    class KeyBias(nn.Module):  # softmax does not see a bias of the keys: its gradient is exactly zero
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return (self.query(x) @ self.key(x).mT).softmax(-1) @ x

    assert not _run(KeyBias(), torch.randn(2, 8, 16)).failed


def test_a_decision_near_a_tie_is_a_warning_and_a_wholesale_one_a_failure() -> None:
    class Routes(nn.Module):
        def __init__(self, coarse: bool) -> None:
            super().__init__()
            self.score, self.coarse = nn.Linear(32, 8), coarse
            self.values = nn.Parameter(torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            score = self.score(x)
            if self.coarse and score.dtype.itemsize == 2:
                score = score + 300  # spacing 2 at 300: most ranks are ties
            return self.values[score.argmax(-1)]

    torch.manual_seed(0)
    x = torch.randn(400, 32)
    near = _run(Routes(False), x)
    assert not near.failed
    assert _bad(_run(Routes(True), x), "precision-loss")


def test_a_kernel_that_is_wrong_on_its_own_inputs_is_named() -> None:
    library = torch.library.Library("ampcheck_test", "DEF")
    library.define("crude(Tensor x) -> Tensor")
    library.impl("crude", lambda x: x * (1.2 if x.dtype is torch.bfloat16 else 1.0), "CompositeExplicitAutograd")
    run = _run(lambda x: torch.ops.ampcheck_test.crude(x), torch.randn(64).bfloat16())
    (finding, *_) = _bad(run, "precision-loss")
    assert "crude" in finding.message
    assert "the op itself" in finding.message


def test_the_float16_gradient_is_judged_at_a_loss_scale_that_overflows_nowhere() -> None:
    model = nn.Linear(8, 8)
    big = _run(model, torch.randn(4, 8) * 30, dtype="float16", loss=lambda y: (y.float() ** 2).sum())
    assert not big.failed
    (passed,) = [f for f in big.findings if f.check == "nonfinite-gradient"]
    assert "loss scale 65536" not in passed.message


def test_normalisation_by_a_mean_of_squares_that_underflows_is_found() -> None:
    def rms_norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-12)

    tiny = torch.randn(8, 64).half() * 1e-4
    run = _run(rms_norm, tiny, dtype="float16")
    assert {f.check for f in run.of(Verdict.FAIL)} & {"silent-zero", "flush", "overflow", "precision-loss"}
    assert not _run(lambda x: F.rms_norm(x.float(), (64,)).half(), tiny).failed


def test_a_relu_that_changes_sides_at_zero_is_no_error_and_hides_no_other_error() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(2, 64)  # few samples: one side changed moves a gradient by tens of per cent
    with torch.no_grad():
        net[0].bias -= (net[0](x)[0]) * 0.999  # the first sample stands at every kink
    assert not _bad(_run(net, x), "precision-loss")
    rough = nn.Sequential(net[0], nn.ReLU(), Rough(100), net[2], nn.ReLU(), net[4])
    assert _bad(_run(rough, torch.randn(64, 64)), "precision-loss")
