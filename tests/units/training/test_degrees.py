"""Degrees in the loss scale: what doubles when the scale doubles has the degree 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ampcheck
from ampcheck.core.run import Run, Verdict
from ampcheck.facts.degree import Degree
from ampcheck.training.loop import LoopShadow
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.running import RunningLoop
from ampcheck.training.scale.degrees import Degrees

Values = list[torch.Tensor]

STEPS: dict[str, Callable[[Values, int, int], torch.Tensor]] = {
    "product": lambda v, i, j: v[i] * v[j],
    "quotient": lambda v, i, j: v[i] / v[j],
    "sum": lambda v, i, j: v[i] + v[j],
    "difference": lambda v, i, j: torch.sub(v[i], v[j], alpha=3),
    "matrix product": lambda v, i, j: v[i] @ v[j],
    "norm": lambda v, i, j: torch.linalg.vector_norm(v[i]).reshape(1, 1).repeat(2, 2),
    "share": lambda v, i, j: v[i] / (v[i].norm() + 1e-12),
    "sum of squares": lambda v, i, j: v[i].square().sum(0, keepdim=True).repeat(2, 1),
    "power": lambda v, i, j: v[i].pow(j % 4),
    "root": lambda v, i, j: v[i].abs().sqrt(),
    "reciprocal": lambda v, i, j: v[i].reciprocal(),
    "choice": lambda v, i, j: torch.where(v[0] > 1.5, v[i], v[j]),
    "largest": lambda v, i, j: torch.maximum(v[i], v[j]),
    "limit": lambda v, i, j: v[i].clamp(max=1.75),
    "in place": lambda v, i, j: v[i].clone().add_(v[j], alpha=0.5),
    "interpolation": lambda v, i, j: torch.lerp(v[i], v[j], 0.25),
    "mask": lambda v, i, j: v[i].masked_fill(v[0] > 1.5, 0.0),
    "padding": lambda v, i, j: F.pad(v[i], (0, 1, 0, 1))[1:, 1:].contiguous(),
    "constant": lambda v, i, j: v[i] * 0.37,
    "transposed": lambda v, i, j: v[i].mT.contiguous().neg(),
}


def run(program: list[tuple[str, int, int]], scale: float) -> tuple[list[Degree | None], Values]:
    """The degrees and values of a program on a constant and a scaled tensor."""
    shadow = LoopShadow(judge=False)
    shadow.degrees = degrees = Degrees(Recorder(RunningLoop("program")), shadow.store)
    constant = torch.tensor([[1.0, 2.0], [1.25, 3.0]])
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with shadow, degrees.following(), torch.no_grad():
        values = [constant, scaler.scale(torch.tensor([[0.5, 1.5], [2.0, 1.0]]))]
        for name, i, j in program:
            values.append(STEPS[name](values, i % len(values), j % len(values)))
    return [degrees.of(value) for value in values], values


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_a_value_of_a_known_degree_grows_by_that_power_of_the_scale(program: list[tuple[str, int, int]]) -> None:
    (degrees, values), (_, larger) = run(program, 1024.0), run(program, 4096.0)
    for degree, value, other in zip(degrees, values, larger, strict=True):
        if degree is not None and (degree.mixed or not degree.known):
            continue
        power = 0.0 if degree is None else sum(degree.powers.values())
        finite = value.isfinite() & other.isfinite()
        torch.testing.assert_close(other[finite], value[finite] * 4.0**power, rtol=1e-3, atol=0.0)


def train(change: Callable[..., None], **options: Any) -> Run:
    """Four steps of a loop, watched. change: what happens to the gradients between backward and the scaler's step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(32, 8)
    with ampcheck.watch(fail_on="never", **options) as seen:
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(model(x).float(), x[:, :4])
            scaler.scale(loss).backward()
            change(model, optimizer, scaler)
            scaler.step(optimizer)
            scaler.update()
    return seen.run


def clip_by_hand(model: nn.Module, limit: float = 0.01) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        norm = parameter.grad.data.norm(2)
        norm.item()  # for the log
        share = limit / (norm + 1e-6)
        if share < 1:
            parameter.grad.data.mul_(share)


def unscaled_first(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    scaler.unscale_(optimizer)
    clip_by_hand(model)


def limit_follows(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    clip_by_hand(model, 0.02 * scaler.get_scale())


def decays_by_hand(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(parameter.data, alpha=1e-4)


def normalizes(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= total


def averages(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(4).mul_(2.0)


def cuts(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-3, 1e-3)


@pytest.mark.parametrize("change", [lambda model, *_: clip_by_hand(model), decays_by_hand, normalizes, cuts])
def test_what_depends_on_the_scale_fails_at_its_line_in_one_run(change: Callable[..., None]) -> None:
    (found,) = [f for f in train(change).of(Verdict.FAIL) if f.check == "scale-invariance"]

    assert found.where.file.endswith("test_degrees.py")
    assert found.excerpt.lines[found.excerpt.line - found.excerpt.first].strip().startswith("parameter.grad")


def limits_that_nothing_reaches(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-3e38, 3e38)


@pytest.mark.parametrize(
    "change", [lambda *_: None, unscaled_first, limit_follows, averages, limits_that_nothing_reaches]
)
def test_what_does_not_depend_on_the_scale_is_silent(change: Callable[..., None]) -> None:
    run = train(change)

    assert not [f for f in run.findings if f.check == "scale-invariance" and f.verdict is Verdict.FAIL]
    assert not run.of(Verdict.FAIL)


LOSSES = [
    nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 0.5, 1.0])),
    nn.MultiMarginLoss(),
    nn.KLDivLoss(reduction="batchmean"),
    nn.SmoothL1Loss(),
    nn.HuberLoss(),
    nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)),
    nn.PoissonNLLLoss(),
    nn.SoftMarginLoss(),
    nn.MultiLabelSoftMarginLoss(),
]
LAYERS = [nn.Dropout(0.5), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.GELU(), nn.Softplus(), nn.PReLU(), nn.Hardswish()]


@pytest.mark.parametrize(
    ("loss", "layer"),
    [*((loss, nn.Identity()) for loss in LOSSES), *((LOSSES[0], layer) for layer in LAYERS)],
    ids=lambda module: type(module).__name__,
)
def test_losses_and_layers_of_pytorch_are_silent(loss: nn.Module, layer: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    whole = isinstance(loss, (nn.CrossEntropyLoss, nn.MultiMarginLoss))
    target = torch.arange(16) % 4 if whole else torch.rand(16, 4).round()

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = model(torch.randn(16, 8)).float()
            scaler.scale(loss(out.log_softmax(-1) if isinstance(loss, nn.KLDivLoss) else out, target)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

    run = ampcheck.audit(train, checks=["scale-invariance"])
    (found,) = [f for f in run.findings if f.check == "scale-invariance"]
    assert found.verdict is Verdict.PASS
    assert found.message.startswith("each of ")  # by its one run


def test_a_callable_whose_degrees_are_known_does_not_run_again() -> None:
    calls: list[int] = []

    def main() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        calls.append(1)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    run = ampcheck.audit(main)
    assert [f.verdict for f in run.findings if f.check == "scale-invariance"] == [Verdict.PASS]
    assert len(calls) == 1


HEALTHY: dict[str, Callable[[list[nn.Parameter], Any], Any]] = {
    "views of one buffer": lambda weights, scaler: _flatten(weights),
    "the largest alone": lambda weights, scaler: [_keep_largest(weight) for weight in weights],
    "a decay that is scaled": lambda weights, scaler: [
        weight.grad.add_(weight.data, alpha=1e-2 * scaler.get_scale()) for weight in weights if weight.grad is not None
    ],
    "a limit that is scaled": lambda weights, scaler: nn.utils.clip_grad_value_(weights, 0.01 * scaler.get_scale()),
    "noise that is scaled": lambda weights, scaler: [
        weight.grad.add_(torch.randn_like(weight) * (1e-3 * scaler.get_scale()))
        for weight in weights
        if weight.grad is not None
    ],
    "a whole number": lambda weights, scaler: [
        weight.grad.div_(int(scaler.get_scale())).clamp_(-1e-3, 1e-3).mul_(int(scaler.get_scale()))
        for weight in weights
        if weight.grad is not None
    ],
    "side by side": lambda weights, scaler: torch.stack([torch.ones(()), weights[0].grad.norm()]),  # type: ignore[union-attr]
}


def _flatten(weights: list[nn.Parameter]) -> None:
    flat = torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])
    for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight)


def _keep_largest(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    _, places = weight.grad.abs().flatten().topk(2)
    kept = torch.zeros(weight.numel())
    kept[places] = weight.grad.flatten()[places]
    weight.grad = kept.view_as(weight)


@pytest.mark.parametrize("name", HEALTHY)
def test_what_people_do_to_scaled_gradients_is_silent(name: str) -> None:
    run = train(lambda model, optimizer, scaler: HEALTHY[name](list(model.parameters()), scaler))

    assert not [f.message for f in run.findings if f.check == "scale-invariance" and f.verdict is Verdict.FAIL]


def test_gradients_that_accumulate_are_judged_by_one_run() -> None:
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def main() -> None:
        for number in range(6):
            scaler.scale(model(torch.ones(2, 4)).square().mean() / 3).backward()
            if number % 3 == 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    (found,) = [f for f in ampcheck.audit(main).findings if f.check == "scale-invariance"]
    assert (found.verdict, found.message[:8]) == (Verdict.PASS, "each of ")


def test_a_penalty_with_the_scale_read_before_the_first_use_is_silent() -> None:
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ampcheck.watch(fail_on="never") as seen:
        for _ in range(2):
            optimizer.zero_grad()
            loss, inverse = model(torch.randn(8, 4)).square().mean(), 1.0 / scaler.get_scale()
            gradients = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
            loss = loss + 0.1 * torch.stack([(g * inverse).square().sum() for g in gradients]).sum().sqrt()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert not [f.message for f in seen.run.findings if f.check == "scale-invariance" and f.verdict is Verdict.FAIL]


def _clip_by(norm: Callable[[torch.Tensor], float]) -> Callable[..., None]:
    def clip(weights: list[nn.Parameter]) -> None:
        for weight in weights:
            assert weight.grad is not None
            if (size := norm(weight.grad)) > 1e-2:
                weight.grad.mul_(1e-2 / size)

    return clip


def _cut(choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def cut(weights: list[nn.Parameter]) -> None:
        for weight in weights:
            assert weight.grad is not None
            weight.grad = choose(weight.grad, weight.grad.abs() > 1.0)

    return cut


BRANCHES: dict[str, Callable[[list[nn.Parameter]], None]] = {
    "a number by NumPy": _clip_by(lambda gradient: float(gradient.numpy().std())),
    "a number by a list": _clip_by(lambda gradient: max(map(abs, gradient.flatten().tolist()))),
    "a count": _clip_by(lambda gradient: float(len((gradient.abs() > 1.0).nonzero()))),
    "a choice": _cut(lambda gradient, large: torch.where(large, gradient * 0.5, gradient)),
    "a mask": _cut(lambda gradient, large: gradient.masked_fill(large, 0.0)),
    "a mask as numbers": _cut(lambda gradient, large: gradient * (~large).float()),
    "a sum of a mask": _cut(lambda gradient, large: gradient * 0.5 ** large.sum().clamp(max=1)),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_what_branches_by_scaled_gradients_is_no_pass_of_one_run(name: str) -> None:
    run = train(lambda model, optimizer, scaler: BRANCHES[name](list(model.parameters())))

    assert not [f for f in run.findings if f.check == "scale-invariance" and f.verdict is Verdict.PASS]


@pytest.mark.parametrize("divides", [False, True])
def test_a_fused_optimizer_divides_by_the_scale_itself(divides: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ampcheck.watch(fail_on="never") as seen:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
            if divides:
                normalizes(model, optimizer, scaler)
            scaler.step(optimizer)
            scaler.update()

    (found,) = [f for f in seen.run.findings if f.check == "scale-invariance"]
    assert found.verdict is (Verdict.FAIL if divides else Verdict.PASS)


def test_numbers_that_are_logged_beside_the_scale_decide_nothing() -> None:
    """A meter makes a tensor of the losses and scales of before, and reads its median."""

    def loop() -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x, losses, medians = torch.randn(16, 8), list[float](), list[float]()
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses += [loss.item(), scaler.get_scale()]
            meter = torch.tensor(losses[:1])
            medians.append(meter.median().item() if bool(meter.max() > 0) else 0.0)

    run = ampcheck.audit(loop, name="loop")
    (found,) = [finding for finding in run.findings if finding.check == "scale-invariance"]
    assert found.verdict is Verdict.PASS, found.message


def _with_rate(rate: Callable[[int, float], float]) -> Any:
    """The verdict on a loop that reads the scale and sets the learning rate in each step."""

    def loop() -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x = torch.randn(16, 8)
        for number in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            optimizer.param_groups[0]["lr"] = rate(number, scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()

    (found,) = [f for f in ampcheck.audit(loop, name="loop").findings if f.check == "scale-invariance"]
    return found


@pytest.mark.parametrize("rate", [lambda n, scale: 100.0 / scale, lambda n, scale: 1e-5 * scale])
def test_a_learning_rate_that_is_made_of_the_scale_is_no_pass(rate: Callable[[int, float], float]) -> None:
    found = _with_rate(rate)
    assert found.verdict is Verdict.INCOMPLETE, found.message
    assert "test_degrees.py:" in found.message


@pytest.mark.parametrize(
    "rate",
    [
        lambda n, scale: 0.1,
        lambda n, scale: 0.1 * (n + 1) / 6,
        lambda n, scale: 0.1 * 0.5**n,
        lambda n, scale: 0.05 + 0.05 * math.cos(n / 6),
        lambda n, scale: 3e-4,
    ],
)
def test_schedules_beside_a_scale_that_is_read_pass(rate: Callable[[int, float], float]) -> None:
    found = _with_rate(rate)
    assert found.verdict is Verdict.PASS, found.message
