"""What a run with one module left out of compilation tells, and by what limits it is judged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ampcheck.compiled.accuracy.arms import Trajectory
from ampcheck.compiled.accuracy.stats import AOT_EAGER, Deviation
from ampcheck.compiled.blame.arm import Arm
from ampcheck.core.limits import Limits
from ampcheck.core.subject import Subject
from ampcheck.numerics import measure_reference

OUTPUT = [Deviation("output", "", 0, "float32", (0.0,), (1.0,))]


class Otherwise(nn.Module):
    """Gives twice as much where it is compiled, and may refuse to run where it is not."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.refuses = refuses

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x * 2
        if self.refuses and torch.is_grad_enabled() and x.dtype is torch.float32 and self.armed:
            raise RuntimeError("planted")
        return x

    armed = False


class Chooses(nn.Module):
    """Takes the larger of two values, and the other one where it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x.min() * 1.1 if torch.compiler.is_compiling() else x.max() * 1.1


def arm(model: nn.Module, x: Tensor) -> Arm:
    subject = Subject((model, (x,)))
    return Arm(subject, measure_reference(subject), torch.float32, True, "cpu", Limits())


@pytest.mark.parametrize("refuses", [False, True])
def test_what_raises_with_a_module_left_out_is_not_mended_by_it(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = arm(nn.Sequential(nn.Linear(4, 4), Otherwise(refuses)), torch.randn(2, 4))
    bench = next(iter(judged.benches(judged.subject)))
    _, failing = judged.rung(bench, AOT_EAGER)
    assert failing
    monkeypatch.setattr(Otherwise, "armed", True)
    assert judged.passes_without(bench, AOT_EAGER, failing, "1") is not refuses


def test_a_decision_near_a_tie_is_excused_in_the_search_as_it_is_in_the_verdict() -> None:
    judged = arm(Chooses(), torch.tensor([1.25, 2.5]))
    bench = next(iter(judged.benches(judged.subject)))
    assert judged.rung(bench, AOT_EAGER)[1]
    assert not judged.passes_without(bench, AOT_EAGER, OUTPUT, "first")
    bench.near_ties = 1  # as if a rounding of the data could turn the choice
    bench.turned = (Trajectory(values={("output", "", 0): torch.tensor(1.25 * 1.1, dtype=torch.float64)}),)
    assert judged.rung(bench, AOT_EAGER)[1] is None
    assert judged.passes_without(bench, AOT_EAGER, OUTPUT, "first")
