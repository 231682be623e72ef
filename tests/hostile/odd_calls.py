"""Shapes of subjects, training mappings, callables and losses that are odd."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import torch
from odd_rows import PASSES, Base, add, fails, given, incomplete, refused

from ampcheck import Subject

# What is no subject


class Needs(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()


class Unread(dict):
    def get(self, key: Any, default: Any = None) -> Any:
        raise RuntimeError("boom")


SHAPES = {
    "None": lambda: None,
    "an int": lambda: 3,
    "a text": lambda: "text",
    "an empty tuple": lambda: (),
    "a tuple of one": lambda: (Base(),),
    "a tuple of four": lambda: (Base(), (), {}, {}),
    "a module alone": lambda: Base(),
    "a class alone": lambda: Base,
    "a list": lambda: [Base()],
    "a set": lambda: {1},
    "a generator": lambda: (number for number in range(3)),
    "a tensor": lambda: torch.ones(3),
    "a text as model": lambda: ("text", ()),
    "None as model": lambda: (None, ()),
    "keywords that are a list": lambda: (Base(), (torch.ones(3, 4),), [1]),
    "an empty list of calls": lambda: (Base(), []),
    "blocks with two sets of arguments": lambda: ([Base(), Base()], [(torch.ones(3, 4),), (torch.ones(3, 4),)]),
    "blocks that are not callable": lambda: ([Base(), 3], [(torch.ones(3, 4),)]),
    "an empty mapping": dict,
    "a mapping without a step": lambda: {"model": Base()},
    "a mapping whose step is None": lambda: {"model": Base(), "step": None},
    "a mapping whose step is a text": lambda: {"model": Base(), "step": "step"},
    "a callable with arguments": lambda: lambda x: x,
}
for title, make in SHAPES.items():
    add(f"subject: {title}", refused("is no subject"), make)
add("subject: a mapping that refuses to be read", refused("boom"), lambda: Unread(model=1))
add("subject: a class with its arguments", refused("the class Needs where an instance belongs"), lambda: given(Needs))
add("subject: dtypes that are a list", refused("dtypes of"), lambda: Subject(given(Base()), dtypes=[1]))
add("subject: limits that are a number", refused("limits of"), lambda: Subject(given(Base()), limits=3))

# Training


def _loop(returned: Any = torch.Tensor.item, **changes: Any) -> dict[str, Any]:
    model = Base()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(3, 4)

    def step(number: int) -> Any:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        return returned(loss)

    return {"model": model, "optimizer": optimizer, "step": step, **changes}


async def _async_step(number: int) -> float:
    await asyncio.sleep(0)
    return 0.0


def _yielding_step(number: int) -> Any:
    yield 0.0


class AsyncCall:
    async def __call__(self, *args: Any) -> float:
        return 0.0


class YieldingMethod:
    def run(self, *args: Any) -> Any:
        yield 0.0

    async def later(self, *args: Any) -> float:
        return 0.0


def _decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


NOT_RUN = {
    "a coroutine function": lambda: _async_step,
    "a generator function": lambda: _yielding_step,
    "a partial of a coroutine function": lambda: functools.partial(_async_step),
    "a partial of a generator function": lambda: functools.partial(_yielding_step),
    "a decorated coroutine function": lambda: _decorated(_async_step),
    "a decorated generator function": lambda: _decorated(_yielding_step),
    "an object with async __call__": AsyncCall,
    "a bound generator method": lambda: YieldingMethod().run,
    "a bound coroutine method": lambda: YieldingMethod().later,
    "a lambda that returns a coroutine": lambda: lambda *args: _async_step(0),
}
for title, make in NOT_RUN.items():
    add(f"step: {title}", refused("must run when it is called"), lambda m=make: _loop(step=m()))

RETURNS = {
    "None": lambda loss: None,
    "a bool": lambda loss: True,
    "a text": lambda loss: "0.5",
    "a vector": lambda loss: loss.expand(3),
    "a dict": lambda loss: {"loss": loss},
}
for title, how in RETURNS.items():
    add(f"step returns {title}", fails("coverage"), lambda h=how: _loop(h))
add("step returns NaN", fails(), lambda: _loop(lambda loss: float("nan")))
add("step returns a tensor", PASSES, lambda: _loop(lambda loss: loss))


def _step_that(throw: Any) -> Any:
    def step(number: int) -> Any:
        throw()

    return step


class OwnError(BaseException):
    """A user's own exception beside `Exception`."""


def _own() -> None:
    raise OwnError("own")


for title, throw in {"sys.exit(0)": lambda: sys.exit(0), "own BaseException": _own, "1 / 0": lambda: 1 / 0}.items():
    add(f"step raises {title}", fails("coverage"), lambda t=throw: _loop(step=_step_that(t)))

MAPPINGS = {
    "optimizer None": lambda: _loop(optimizer=None),
    "model None": lambda: _loop(model=None),
    "scaler None": lambda: _loop(scaler=None),
    "optimizer a text": lambda: _loop(optimizer="SGD"),
    "model a class": lambda: _loop(model=Base),
    "keys that are numbers": lambda: {**_loop(), 3: Base()},
}
for title, make in MAPPINGS.items():
    add(f"training: {title}", PASSES, make)  # the step finds its model and optimizer by itself
add("training: save that is async", refused("save.. of .* must run"), lambda: _loop(
    save=lambda: _async_step(0), load=lambda kept: None
))  # fmt: skip
add("training: load that is async", refused("load.* must run"), lambda: _loop(save=dict, load=_async_step))
add("training: step without arguments", fails("coverage"), lambda: _loop(step=lambda: 0.0))
add("training: a step that does nothing", fails("coverage"), lambda: {"step": lambda number: 0.0})
add("training: steps that are a text", refused("steps of"), lambda: _loop(steps="3"))
add("training: steps below one", refused("steps of"), lambda: _loop(steps=0))

# Callables without arguments


@contextmanager
def _managed() -> Any:
    yield torch.ones(3).sum()


@asynccontextmanager
async def _async_managed() -> Any:
    yield


class Unsigned:
    @property
    def __signature__(self) -> Any:
        raise RuntimeError("boom")

    def __call__(self) -> None:
        torch.ones(3).sum()


for title, make in NOT_RUN.items():
    add(f"callable: {title}", refused("must run when it is called"), lambda m=make: functools.partial(m(), 0))
add("callable: a context manager", refused("context manager"), lambda: _managed)
add("callable: an async context manager", refused("context manager"), lambda: _async_managed)
add("callable: __signature__ raises", refused("boom|is no subject"), Unsigned)
add("callable: sys.exit", fails("coverage"), lambda: functools.partial(sys.exit, 0))
add("callable: raises SystemExit", fails("coverage"), lambda: lambda: sys.exit(0))
add("callable: raises", fails("coverage"), lambda: lambda: 1 / 0)
add("callable: own BaseException", fails("coverage"), lambda: _own)
add("callable: does nothing", incomplete("coverage"), lambda: lambda: None)
add("callable: a builtin without a signature", refused("is no subject"), lambda: max)
add("callable: a builtin", incomplete("coverage", phrase="only the switches"), lambda: gc.collect)
add("callable: a partial", PASSES, lambda: functools.partial(Base(), torch.ones(3, 4)))

# Losses


async def _async_loss(out: torch.Tensor) -> Any:
    return out.mean()


def _yielding_loss(out: torch.Tensor) -> Any:
    yield out.mean()


LOSSES = {
    "a vector": (lambda out: out, refused("the loss must return a floating tensor of one element")),
    "an int": (lambda out: 3, refused("the loss must return")),
    "None": (lambda out: None, refused("the loss must return.*NoneType")),
    "a text": (lambda out: "text", refused("the loss must return")),
    "NaN": (lambda out: out.mean() * float("nan"), fails("nonfinite-reference")),
    "a detached tensor": (lambda out: out.mean().detach(), refused("the loss of subject must have a gradient")),
    "a coroutine": (_async_loss, refused("the loss must run")),
    "a generator": (_yielding_loss, refused("the loss must run")),
    "sys.exit(0)": (lambda out: sys.exit(0), refused("SystemExit")),
    "an exception": (lambda out: 1 / 0, refused("ZeroDivisionError")),
    "integers": (lambda out: out.argmax(), refused("the loss must return.*int64")),
}
for title, (loss, report) in LOSSES.items():
    add(f"loss: {title}", report, lambda f=loss: Subject(given(Base()), loss=f))
