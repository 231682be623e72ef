"""A copy of what is compiled already: plain where eager mode is judged, compiled as it was where compiled code is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampcheck.prepare import is_compiled_already, prepare, recompiled
from ampcheck.subject import Subject


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


def whole(model: Net) -> object:
    return torch.compile(model, backend="eager")


def in_place(model: Net) -> object:
    model.compile(backend="eager")
    return model


def its_forward(model: Net) -> object:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def a_part(model: Net) -> object:
    model.inner = torch.compile(model.inner, backend="eager")
    return model


WAYS = (whole, in_place, its_forward, a_part)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_plain_and_leaves_the_original_alone(way: Callable[[Net], object]) -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    subject = Subject((way(model), (torch.randn(8, 4),)))
    assert is_compiled_already(subject)
    prepared = prepare(subject)
    assert not is_compiled_already(Subject((prepared.model, (torch.randn(8, 4),))))
    with torch.no_grad():
        for parameter in prepared.model.parameters():
            parameter.zero_()
        out = prepared.model(torch.randn(8, 4))
    assert out.abs().max() == 0, "it runs with its own weights"
    plain = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    assert all(torch.equal(plain[name], value) for name, value in before.items())


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_compiled_as_the_original_is(way: Callable[[Net], object]) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch.compiler.reset()
    model = Net()
    settings = torch.compile
    try:
        torch.compile = lambda part, **_: settings(part, backend=counter)  # type: ignore[assignment]
        subject = Subject((way(model), (torch.randn(8, 4),)))
    finally:
        torch.compile = settings
    prepared = prepare(subject)
    (block,) = recompiled(subject, prepared)
    block(torch.randn(8, 4))
    assert counter.frame_count, "by the backend that the original has"
