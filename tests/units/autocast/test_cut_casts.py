"""A cast that autocast kept from a pass without gradients gives its weight no gradient, and is found by the weights.

PyTorch keeps such casts without history until 2.10. The oracle is PyTorch itself: the gradients of the same code
without the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampcheck
from ampcheck import emulate
from ampcheck.autocast.kernels import casts_with_grad
from ampcheck.core.run import Finding, Verdict
from ampcheck.watch import Watched

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

Region = Callable[[], Any]
BEFORE, SINCE = "2.10", "2.11"


class Net(nn.Module):
    """Two layers that autocast casts; the gradients of the norm and the embedding never pass through a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def body(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(hidden)))  # type: ignore[no-any-return]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(self.embed(tokens)).float())  # type: ignore[no-any-return]


class Recycles(Net):
    """Runs several times, and gives gradients in the last pass only."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for n in range(3):
            with torch.set_grad_enabled(n == 2):
                hidden = self.body(hidden)
        return self.norm(hidden.float())  # type: ignore[no-any-return]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * grad


class OwnLinear(torch.autograd.Function):
    """Gives its weight a gradient itself, whatever history the cast has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return None, grad.float().flatten(0, -2).t() @ x.float().flatten(0, -2)


def tokens() -> torch.Tensor:
    return torch.arange(16).reshape(2, 8) % 8


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out.float() - torch.linspace(-1, 1, 8)).square().mean()


# --- code that loses gradients until 2.10


def a_target_of_its_own_weights(model: nn.Module, region: Region) -> None:
    with region():
        with torch.no_grad():
            target = model(tokens()).roll(1, 0)
        out = model(tokens())
        loss = (out - target).float().square().mean() + loss_of(out)
    loss.backward()


def a_validation_before_the_loss(model: nn.Module, region: Region) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    with region():
        model.eval()
        with torch.no_grad():
            float(loss_of(model(tokens())))
        model.train()
        loss = loss_of(model(tokens()))
    scaler.scale(loss).backward()


def recycling(model: nn.Module, region: Region) -> None:
    with region():
        loss = loss_of(model(tokens()))
    loss.backward()


def sampling_a_layer(model: Any, region: Region) -> None:
    """Only the first layer ran without gradients, and a Function follows it."""
    with region():
        with torch.no_grad():
            for _ in range(3):
                model.first(torch.randn(2, 8, 8))
        out = model.norm(model.second(Square.apply(model.first(model.embed(tokens())))).float())
        loss = loss_of(out)
    torch.autograd.backward([loss])


def a_checkpoint_beside_a_plain_use(model: Any, region: Region) -> None:
    """A reentrant checkpoint runs its forward without gradients; the weights are shared with what follows."""
    with region():
        hidden = checkpoint(model.body, model.embed(tokens()), use_reentrant=True)
        loss = loss_of(model.norm(model.body(hidden).float()))
    loss.backward()


def a_gradient_that_is_asked_for(model: Any, region: Region) -> None:
    with region():
        with torch.no_grad():
            model(tokens())
        loss = loss_of(model(tokens()))
    wanted = list(model.parameters())
    for parameter, gradient in zip(wanted, torch.autograd.grad(loss, wanted, allow_unused=True), strict=True):
        parameter.grad = gradient


LOSE: Mapping[str, tuple[type[nn.Module], Callable[[Any, Region], None]]] = {
    "target": (Net, a_target_of_its_own_weights),
    "validation": (Net, a_validation_before_the_loss),
    "recycling": (Recycles, recycling),
    "one layer": (Net, sampling_a_layer),
    "checkpoint": (Net, a_checkpoint_beside_a_plain_use),
    "autograd.grad": (Net, a_gradient_that_is_asked_for),
}


# --- code that loses none


def a_region_of_its_own(model: nn.Module, region: Region) -> None:
    with region(), torch.no_grad():
        model(tokens())
    with region():
        loss = loss_of(model(tokens()))
    loss.backward()


def a_cleared_cache(model: nn.Module, region: Region) -> None:
    with region():
        with torch.no_grad():
            model(tokens())
        torch.clear_autocast_cache()
        loss = loss_of(model(tokens()))
    loss.backward()


def gradients_first(model: nn.Module, region: Region) -> None:
    with region():
        loss = loss_of(model(tokens()))
        with torch.no_grad():
            model(tokens())
    loss.backward()


def another_teacher(model: nn.Module, region: Region) -> None:
    teacher = Net()
    with region():
        with torch.no_grad():
            target = teacher(tokens())
        loss = (model(tokens()) - target).float().square().mean()
    loss.backward()


def an_evaluation_with_gradients_on(model: nn.Module, region: Region) -> None:
    """Nothing is differentiated in the region whose casts have no history."""
    with region():
        with torch.no_grad():
            model(tokens())
        loss_of(model(tokens())).item()
    with region():
        loss = loss_of(model(tokens()))
    loss.backward()


def a_detached_target(model: Any, region: Region) -> None:
    other = Net()
    with region():
        with torch.no_grad():
            other(tokens())
        target = other(tokens()).detach()
        loss = (model(tokens()) - target).float().square().mean()
    loss.backward()


def a_frozen_layer(model: Any, region: Region) -> None:
    model.first.requires_grad_(False)
    with region():
        with torch.no_grad():
            model.first(model.embed(tokens()))
        loss = loss_of(model(tokens()))
    loss.backward()


def a_function_with_its_own_gradient(model: Any, region: Region) -> None:
    with region():
        with torch.no_grad():
            model.first(model.embed(tokens()).detach())
        loss = loss_of(OwnLinear.apply(model.embed(tokens()).detach(), model.first.weight))
    loss.backward()


def a_cast_of_its_own(model: Any, region: Region) -> None:
    """A constant that the code wants to be one."""
    with region():
        with torch.no_grad():
            constant = model.first.weight.to(torch.bfloat16)
        loss = loss_of(F.linear(model(tokens()), constant))
    loss.backward()


HEALTHY = [
    a_region_of_its_own,
    a_cleared_cache,
    gradients_first,
    another_teacher,
    an_evaluation_with_gradients_on,
    a_detached_target,
    a_frozen_layer,
    a_function_with_its_own_gradient,
    a_cast_of_its_own,
]


def gradients(kind: type[nn.Module], code: Callable[[Any, Region], None], region: Region) -> dict[str, Any]:
    torch.manual_seed(0)
    model = kind()
    code(model, region)
    return {name: p.grad for name, p in model.named_parameters()}


def lost(cached: Mapping[str, Any], plain: Mapping[str, Any]) -> set[str]:
    """The weights whose gradient is not what it is without the cache."""
    return {n for n, g in plain.items() if g is not None and (cached[n] is None or not torch.equal(cached[n], g))}


def watched(kind: type[nn.Module], code: Any, dtype: torch.dtype, release: str) -> tuple[Watched, set[str]]:
    region = partial(torch.autocast, "cpu", dtype)
    with emulate("cpu", release=release):
        with ampcheck.watch(checks=["autocast-cache"], fail_on="never") as seen:
            cached = gradients(kind, code, region)
        plain = gradients(kind, code, partial(region, cache_enabled=False))
    return seen, lost(cached, plain)


def failures(seen: Watched) -> list[Finding]:
    return list(seen.run.of(Verdict.FAIL))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOSE)
def test_every_weight_that_loses_its_gradient_is_named(name: str, dtype: torch.dtype) -> None:
    seen, missing = watched(*LOSE[name], dtype, BEFORE)
    assert missing
    assert seen.stats.autocast is not None
    assert {cut.weight for cut in seen.stats.autocast.cut} == missing
    assert all(f.check == "autocast-cache" and "clear_autocast_cache" in f.hint for f in failures(seen))


@pytest.mark.parametrize("name", LOSE)
def test_since_2_11_the_same_code_loses_none_and_passes(name: str) -> None:
    seen, missing = watched(*LOSE[name], torch.bfloat16, SINCE)
    assert (missing, failures(seen)) == (set(), [])


@pytest.mark.parametrize("release", [BEFORE, SINCE])
@pytest.mark.parametrize("code", HEALTHY)
def test_code_that_loses_no_gradient_passes(code: Callable[[Any, Region], None], release: str) -> None:
    seen, missing = watched(Net, code, torch.bfloat16, release)
    assert (missing, failures(seen)) == (set(), [])


def test_the_finding_names_both_passes_and_the_weights() -> None:
    (finding,) = failures(watched(*LOSE["target"], torch.bfloat16, BEFORE)[0])
    code = a_target_of_its_own_weights.__code__
    assert f"test_cut_casts.py:{code.co_firstlineno + 3}" in finding.message  # target = model(...)
    assert finding.where.line == code.co_firstlineno + 4  # out = model(...)
    assert finding.where.module == ""
    assert all(name in finding.message for name in ("first.weight", "first.bias", "second.weight", "second.bias"))
    assert not any(name in finding.message for name in ("norm", "embed"))


def test_the_one_module_whose_weights_lose_their_gradients_is_that_of_the_finding() -> None:
    (finding,) = failures(watched(*LOSE["one layer"], torch.bfloat16, BEFORE)[0])
    assert finding.where.module == "first"


def test_weights_of_no_module_are_named_by_their_shape() -> None:
    weight, beside = torch.randn(4, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    with emulate("cpu", release=BEFORE), ampcheck.watch(checks=["autocast-cache"], fail_on="never") as seen:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                torch.ones(2, 4) @ weight
            out = torch.ones(2, 4) @ weight + beside
        out.float().sum().backward()
    (finding,) = failures(seen)
    assert "a weight [4, 3]" in finding.message


def test_a_loss_that_reaches_no_weight_at_all_is_explained_beside_the_error() -> None:
    model = nn.Linear(4, 4)

    def train() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                model(torch.ones(2, 4))
            loss = model(torch.ones(2, 4)).float().sum()
        loss.backward()

    with emulate("cpu", release=BEFORE):
        run = ampcheck.audit(train, checks=["autocast-cache"])
    assert [f.check for f in run.of(Verdict.FAIL)] == ["autocast-cache"]


def test_a_training_loop_is_judged_as_a_callable_and_by_its_parts() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> float:
        optimizer.zero_grad()
        a_target_of_its_own_weights(model, partial(torch.autocast, "cpu", torch.bfloat16))
        optimizer.step()
        return 0.0

    with emulate("cpu", release=BEFORE):
        for subject in ({"model": model, "optimizer": optimizer, "step": step}, lambda: [step(n) for n in range(2)]):
            run = ampcheck.audit(subject, checks=["autocast-cache"], steps=2)
            assert [f.check for f in run.of(Verdict.FAIL)] == ["autocast-cache"]


def keeps_history() -> bool:
    weight, plain = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            torch.mm(weight, plain)
        return torch.mm(weight, plain).requires_grad


def test_the_release_since_which_casts_keep_their_history_agrees_with_the_installed_pytorch() -> None:
    assert keeps_history() == casts_with_grad(torch.__version__)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("release", [BEFORE, SINCE, None])
def test_the_cache_of_an_emulation_is_that_of_its_release(release: str | None, device: str) -> None:
    with emulate(device, release=release):
        assert keeps_history() == casts_with_grad(release or torch.__version__)
