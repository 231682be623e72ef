"""A copy of what is compiled already: plain where eager mode is judged, compiled as it was where compiled code is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


def through(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).relu()


HOLDERS: dict[str, Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "closure": lambda held: lambda x: held(x).relu(),
    "partial": lambda held: functools.partial(through, held),
    "keyword of a partial": lambda held: functools.partial(through, x=torch.randn(8, 4), model=held),
    "closure that is compiled as well": lambda held: torch.compile(lambda x: held(x).relu(), backend="eager"),
}

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
    with counted() as counter:
        subject = Subject((way(Net()), (torch.randn(8, 4),)))
    (block,) = recompiled(subject, prepare(subject))
    block(torch.randn(8, 4))
    assert counter.frame_count, "by the backend that the original has"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_function_is_copied_plain_with_what_it_holds_and_compiled_as_that_was(
    holder: str, way: Callable[[Net], object]
) -> None:
    with counted() as counter:
        function = HOLDERS[holder](way(Net()))
    inputs = () if "keyword" in holder else (torch.randn(8, 4),)
    subject = Subject((function, inputs))
    assert is_compiled_already(subject)
    prepared = prepare(subject)
    expected = function(*inputs)
    counter.clear()
    (copied,) = prepared.blocks
    torch.testing.assert_close(copied(*inputs), expected)
    assert not counter.frame_count, "a copy runs in eager mode"
    assert prepared.root is not None
    with torch.no_grad():
        for parameter in prepared.root.parameters():
            parameter.zero_()
    assert copied(*inputs).abs().max() == 0, "it runs with weights of its own"
    torch.compiler.reset()  # what the original compiled would serve the copy
    (block,) = recompiled(subject, prepared)
    assert block(*inputs).abs().max() == 0
    assert counter.frame_count, "by the backend that the original has"


@contextmanager
def counted() -> Iterator[Any]:
    """Whatever is compiled inside has a backend that counts."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch.compiler.reset()
    settings = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda part, **_: settings(part, backend=counter))
        yield counter
