"""A copy of what is compiled already: plain where eager mode is judged, compiled as it was where compiled code is."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck.core.subject import Subject
from ampcheck.torchtools.copying import is_compiled_already, prepare, recompiled


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
    "partial of a compiled function": lambda held: functools.partial(torch.compile(through, backend="eager"), held),
    "default": lambda held: lambda x, model=held: model(x).relu(),
    "default by name": lambda held: by_name(held),
    "decorated": lambda held: torch.no_grad()(lambda x: held(x).relu()),
    "decorated with its own attribute": lambda held: torch.autocast("cpu", enabled=False)(lambda x: held(x).relu()),
    "another function": lambda held: lambda x, run=lambda y: held(y): run(x).relu(),
    "list": lambda held: lambda x, models=(torch.relu, [held]): models[0](models[1][0](x)),
    "object": lambda held: Predictor(held),
    "method of an object": lambda held: Predictor(held).predict,
    "bound call": lambda held: torch.nn.Sequential(held, torch.nn.ReLU()).__call__,  # type: ignore[arg-type]
}


def by_name(held: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor, *, model: nn.Module = held) -> torch.Tensor:
        return model(x).relu()

    return run


class Predictor:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).relu()

    __call__ = predict


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


def test_a_compiled_call_that_was_taken_from_a_module_runs_with_a_copy() -> None:
    model = Net()
    subject = Subject((torch.compile(model, backend="eager").__call__, (torch.randn(8, 4),)))
    prepared = prepare(subject, to=torch.float64)
    x = torch.randn(8, 4, dtype=torch.float64)
    assert prepared.blocks[0](x).dtype is torch.float64
    assert recompiled(subject, prepared)[0](x).dtype is torch.float64
    assert model.inner[0].weight.dtype is torch.float32


def test_parts_that_are_held_twice_are_one_in_the_copy_too() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"))
            self.a = self.b = inner
            self.listed = nn.ModuleList([torch.compile(nn.Linear(4, 4), backend="eager")] * 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in (self.a, self.b, *self.listed):
                x = one(x)
            return x

    subject = Subject((Twice(), (torch.randn(8, 4),)))
    prepared = prepare(subject)
    assert not is_compiled_already(Subject((prepared.model, subject.calls[0].args)))
    (block,) = recompiled(subject, prepared)
    assert block.a is block.b
    assert block.listed[0] is block.listed[2]
    with torch.no_grad():
        block(torch.randn(8, 4))


def test_functions_of_one_closure_share_the_copies_of_their_modules() -> None:
    model = Net()
    half = lambda x: model(x) / 2  # noqa: E731
    whole = lambda x: half(x) + model(x)  # noqa: E731
    prepared = prepare(Subject((whole, (torch.randn(8, 4),))), to=torch.float64)
    assert prepared.blocks[0](torch.randn(8, 4, dtype=torch.float64)).dtype is torch.float64
    assert prepared.root is not None
    assert len(list(prepared.root.parameters())) == len(list(model.parameters()))


HELD = Net()


@torch.autocast("cpu", enabled=False)
def global_through_decorator(x: torch.Tensor) -> torch.Tensor:
    return HELD(x)


def test_a_decorated_function_that_reads_a_global_module_runs_with_its_copy_when_compiled() -> None:
    torch.compiler.reset()
    prepared = prepare(Subject((global_through_decorator, (torch.randn(8, 4),))))
    torch.compile(prepared.blocks[0], backend="eager")(torch.randn(8, 4))
    assert prepared.root is not None
    seen = [int(model.get_buffer("inner.1.num_batches_tracked")) for model in (HELD, prepared.root)]
    assert seen == [0, 1]


def test_a_function_that_calls_itself_is_copied() -> None:
    model = Net()

    def run(x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return run(model(x), depth - 1) if depth else x

    prepared = prepare(Subject((run, (torch.randn(8, 4),))), to=torch.float64)
    assert prepared.blocks[0](torch.randn(8, 4, dtype=torch.float64)).dtype is torch.float64
    assert model.inner[0].weight.dtype is torch.float32


def test_many_functions_that_know_each_other_are_copied_once_each() -> None:
    names: dict[str, Any] = {"model": Net(), "__name__": __name__}
    for n in range(300):
        others = ", ".join(f"f{other}" for other in range(300))
        exec(compile(f"def f{n}(x, others=lambda: ({others})): return model(x)", __file__, "exec"), names)
    prepared = prepare(Subject((names["f0"], (torch.randn(8, 4),))), to=torch.float64)
    assert prepared.blocks[0](torch.randn(8, 4, dtype=torch.float64)).dtype is torch.float64


def test_what_cannot_be_copied_beside_a_module_is_shared() -> None:
    predictor = Predictor(Net())
    predictor.lock = threading.Lock()  # type: ignore[attr-defined]
    prepared = prepare(Subject((predictor.predict, (torch.randn(8, 4),))))
    assert prepared.blocks[0](torch.randn(8, 4)).shape == (8, 4)


def test_other_arguments_of_a_partial_are_copied() -> None:
    x = torch.zeros(8, 4)
    prepared = prepare(Subject((functools.partial(through, Net(), x), ())))
    prepared.blocks[0].args[1].fill_(1.0)
    assert x.max() == 0


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
