"""One run of a subject: its loss adds no rounding, its own gradients are kept, and what it leaves is restored."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcheck import assert_compiled, audit
from ampcheck.core.run import Verdict
from ampcheck.core.subject import Subject
from ampcheck.numerics.losses import total_loss
from ampcheck.numerics.run import RunPlan, run_subject
from ampcheck.records.results import Key
from ampcheck.torchtools.copying import prepare
from ampcheck.torchtools.global_state import preserved_state, read_state


class Reversed(torch.autograd.Function):
    """Gives a view of its input and turns the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient


def _is_one(again: Callable[[Tensor], Any], base: Callable[[Tensor], Tensor] = torch.sin) -> bool:
    """Whether a tensor beside what `again` makes of it has the loss of the tensor alone."""
    leaf = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    made = base(leaf)
    alone, both = total_loss(made, None, False), total_loss([made, again(made)], None, False)
    assert alone is not None
    assert both is not None
    return bool(alone == both)


@pytest.mark.parametrize("base", [torch.sin, lambda leaf: leaf, lambda leaf: leaf.sin().view(16).view(4, 4)])
@pytest.mark.parametrize(
    "again",
    [
        lambda y: y,
        lambda y: [y] * 50,
        lambda y: y.view_as(y),
        lambda y: y[:],
        lambda y: y.t().t(),
        lambda y: y.unsqueeze(0).squeeze(0),
        lambda y: {"a": y, "b": (y.expand_as(y),)},
    ],
)
def test_an_output_that_is_listed_twice_counts_once(again: Any, base: Any) -> None:
    assert _is_one(again, base)


@pytest.mark.parametrize(
    "again", [lambda y: y * 1, lambda y: y[:2], lambda y: y.t(), Reversed.apply, lambda y: Reversed.apply(y)[:]]
)
def test_what_another_gradient_flows_through_counts_as_well(again: Any) -> None:
    assert not _is_one(again)


def _gradients(forward: Any, scale: float) -> dict[str, Tensor]:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return forward(super().forward(x))

    torch.manual_seed(0)
    gradients: dict[str, Tensor] = {}

    def receive(key: Key, tensor: Tensor) -> None:
        if key[0] == "gradient":
            gradients[key[1]] = tensor.clone()

    run_subject(prepare(Subject((Model(4, 4), (torch.randn(3, 4),)))), RunPlan(scale=scale), receive)
    return gradients


def test_gradients_of_a_backward_inside_forward_do_not_depend_on_the_loss_scale() -> None:
    def trains(y: Tensor) -> Tensor:
        y.square().sum().backward(retain_graph=True)
        return y

    one, large = _gradients(trains, 1.0), _gradients(trains, 4096.0)
    own = "weight of forward's own backward"
    assert torch.allclose(one[own], large[own], rtol=1e-6)
    assert torch.allclose(one["weight"] * 4096, large["weight"], rtol=1e-6)


def _switch(name: str) -> Callable[[], None]:
    changes: dict[str, Callable[[], Any]] = {
        "default device": lambda: torch.set_default_device("meta"),
        "default dtype": lambda: torch.set_default_dtype(torch.float64),
        "grad mode": lambda: torch.set_grad_enabled(False),
        "autocast cache": lambda: torch.set_autocast_cache_enabled(False),
    }
    return changes[name]


@pytest.mark.parametrize("name", ["default device", "default dtype", "grad mode", "autocast cache"])
def test_a_switch_is_restored_and_reported_unless_the_block_raises(name: str) -> None:
    before, changes = (read_state(), torch.is_grad_enabled()), dict[str, Any]()
    with preserved_state(changes):
        _switch(name)()
    assert list(changes) == [name]
    with suppress(ZeroDivisionError), preserved_state(changes):
        _switch(name)()
        _ = 1 / 0
    assert (read_state(), torch.is_grad_enabled()) == before


class Leaks(nn.Linear):
    """Leaves another default device behind."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        _switch("default device")()
        return out


def test_what_a_process_computes_once_is_not_made_on_a_device_that_forward_leaves() -> None:
    command = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, test_run_subject, ampcheck\n"
        "model = test_run_subject.Leaks(4, 4), (torch.randn(3, 4),)\n"
        "run = ampcheck.audit(model, dtype='bfloat16', compile=False)\n"
        "print({f.check for f in run.findings if f.verdict == 'fail'})"
    )
    done = subprocess.run([sys.executable, "-c", command, str(Path(__file__).parent)], capture_output=True, text=True)
    assert done.stdout.strip() == "{'autocast-state'}", done.stderr


def test_a_leak_of_forward_does_not_change_what_is_compiled() -> None:
    run = audit((Leaks(4, 4), (torch.randn(3, 4),)), dtype="bfloat16")
    assert {f.check for f in run.of(Verdict.FAIL)} == {"autocast-state"}, run
    assert_compiled(Leaks(4, 4), (torch.randn(3, 4),))


class Teacher(nn.Module):
    """Copies a part of itself while it runs, as momentum encoders and references in float64 do, and pickles it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            reference = copy.deepcopy(self.student).double()(x.double())
        pickle.dumps(self.student)
        return (self.student(x) - reference).abs().mean() + self.student(x).square().mean()


def test_a_model_may_copy_and_pickle_its_parts_while_it_runs() -> None:
    torch.manual_seed(0)
    run = audit((Teacher(), (torch.randn(16, 8),)), compile=False)
    assert run.of(Verdict.FAIL) == ()
    assert [f.check for f in run.findings if f.check == "precision-loss" and f.verdict is Verdict.PASS]
