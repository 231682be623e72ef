"""Promise: float32 weights that are rounded to 16 bits between steps are found, where updates get lost by it; weights
that a clamp or a restored state sets to 16-bit numbers are not, and no weight breaks the user's step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_loops import mlp

import ampcheck
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.training.protocol.events import Act, Event, Rounded
from ampcheck.training.protocol.rounded import RoundedWeights, check_rounded

STEPS = 12
Change = Callable[[nn.Module, int], Any]


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, between: Change) -> list[torch.Tensor]:
    """The weights after some steps. between: what is done to the model after each."""
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        between(model, number)
    return [parameter.detach().clone() for parameter in model.parameters()]


def of_blocks(make: Callable[[], tuple[nn.Module, Any]], between: Change) -> list[Finding]:
    model, optimizer = make()
    with ampcheck.watch(fail_on="never") as seen:
        trained(optimizer, model, between)
    return stagnation(seen)


def of_monitors(make: Callable[[], tuple[nn.Module, Any]], between: Change) -> list[Finding]:
    model, optimizer = make()
    with ampcheck.watch(model, optimizer, every=10, fail_on="never") as seen:
        trained(optimizer, model, between)
    return stagnation(seen)


def stagnation(seen: Any) -> list[Finding]:
    bad = (Verdict.FAIL, Verdict.WARN)
    return [finding for finding in seen.run.findings if finding.check == "stagnation" and finding.verdict in bad]


def adam(rate: float = 1e-5) -> tuple[nn.Module, Any]:
    model = mlp()
    return model, torch.optim.AdamW(model.parameters(), rate)


def from_checkpoint(rate: float) -> Callable[[], tuple[nn.Module, Any]]:
    """Weights of a checkpoint in bfloat16, trained in float32."""

    def make() -> tuple[nn.Module, Any]:
        model = mlp().bfloat16().float()
        return model, torch.optim.AdamW(model.parameters(), rate)

    return make


def cast_and_back(model: nn.Module, number: int) -> None:
    model.half()
    model.float()


def rounded_by_hand(model: nn.Module, number: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def matrices_cast_and_back(model: nn.Module, number: int) -> None:
    """As CLIP's convert_weights does for an evaluation: the matrices alone, through `.data`."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.half()
    for parameter in model.parameters():
        parameter.data = parameter.data.float()


def every(steps: int, change: Change) -> Change:
    """A change after each so many steps, as at an evaluation."""

    def changed(model: nn.Module, number: int) -> None:
        if number % steps == steps - 1:
            change(model, number)

    return changed


def swapped(backup: torch.dtype) -> Change:
    """An evaluation with other weights: backed up, overwritten and copied back."""

    def swap(model: nn.Module, number: int) -> None:
        with torch.no_grad():
            kept = [parameter.to(backup, copy=True) for parameter in model.parameters()]
            for parameter, weight in zip(model.parameters(), kept, strict=True):
                parameter.zero_()
                parameter.copy_(weight)

    return swap


def offloaded(model: nn.Module, number: int) -> None:
    """The weights are loaded again from a state in half precision."""
    model.load_state_dict({name: weight.half() for name, weight in model.state_dict().items()})


def nothing(model: nn.Module, number: int) -> None:
    pass


class Scaled(nn.Module):
    """Inputs times a weight: a gate for each, or a single scale."""

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def scaled(start: torch.Tensor, rate: float) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        model = Scaled(start.clone())
        return model, torch.optim.Adam(model.parameters(), rate)

    return make


def layer_norm(rate: float) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        model = nn.LayerNorm(16, bias=False)
        return model, torch.optim.SGD(model.parameters(), rate)

    return make


def clamped_at(bound: float) -> Change:
    """The loss pulls the weight below the bound in each step."""

    def clamp(model: nn.Module, number: int) -> None:
        with torch.no_grad():
            model.weight.clamp_(min=bound)

    return clamp


class Restored:
    """Weights that are loaded again after steps: the start of each task in MAML, or a step that is rejected."""

    def __init__(self, accepted: int = 0) -> None:
        self.accepted, self.state = accepted, {}

    def after(self, make: Callable[[], tuple[nn.Module, Any]]) -> Callable[[], tuple[nn.Module, Any]]:
        def made() -> tuple[nn.Module, Any]:
            model, optimizer = make()
            self.state = copy.deepcopy(model.state_dict())
            return model, optimizer

        return made

    def __call__(self, model: nn.Module, number: int) -> None:
        if number % (self.accepted + 1) == self.accepted:
            model.load_state_dict(self.state)


ways = pytest.mark.parametrize("judged", [of_blocks, of_monitors])


@pytest.mark.every(12)
@ways
@pytest.mark.parametrize("make", [adam, from_checkpoint(1e-5)], ids=["new", "weights of a checkpoint"])
@pytest.mark.parametrize(
    ("between", "dtype"),
    [(cast_and_back, "float16"), (matrices_cast_and_back, "float16"), (rounded_by_hand, "bfloat16")],
)
def test_a_cast_between_steps_that_undoes_them_is_named_at_the_step(judged, make, between, dtype):
    (finding,) = judged(make, between)
    assert finding.verdict is Verdict.FAIL
    assert f"were rounded to {dtype} before the next step" in finding.message
    assert finding.code == "optimizer.step()"


@pytest.mark.every(12)
@ways
@pytest.mark.parametrize("make", [lambda: adam(2e-6), from_checkpoint(2e-6)], ids=["new", "weights of a checkpoint"])
@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize(
    ("between", "dtype"),
    [(cast_and_back, "float16"), (swapped(torch.bfloat16), "bfloat16"), (offloaded, "float16")],
)
def test_a_cast_at_each_evaluation_that_undoes_the_steps_since_the_last_one_is_named(
    judged, make, between, dtype, steps
):
    (finding,) = judged(make, every(steps, between))
    assert finding.verdict is Verdict.FAIL
    assert f"were rounded to {dtype} before the next step" in finding.message


def test_the_loss_of_updates_is_real():
    """The weights go hardly any of the way that they go without the casts, beyond what one rounding moves them."""
    start = torch.cat([parameter.detach().flatten() for parameter in adam()[0].parameters()])
    ends = []
    for between in (nothing, cast_and_back):
        model, optimizer = adam()
        ends.append(torch.cat([weight.flatten() for weight in trained(optimizer, model, between)]).double())
    way = ends[0] - start.double()
    gone = (ends[1] - start.half().double()) @ way / (way @ way)
    assert gone < 0.3


@pytest.mark.every(12)
@ways
@pytest.mark.parametrize(
    ("make", "between"),
    [
        pytest.param(adam, nothing, id="plain"),
        pytest.param(adam, lambda model, number: copy.deepcopy(model).half(), id="a copy is cast"),
        pytest.param(adam, lambda model, number: number == 2 and cast_and_back(model, 2), id="one checkpoint"),
        pytest.param(from_checkpoint(1e-3), nothing, id="weights of a checkpoint"),
        pytest.param(from_checkpoint(0.0), nothing, id="a learning rate of zero"),
        pytest.param(from_checkpoint(1e-12), nothing, id="updates below the spacing of float32"),
        pytest.param(lambda: adam(0.05), cast_and_back, id="updates that survive"),
        pytest.param(lambda: adam(0.05), every(3, cast_and_back), id="updates that survive each evaluation"),
        pytest.param(from_checkpoint(1e-3), every(3, swapped(torch.float32)), id="a backup in float32"),
        pytest.param(adam, every(3, swapped(torch.float32)), id="a backup of new weights in float32"),
    ],
)
def test_weights_that_keep_their_updates_are_no_finding(judged, make, between):
    assert not judged(make, between)


@pytest.mark.every(20)
@ways
@pytest.mark.parametrize("rate", [1e-2, 1e-4], ids=["seen in 16 bits", "below their spacing"])
@pytest.mark.parametrize("accepted", [0, 1, 2], ids=["each step", "each second step", "each third step"])
@pytest.mark.parametrize(
    "make",
    [layer_norm, from_checkpoint, lambda rate: scaled(torch.tensor([1.0, -0.5, 0.25, 2.0] * 4), rate)],
    ids=["LayerNorm", "weights of a checkpoint", "16-bit numbers"],
)
def test_weights_that_are_restored_after_a_step_are_no_finding(judged, make, accepted, rate):
    restored = Restored(accepted)
    assert not judged(restored.after(make(rate)), restored)


@ways
def test_weights_that_are_restored_late_and_then_often_are_no_finding(judged, monkeypatch):
    monkeypatch.setattr("ampcheck.training.protocol.rounded._APART", 2)
    restored = Restored()
    assert not judged(restored.after(from_checkpoint(1e-4)), lambda model, n: n > 3 and restored(model, n))


@pytest.mark.every(12)
@ways
@pytest.mark.parametrize("rate", [1e-2, 1e-4], ids=["seen in 16 bits", "below their spacing"])
@pytest.mark.parametrize("start", [1.0, 1.00001], ids=["at the bound", "near it"])
@pytest.mark.parametrize("shape", [(16,), ()], ids=["gate", "scalar"])
@pytest.mark.parametrize("bound", [1.0, 4.0])
def test_weights_that_are_clamped_are_no_finding(judged, bound, shape, start, rate):
    assert not judged(scaled(torch.full(shape, bound * start), rate), clamped_at(bound))


def test_a_weight_that_changes_its_shape_between_steps_does_not_break_them():
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.125)
    with ampcheck.watch(optimizer, fail_on="never") as seen:
        for size in range(5, 9):
            weight.sum().backward()
            optimizer.step()
            weight.grad, weight.data = None, torch.ones(size)
    assert not stagnation(seen)


class NoOps(torch.Tensor):
    """A tensor whose class has an optimizer's ops and no others."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.eq, torch.Tensor.ne, torch.Tensor.__eq__, torch.Tensor.__ne__, torch.Tensor.reshape):
            raise NotImplementedError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def around_a_step(weight: torch.Tensor) -> list[Rounded]:
    optimizer, weights = torch.optim.SGD([weight], 0.125), RoundedWeights()
    found = []
    with torch.no_grad():
        for _ in range(3):
            found += weights.before(optimizer, {})
            weights.after(optimizer)
    return found


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(lambda: nn.Parameter(torch.ones(4).as_subclass(NoOps)), id="a subclass"),
        pytest.param(lambda: nn.Parameter(torch.ones(4, device="meta")), id="no memory"),
        pytest.param(lambda: nn.Parameter(torch.ones(0)), id="no elements"),
        pytest.param(lambda: torch.ones(4).to_sparse().requires_grad_(), id="sparse"),
    ],
)
def test_weights_that_cannot_be_read_are_passed_by(weight):
    assert not around_a_step(weight())


def test_nothing_is_read_while_a_cuda_graph_captures(monkeypatch):
    ops = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append(func)
            return func(*args, **(kwargs or {}))

    weight = nn.Parameter(torch.ones(4))
    with Seen():
        around_a_step(weight)
        assert ops
        ops.clear()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        around_a_step(weight)
    assert not ops


@pytest.mark.parametrize(("lost", "found"), [(95, True), (50, False), (0, False)])
def test_the_share_that_gets_lost_decides(lost, found):
    events = [
        Event(Act.OPTIMIZER_STEP, step, rounded=(Rounded("0.weight", "float16", 100, lost),)) for step in range(2)
    ]
    assert bool(check_rounded(events, "loop", Limits())) is found
    assert not check_rounded(events, "loop", Limits(), reported=["0.weight"])
    assert not check_rounded(events[:1], "loop", Limits())
