"""What `ampcheck.watch` sees of a user's own training loop."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ampcheck
from ampcheck.checks.training.loss_scale import check as check_loss_scale
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.health import TensorHealth, oracle
from ampcheck.outcome.raising import verify
from ampcheck.training.monitor.judge import loss_scale_stats
from ampcheck.training.monitor.sums import GradientSum, MonitorStats, OptimizerStats, ParameterStats, Series
from ampcheck.training.scale.stats import loss_scale_chart


def found(run: Run, check: str) -> list[Finding]:
    return [one for one in run.findings if one.check == check]


def verdict(run: Run, check: str) -> Verdict:
    (one,) = found(run, check)
    return one.verdict


@dataclass
class Loop:
    """A small loop, whose loss is multiplied by a factor."""

    model: nn.Module
    optimizer: Any
    scaler: Any = None

    def step(self, factor: float = 1.0) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.linspace(-1, 1, 8).reshape(2, 4)).float().square().mean() * factor
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss


def loop(optimizer: Callable[..., Any] = torch.optim.AdamW, scaler: Any = None, **settings: Any) -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    return Loop(model, optimizer(model.parameters(), **{"lr": 1e-2, **settings}), scaler)


def scaler(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **settings)


class Handed(torch.autograd.Function):
    """Gives a parameter the gradient it is told, times that of the loss: what arrives is known to the last bit."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.gradient, ctx.dtype = gradient, dtype
        return weight.detach().float().sum() * 0

    @staticmethod
    def backward(ctx: Any, *up: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        scaled = ctx.gradient * up[0]
        return scaled.to(ctx.dtype).to(torch.float32), None, None


def handed(
    gradient: torch.Tensor, *, dtype: torch.dtype = torch.float32, scale: float | None = None, steps: int = 4
) -> Run:
    """The run of a loop whose one parameter gets this gradient, rounded to a dtype while it is scaled."""
    weight = nn.Parameter(torch.ones_like(gradient))
    holder = nn.Module()
    holder.weight = weight
    holder.forward = lambda: None
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    used = None if scale is None else scaler(init_scale=scale)
    with ampcheck.watch(holder, optimizer, used, exact=False, fail_on="never") as seen:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = Handed.apply(weight, gradient, dtype)
            (loss if used is None else used.scale(loss)).backward()
            if used is None:
                optimizer.step()
            else:
                used.step(optimizer)
                used.update()
    return seen.run


WAYS = {
    "AdamW": lambda: loop(),
    "SGD with a scaler": lambda: loop(torch.optim.SGD, scaler()),
    "fused AdamW with a scaler": lambda: loop(torch.optim.AdamW, scaler(), fused=True),
    "bfloat16 weights": lambda: _narrow(),
}


def _narrow(rate: float = 1e-2, kind: torch.dtype = torch.bfloat16) -> Loop:
    made = loop()
    made.model.to(kind)
    forward = made.model.forward
    made.model.forward = lambda x: forward(x.to(kind))
    made.optimizer = torch.optim.AdamW(made.model.parameters(), lr=rate)
    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("every", [1, 3])
def test_a_watched_loop_computes_the_same_bits(way: str, every: int) -> None:
    plain, watched = WAYS[way](), WAYS[way]()
    losses = [float(plain.step().detach()) for _ in range(7)]
    with ampcheck.watch(
        watched.model, watched.optimizer, watched.scaler, every=every, exact=False, fail_on="never"
    ) as seen:
        told = []
        for _ in range(7):
            loss = watched.step()
            seen.step(loss)
            told.append(float(loss.detach()))
        seen.stats.training

    assert told == losses
    pairs = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert seen.stats.training.losses == tuple(losses)


def test_a_healthy_loop_passes_everything_and_says_how_much_was_looked_at() -> None:
    made = loop(scaler=scaler())
    with ampcheck.watch(made.model, made.optimizer, made.scaler, every=2, name="mine", fail_on="never") as seen:
        for _ in range(5):
            seen.step(made.step())
    run = seen.run

    assert {one.verdict for one in run.findings} == {Verdict.PASS}
    assert {one.check for one in run.findings} == {
        "overflow", "nonfinite-gradient", "gradient-underflow", "loss-scale", "scaler-protocol", "coverage",
    }  # fmt: skip
    assert dict(run.coverage.seen) == {
        "optimizer steps": 5, "measured steps": 3, "gradients": 12, "updates": 12, "loss scales": 6,
        "events": 25,
    }  # fmt: skip
    assert run.title == "watch of mine"
    assert Run.from_json(run.to_json()) == run
    assert [chart.kind for chart in run.charts] == ["line", "line", "range"]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40), st.sampled_from([1.0, 1024.0]))
def test_what_is_told_of_a_gradient_is_true_of_it(values: list[float], scale: float) -> None:
    gradient = torch.tensor(values)
    weight = nn.Parameter(torch.zeros(len(values)))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    used = scaler(init_scale=scale)
    with ampcheck.watch(nn.Identity(), optimizer, used, exact=False, fail_on="never") as seen:
        used.scale((weight * gradient).sum()).backward()
        used.step(optimizer)
    (one,) = seen.stats.training.parameters

    assert one.gradient is not None
    assert one.update is not None
    health = one.gradient.health
    truth = gradient.double()
    assert health.numel == len(values)
    assert health.zeros == int((truth == 0).sum())
    assert health.amax == float(truth.abs().max())
    assert health.sumsq == pytest.approx(float(truth.square().sum()))
    assert one.gradient.subnormal == int(((truth != 0) & ((truth * scale).abs() < 2.0**-14)).sum())
    assert one.update.squared_updates == pytest.approx(0.25 * float(truth.norm()) ** 2, rel=1e-5)
    assert one.update.squared_values == pytest.approx(0.25 * float(truth.norm()) ** 2, rel=1e-5)


def test_an_exception_comes_through_and_leaves_no_hook() -> None:
    made = loop(scaler=scaler())
    before = vars(torch.amp.GradScaler).copy()
    seen: Any = None

    def watched() -> None:
        nonlocal seen
        with ampcheck.watch(made.model, made.optimizer, made.scaler, exact=False, fail_on="never") as seen:
            made.step()
            assert vars(torch.amp.GradScaler)["step"] is not before["step"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watched()

    assert vars(torch.amp.GradScaler) == before
    assert not made.optimizer._optimizer_step_pre_hooks
    assert not made.optimizer._optimizer_step_post_hooks
    assert vars(made.scaler).keys() == vars(scaler()).keys()
    assert seen.stats.training.steps == 1
    made.step()
    assert seen.stats.training.steps == 1


def test_an_optimizer_that_raises_does_not_spoil_the_next_step() -> None:
    made = loop()
    with ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen:
        with pytest.raises(RuntimeError):
            made.optimizer.step(lambda: (_ for _ in ()).throw(RuntimeError("of the closure")))
        made.step()

    assert seen.stats.training.measured == 1
    assert not seen.run.failed


def test_optimizer_and_scaler_can_be_copied_and_pickled_inside() -> None:
    made = loop(scaler=scaler())
    with ampcheck.watch(made.model, made.optimizer, made.scaler, exact=False, fail_on="never") as seen:
        made.step()
        twin = copy.deepcopy(made)
        twin.step()
        pickle.loads(pickle.dumps(made.scaler))
        assert seen.stats.training.steps == 1


def test_two_optimizers_are_told_apart() -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    holder = nn.ModuleDict({"generator": one, "critic": other})
    holder.forward = lambda: None
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)]
    with ampcheck.watch(holder, optimizers, every=2, fail_on="never") as seen:
        for number in range(6):
            (one(torch.ones(3)).sum() + other(torch.ones(3)).sum()).backward()
            optimizers[1].step()
            if number % 3 == 0:
                optimizers[0].step()
    stats = seen.stats.training

    assert [(o.name, o.steps, o.measured) for o in stats.optimizers] == [("optimizer.0", 2, 1), ("optimizer.1", 6, 3)]
    assert {p.name: p.optimizer for p in stats.parameters}["generator.weight"] == "optimizer.0"


def test_gradients_that_a_closure_computes_are_those_of_its_own_step() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with ampcheck.watch(nn.Identity(), optimizer, exact=False, fail_on="never") as seen:
        for number in range(3):

            def closure(number: int = number) -> torch.Tensor:
                optimizer.zero_grad()
                loss = weight.sum() * 2.0**number
                loss.backward()
                return loss

            optimizer.step(closure)
    (one,) = seen.stats.training.parameters

    assert one.gradient is not None
    assert one.gradient.health.histogram == ((0, 4), (1, 4), (2, 4))
    assert one.update is not None
    assert one.update.steps == 3


def test_frozen_unused_and_foreign_parameters_are_counted_not_judged() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    extra = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    with ampcheck.watch(model, optimizer, exact=False, fail_on="never") as seen:
        (model[0](torch.ones(2)).sum() + extra.sum()).backward()
        optimizer.step()
    run = seen.run

    assert not run.failed
    assert run.coverage.unseen == {"parameters of which no gradient was measured": 2}
    assert {p.name for p in seen.stats.training.parameters} == {
        "0.weight", "0.bias", "1.weight", "1.bias", "optimizer.params.4",
    }  # fmt: skip


def test_sparse_gradients_are_measured() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    with ampcheck.watch(table, optimizer, exact=False, fail_on="never") as seen:
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([1, 2, 2])).sum().backward()
            optimizer.step()
    (one,) = seen.stats.training.parameters

    assert one.gradient is not None
    assert (one.gradient.health.numel, one.gradient.bad) == (60, 0)
    assert not seen.run.failed


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this build of PyTorch has no gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.needs_torch("2.9", "FSDP2 runs on the CPU")
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of a mesh of one rank
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rate", [1e-2, 1e-7])
def test_sharded_parameters_are_measured_by_their_shards(rate: float) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = pytest.importorskip("torch.distributed.device_mesh")
    made = _narrow(rate)
    plain = made.model.forward
    fsdp.fully_shard(made.model, mesh=mesh.init_device_mesh("cpu", (1,)))
    made.model.forward = plain
    made.optimizer = torch.optim.AdamW(made.model.parameters(), lr=rate)
    with ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen:
        for _ in range(4):
            made.step()
    first = seen.stats.training.parameters[0]

    assert type(next(made.model.parameters())).__name__ == "DTensor"
    assert first.gradient is not None
    assert first.gradient.health.numel == 4 * 32
    assert seen.run.failed == (rate < 1e-5)


def test_a_loop_without_steps_is_a_failure_of_coverage() -> None:
    made = loop()
    with ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen:
        pass

    assert verdict(seen.run, "coverage") is Verdict.FAIL


def test_a_step_inside_torch_compile_is_not_seen_and_that_is_told() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with ampcheck.watch(model, optimizer, exact=False, fail_on="never") as seen:
        model(torch.ones(3)).sum().backward()
        step()
    (finding,) = seen.run.findings

    assert (finding.check, finding.verdict) == ("coverage", Verdict.FAIL)
    assert "torch.compile" in finding.hint


def test_plain_torch_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def stats() -> MonitorStats:
        made = loop(scaler=scaler())
        with ampcheck.watch(made.model, made.optimizer, made.scaler, exact=False, fail_on="never") as seen:
            for number in range(5):
                made.step(math.inf if number == 1 else 1.0)
        return seen.stats.training

    fast = stats()
    monkeypatch.setattr("ampcheck.health.cpu.pack", oracle.pack)
    slow = stats()

    for one, other in zip(fast.parameters, slow.parameters, strict=True):
        assert one.gradient is not None
        assert other.gradient is not None
        assert one.gradient.health.sumsq == pytest.approx(other.gradient.health.sumsq)
        assert one.gradient.health.histogram == other.gradient.health.histogram
        assert (one.update, one.gradient.subnormal) == (other.update, other.gradient.subnormal)
    assert fast.scaler == slow.scaler


@pytest.mark.cuda
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_gpu_nothing_is_read_before_it_is_asked_for(fused: bool) -> None:
    def steps(watched: bool) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, device="cuda")
        data = torch.randn(8, 64, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        # Only a fused optimizer steps without that the scaler waits for the device.
        used = torch.amp.GradScaler("cuda") if fused else None
        seen: Any = None
        with ExitStack() as stack:
            if watched:
                seen = stack.enter_context(ampcheck.watch(model, optimizer, used, exact=False, fail_on="never"))
            for number in range(6):
                if number == 1:  # the first step makes what the later ones add to
                    torch.cuda.set_sync_debug_mode("error")
                    stack.callback(torch.cuda.set_sync_debug_mode, "default")
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.float16):
                    loss = model(data).float().square().mean()
                (loss if used is None else used.scale(loss)).backward()
                if used is None:
                    optimizer.step()
                else:
                    used.step(optimizer)
                    used.update()
                if seen is not None:
                    seen.step(loss)
        return list(model.parameters()), seen

    plain, _ = steps(watched=False)
    weights, seen = steps(watched=True)

    assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    assert seen.stats.training.measured == 6
    assert not seen.run.failed


def test_a_loop_without_backward_is_a_failure_of_coverage() -> None:
    made = loop()
    with ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen:
        made.optimizer.step()

    assert verdict(seen.run, "coverage") is Verdict.FAIL
    assert verdict(seen.run, "nonfinite-gradient") is Verdict.SKIP


def test_weights_that_become_nan_are_found_with_parameter_and_step() -> None:
    made = loop()
    with ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen:
        for number in range(4):
            seen.step(made.step(math.inf if number == 2 else 1.0))
    run = seen.run

    first = found(run, "nonfinite-gradient")[0]
    assert (first.verdict, first.where.step) == (Verdict.FAIL, 2)
    assert "GradScaler" in first.hint
    assert verdict(run, "overflow") is Verdict.FAIL
    with pytest.raises(AssertionError, match="nonfinite-gradient"):
        verify(run)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_such_a_step_is_healthy_and_the_story_names_the_parameter(fused: bool) -> None:
    made = loop(torch.optim.AdamW, scaler(), fused=fused)
    with ampcheck.watch(made.model, made.optimizer, made.scaler, exact=False, fail_on="never") as seen:
        for number in range(6):
            made.step(math.inf if number == 2 else 1.0)
    run, stats = seen.run, seen.stats.training

    assert not run.of(Verdict.FAIL)
    assert not run.of(Verdict.WARN)
    assert (stats.steps, stats.attempts, stats.optimizers[0].skipped) == (5, 6, (2,))
    assert stats.scaler is not None
    assert stats.scales == (65536.0,) * 3 + (32768.0,) * 4
    assert stats.scaler.skipped_by["0.weight"] == 1
    message = found(run, "loss-scale")[0].message
    assert "the scale went from 2^16 to 2^15" in message
    assert "the scaler skipped 1 of 6 steps, first step 2, not finite: 0.bias (1x), 0.weight (1x)" in message


def test_a_scale_that_collapses_is_found() -> None:
    made = loop(scaler=scaler())
    with ampcheck.watch(made.model, made.optimizer, made.scaler, every=10, fail_on="never") as seen:
        for number in range(30):
            made.step(math.nan if number > 2 else 1.0)
    (finding,) = found(seen.run, "loss-scale")

    assert finding.verdict is Verdict.FAIL
    assert "2.weight" in finding.message


def test_a_scaler_that_only_skips_from_some_step_on_is_found_before_the_scale_is_gone() -> None:
    made = loop(scaler=scaler())
    with ampcheck.watch(made.model, made.optimizer, made.scaler, exact=False, fail_on="never") as seen:
        for number in range(14):
            made.step(math.nan if number > 2 else 1.0)
    (finding,) = found(seen.run, "loss-scale")

    assert (finding.verdict, finding.observed) == (Verdict.FAIL, 11.0)


def test_a_search_for_the_scale_at_the_start_is_healthy() -> None:
    made = loop(scaler=scaler(init_scale=2.0**140 / 2.0**20))
    with ampcheck.watch(made.model, made.optimizer, made.scaler, exact=False, fail_on="never") as seen:
        for _ in range(20):
            made.step(2.0**12)
    run = seen.run

    assert seen.stats.training.skipped >= 3
    assert verdict(run, "loss-scale") is Verdict.PASS
    assert not run.of(Verdict.FAIL)


def test_a_search_for_the_scale_that_has_not_ended_is_undecided() -> None:
    made = loop(scaler=scaler())
    with ampcheck.watch(made.model, made.optimizer, made.scaler, exact=False, fail_on="never") as seen:
        for _ in range(12):
            made.step(math.inf)

    (finding,) = found(seen.run, "loss-scale")
    assert finding.verdict is Verdict.UNDECIDED
    assert "from 2^16 to 16" in finding.message


def test_a_loss_at_the_end_that_the_scaler_left_out_is_no_failure() -> None:
    made = loop(scaler=scaler())
    with ampcheck.watch(made.model, made.optimizer, made.scaler, exact=False, fail_on="never") as seen:
        for number in range(6):
            seen.step(made.step(math.inf if number == 5 else 1.0))

    assert not seen.run.of(Verdict.FAIL)


class Cleaning(torch.optim.SGD):
    """Makes steps of what is finite of a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad.nan_to_num(0.0, 0.0, 0.0), alpha=1e-3)


def test_gradients_that_are_not_finite_and_ruin_no_weight_are_a_warning_with_their_step() -> None:
    made = loop(Cleaning)
    with ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen:
        for number in range(4):
            made.step(math.inf if number == 2 else 1.0)

    (finding,) = found(seen.run, "nonfinite-gradient")
    assert (finding.verdict, finding.where.step) == (Verdict.WARN, 2)
    assert "counted in 4 measured steps, without float64" in finding.message


def test_growth_that_overshoots_now_and_then_is_healthy() -> None:
    settings = {"growth_interval": 4, "init_scale": 2.0**127, "growth_factor": 2.0}
    made = loop(scaler=scaler(**settings))
    with ampcheck.watch(made.model, made.optimizer, made.scaler, exact=False, fail_on="never") as seen:
        for _ in range(60):
            made.step(2.0**12)

    assert seen.stats.training.skipped > 5
    assert verdict(seen.run, "loss-scale") is Verdict.PASS


def test_a_scaler_that_is_never_updated_is_told() -> None:
    made = loop(scaler=scaler())
    with ampcheck.watch(made.model, made.optimizer, made.scaler, exact=False, fail_on="never") as seen:
        made.scaler.scale(made.model(torch.ones(4)).sum()).backward()
        made.scaler.step(made.optimizer)

    assert verdict(seen.run, "scaler-protocol") is Verdict.FAIL
    assert verdict(seen.run, "loss-scale") is Verdict.SKIP  # one mistake is one finding


def test_a_scaler_that_is_switched_off_is_skipped() -> None:
    made = loop(scaler=scaler(enabled=False))
    with ampcheck.watch(made.model, made.optimizer, made.scaler, exact=False, fail_on="never") as seen:
        made.step()

    assert verdict(seen.run, "loss-scale") is Verdict.SKIP
    assert not seen.run.failed


@pytest.mark.parametrize("every", [1, 2])
def test_bfloat16_weights_that_do_not_move_are_found(every: int) -> None:
    made = _narrow(rate=1e-7)
    with ampcheck.watch(made.model, made.optimizer, every=every, exact=False, fail_on="never") as seen:
        for _ in range(6):
            made.step()
    first = found(seen.run, "stagnation")[0]

    assert first.verdict is Verdict.FAIL
    assert first.observed is not None
    assert first.observed > 0.9
    assert "float32" in first.hint


def test_bfloat16_weights_that_move_pass() -> None:
    made = _narrow(rate=1e-2)
    with ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen:
        for _ in range(6):
            made.step()

    assert verdict(seen.run, "stagnation") is Verdict.PASS


def _convolutional() -> nn.Module:
    """Biases before batch norms, whose gradients are rounding errors of zero."""
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 16), (16, 32))]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).bfloat16()


@pytest.mark.parametrize(("rate", "expected"), [(0.5, Verdict.PASS), (1e-5, Verdict.FAIL)])
@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_that_is_zero_by_mathematics_proves_no_lost_update(
    seed: int, rate: float, expected: Verdict
) -> None:
    torch.manual_seed(seed)
    model = _convolutional()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with ampcheck.watch(model, optimizer, exact=False, fail_on="never") as seen:
        for _ in range(20):
            x = torch.randn(16, 3, 16, 16)
            optimizer.zero_grad()
            labels = (x.mean((1, 2, 3)) > 0).long()
            nn.functional.cross_entropy(model(x.bfloat16()).float(), labels).backward()
            optimizer.step()

    assert found(seen.run, "stagnation")[0].verdict is expected


@pytest.mark.parametrize("named", [True, False], ids=["model", "optimizer alone"])
def test_a_vector_with_a_quiet_gradient_that_does_not_move_is_found(named: bool) -> None:
    """Adam moves it as far as the others, however small its gradient is beside that of another module."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"loud": nn.Linear(32, 64, bias=False), "quiet": nn.RMSNorm(32)}).bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with ampcheck.watch(*([model] if named else []), optimizer, exact=False, fail_on="never") as seen:
        for _ in range(20):
            x = torch.randn(16, 32).bfloat16()
            optimizer.zero_grad()
            (model["loud"](x).float().square().sum() + model["quiet"](x).float().sin().mean()).backward()
            optimizer.step()
    quiet, loud = model["quiet"].weight.grad, model["loud"].weight.grad
    assert quiet.abs().max() < 2**-8 * loud.abs().max()
    assert (model["quiet"].weight == 1).all()
    assert any(f.verdict is Verdict.FAIL for f in found(seen.run, "stagnation"))


def test_the_share_of_unchanged_weights_is_exact() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with ampcheck.watch(nn.Identity(), optimizer, exact=False, fail_on="never") as seen:
        # The spacing below 1 is 2**-8: half of it moves nothing, a zero was never to.
        weight.grad = torch.tensor([0.5, 2.0**-10, 2.0**-12, 0.0], dtype=torch.bfloat16)
        optimizer.step()
    (one,) = seen.stats.training.parameters

    assert one.update is not None
    assert (one.update.moved, one.update.lost) == (3, 2)
    assert one.still == pytest.approx(2 / 3)


def test_a_warm_up_from_zero_is_no_failure() -> None:
    made = _narrow(rate=1e-2)
    rates = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda step: step / 1e6)
    with ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen:
        for _ in range(6):
            made.step()
            rates.step()

    assert not seen.run.of(Verdict.FAIL)
    assert found(seen.run, "stagnation")[0].verdict is Verdict.WARN


def test_a_rate_of_zero_moves_nothing_by_right() -> None:
    made = _narrow(rate=0.0)
    with ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen:
        for _ in range(4):
            made.step()

    assert not found(seen.run, "stagnation")


class Kahan(torch.optim.Optimizer):
    """SGD that remembers what rounding dropped; with `master`, one that steps a float32 copy."""

    def __init__(self, params: Any, lr: float, *, master: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.master = master

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if self.master:
                    wide = state.setdefault("master", p.detach().float().clone())
                    wide -= group["lr"] * p.grad.float()
                    p.copy_(wide)
                else:
                    rest = state.setdefault("rest", torch.zeros_like(p))
                    step = rest - group["lr"] * p.grad
                    after = p + step
                    rest.copy_(step - (after - p))
                    p.copy_(after)


@pytest.mark.parametrize("master", [False, True])
def test_kahan_summation_and_float32_master_weights_are_no_stagnation(master: bool) -> None:
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    steps = 5 if master else 40
    rate = 2.0**-13

    def run(optimizer: Any) -> Run:
        with ampcheck.watch(nn.Identity(), optimizer, exact=False, fail_on="never") as seen:
            for _ in range(steps):
                weight.grad = torch.ones_like(weight)
                optimizer.step()
        return seen.run

    assert not run(Kahan([weight], rate, master=master)).of(Verdict.FAIL)
    weight.data.fill_(1.0)
    assert run(torch.optim.SGD([weight], lr=rate)).of(Verdict.FAIL)


def test_gradients_with_the_marks_of_flushing_are_told_and_a_healthy_twin_is_not() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(4096) * 2.0**-24

    flushed = handed(gradient, dtype=torch.float16, scale=1.0)
    truth = float((gradient.half() == 0).float().mean())
    (finding,) = found(flushed, "gradient-underflow")
    assert finding.verdict is Verdict.WARN
    assert finding.observed == pytest.approx(truth)
    assert verdict(handed(gradient, dtype=torch.float16, scale=2.0**16), "gradient-underflow") is Verdict.PASS


@pytest.mark.parametrize("scale", [None, 2.0**7])
@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_the_marks_are_told_without_a_scaler_and_after_clipping_too(scale: float | None, clip: float) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(4096) * 2.0**-24 / (scale or 1.0)
    weight = nn.Parameter(torch.zeros(4096))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    used = None if scale is None else scaler(init_scale=scale)
    with ampcheck.watch(nn.Identity(), optimizer, used, exact=False, fail_on="never") as seen:
        loss = Handed.apply(weight, gradient, torch.float16)
        (loss if used is None else used.scale(loss)).backward()
        if used is not None:
            used.unscale_(optimizer)
        weight.grad *= clip
        (optimizer.step if used is None else lambda: used.step(optimizer))()

    assert verdict(seen.run, "gradient-underflow") is Verdict.WARN


@given(st.integers(-30, -8), st.integers(0, 2**31), st.sampled_from([64, 1000, 20000]), st.booleans())
def test_a_smooth_gradient_with_zeros_by_right_never_has_the_marks(
    exponent: int, seed: int, count: int, half: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(count, generator=generator) * (torch.rand(count, generator=generator) > 0.6)
    gradient *= 2.0**exponent
    dtype = torch.bfloat16 if half else torch.float32
    run = handed(gradient, dtype=dtype, steps=1)

    assert not run.of(Verdict.WARN)
    assert not run.failed


def test_zeros_by_right_are_no_underflow() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(4096) * (torch.rand(4096) > 0.7)

    assert verdict(handed(gradient, dtype=torch.float16, scale=2.0**10), "gradient-underflow") is Verdict.PASS


def test_small_gradients_that_never_were_float16_are_no_underflow() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(4096) * 2.0**-24 * (torch.rand(4096) > 0.7)

    assert verdict(handed(gradient, dtype=torch.float32, scale=1.0), "gradient-underflow") is Verdict.PASS


def test_a_gradient_that_is_zero_in_every_step_is_told() -> None:
    run = handed(torch.full((64,), 2.0**-40), dtype=torch.float16, scale=1.0)

    assert verdict(run, "gradient-underflow") is Verdict.WARN


def test_a_loop_whose_gradients_are_all_zero_is_told_though_nobody_scales() -> None:
    made = loop()
    with ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen:
        for _ in range(3):
            made.step(0.0)

    assert {one.verdict for one in found(seen.run, "gradient-underflow")} == {Verdict.WARN}


def test_the_window_holds_the_scales_at_which_nothing_is_lost() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(4096) * 2.0**-20
    weight = nn.Parameter(torch.ones(4096))
    optimizer, used = torch.optim.SGD([weight], lr=1e-3), scaler(init_scale=2.0**14)
    with ampcheck.watch(nn.Identity(), optimizer, used, exact=False, fail_on="never") as seen:
        used.scale((weight * gradient).sum()).backward()
        used.step(optimizer)
        used.update()
    stats = loss_scale_stats(seen.stats.training, Limits(underflow=0.1))

    assert stats is not None
    assert (window := stats.window) is not None
    for exponent in range(-10, 45):
        scaled = (gradient.double() * 2.0**exponent).half()
        lost = float((scaled == 0).float().mean())
        well = lost <= 0.1 and bool(scaled.isfinite().all())
        assert window.contains(2.0**exponent) == well, exponent


def _stats(scales: list[float], skipped: list[int], attempts: int) -> MonitorStats:
    """A loop with one gradient of 1."""
    counts = attempts - len(skipped), 1, (), tuple(range(attempts)), tuple(skipped)
    health = TensorHealth("float32", 1, 0, 0, 0, 0, 1.0, 1.0, 1.0, ((0, 1),))
    weight = ParameterStats("weight", "optimizer", "float32", 1, GradientSum(health, 1, 0, 0, 0, 0, 0))
    return MonitorStats("s", 1, (OptimizerStats("optimizer", *counts),), (weight,), True, tuple(scales))


@given(st.integers(2, 400), st.data())
def test_a_trajectory_is_judged_and_drawn_whatever_it_is(attempts: int, data: Any) -> None:
    skipped = sorted(data.draw(st.sets(st.integers(0, attempts - 1))))
    scales = [65536.0]
    for number in range(attempts):
        scales.append(scales[-1] / 2 if number in skipped else scales[-1])
    stats = loss_scale_stats(_stats(scales, skipped, attempts), Limits())
    assert stats is not None
    (finding,) = check_loss_scale(stats, Limits())

    assert (finding.verdict is Verdict.FAIL) >= (scales[-1] < 2.0**-23)
    if not skipped:
        assert finding.verdict is Verdict.PASS
    (chart,) = loss_scale_chart(stats)
    series, *_ = chart.series
    assert list(series.x) == sorted(set(series.x))
    assert all(2.0**y == scales[int(x)] for x, y in zip(series.x, series.y, strict=True))


def test_a_trace_keeps_numbers_in_their_order() -> None:
    series = Series()
    for number in range(5):
        series.append(torch.tensor(float(number)) if number % 2 else float(number))

    assert len(series) == 5
    assert series.read() == (0.0, 1.0, 2.0, 3.0, 4.0)


def test_a_compiled_model_is_watched_inside_its_graphs_as_well() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampcheck.watch(compiled, optimizer, exact=False, fail_on="never") as seen:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = compiled(torch.ones(2, 4)).float().sum()
            loss.backward()
            optimizer.step()
    run = seen.run

    assert seen.stats.values is not None
    assert seen.stats.values.measured > 0
    assert run.coverage.seen["measured steps"] == 2
    assert run.coverage.seen["measured calls"] > 0
    assert not run.failed
    assert {p.name for p in seen.stats.training.parameters} == {"weight", "bias"}


def test_a_model_that_is_not_compiled_leaves_the_compiler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampcheck.torchtools.dynamo.reset", lambda: pytest.fail("compiled code was forgotten"))
    made = loop()
    with ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen:
        made.step()

    assert seen.stats.values is None


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ((3,), "found int"),
        (([],), "found an empty list"),
        ((scaler(),), "pass the optimizer"),
        ((torch.optim.SGD([torch.ones(1)], lr=1), 3), "found int"),
    ],
    ids=["a number", "no optimizer", "a scaler alone", "no scaler"],
)
def test_an_object_that_cannot_be_watched_is_refused(objects: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ampcheck.watch(nn.Linear(1, 1), *objects)


def test_a_loss_must_be_one_number() -> None:
    made = loop()
    with (
        pytest.raises(UsageError, match="one number"),
        ampcheck.watch(made.model, made.optimizer, exact=False, fail_on="never") as seen,
    ):
        seen.step(torch.ones(3))


@pytest.mark.parametrize("way", ["plain", "scaler", "no gradient now and then"])
def test_a_record_that_is_read_after_each_step_is_the_one_that_is_read_at_the_end(way: str) -> None:
    """Statistics of several steps are added up together, or those of one where they are read."""

    def record(*, reads: bool) -> MonitorStats:
        subject = loop(torch.optim.SGD, scaler(init_scale=2.0**16, growth_interval=7) if way == "scaler" else None)
        with ampcheck.watch(subject.model, subject.optimizer, subject.scaler, exact=False, fail_on="never") as seen:
            for number in range(40):
                subject.model[0].requires_grad_(way != "no gradient now and then" or number % 5 != 3)
                subject.step(math.inf if number in (9, 21) and way != "scaler" else 1e-8)
                if number == 21 and way != "scaler":
                    with torch.no_grad():
                        [parameter.fill_(0.5) for parameter in subject.model.parameters()]
                if reads:
                    assert seen.stats.training is not None
        assert seen.stats.training is not None
        return seen.stats.training

    once, often = record(reads=False), record(reads=True)
    assert len(once.gradients) == 4
    for left, right in zip(once.parameters, often.parameters, strict=True):
        assert left.gradient is not None
        assert right.gradient is not None
        for name in ("calls", "bad", "first", "vanished", "subnormal", "cut"):
            assert getattr(left.gradient, name) == getattr(right.gradient, name)
        assert left.gradient.health.histogram == right.gradient.health.histogram
        for name in ("amax", "amin", "nans", "infs", "zeros", "numel"):
            assert getattr(left.gradient.health, name) == getattr(right.gradient.health, name)
        assert left.update is not None
        assert right.update is not None
        assert (left.update.steps, left.update.poisoned) == (right.update.steps, right.update.poisoned)
        assert left.update.squared_updates == pytest.approx(right.update.squared_updates, rel=1e-12)
        assert left.update.squared_values == pytest.approx(right.update.squared_values, rel=1e-12)
    if way != "scaler":
        assert once.parameters[3].gradient.first == 9  # of two steps
