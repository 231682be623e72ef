"""Shapes of subjects, training mappings, callables and losses that are odd."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import torch
from odd_rows import JUDGED, Base, add, fails, given, refused

from ampcheck.subject import Subject

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
    "an empty mapping": lambda: {},
    "a mapping without a step": lambda: {"model": Base()},
    "a mapping whose step is None": lambda: {"model": Base(), "step": None},
    "a mapping whose step is a text": lambda: {"model": Base(), "step": "step"},
    "a callable with arguments": lambda: lambda x: x,
}
for title, make in SHAPES.items():
    add(f"subject: {title}", refused("is no subject"), make)
add("subject: a mapping that refuses to be read", refused("boom"), lambda: Unread(model=1))
add("subject: a class with its arguments", refused("raises in float32|class"), lambda: given(Needs))
add("subject: dtypes that are a list", refused("dtypes of"), lambda: Subject(given(Base()), dtypes=[1]))
add("subject: limits that are a number", refused("limits of"), lambda: Subject(given(Base()), limits=3))

# Training


def _loop(returned: Any = None, **changes: Any) -> dict[str, Any]:
    model = Base()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(3, 4)

    def step(number: int) -> Any:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item() if returned is None else returned(loss)

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
    "None": lambda loss: None if loss.item() > -1 else loss,
    "a text": lambda loss: "0.5",
    "a vector": lambda loss: loss.expand(3),
    "a dict": lambda loss: {"loss": loss},
}
for title, how in RETURNS.items():
    add(f"step returns {title}", JUDGED, lambda h=how: _loop(lambda loss: h(loss) if h(loss) is not None else []))
add("step returns NaN", JUDGED, lambda: _loop(lambda loss: float("nan")))
add("step returns a tensor", JUDGED, lambda: _loop(lambda loss: loss))
add("step returns a bool", JUDGED, lambda: _loop(lambda loss: True))


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
    "step without arguments": lambda: _loop(step=lambda: 0.0),
    "a step that does nothing": lambda: {"step": lambda number: 0.0},
    "save that is async": lambda: _loop(save=_async_step, load=lambda kept: None),
}
for title, make in MAPPINGS.items():
    add(f"training: {title}", JUDGED, make)
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
add("callable: does nothing", fails("coverage"), lambda: lambda: None)
add("callable: a builtin", fails("coverage"), lambda: time.time)
add("callable: returns a function", fails("coverage"), lambda: lambda: _own)
add("callable: a partial of torch", JUDGED, lambda: functools.partial(torch.ones, 3))

# Losses


async def _async_loss(out: torch.Tensor) -> Any:
    return out.mean()


def _yielding_loss(out: torch.Tensor) -> Any:
    yield out.mean()


LOSSES = {
    "a vector": (lambda out: out, refused("raises in float32 too")),
    "an int": (lambda out: 3, refused("raises in float32 too|loss")),
    "None": (lambda out: None, JUDGED),
    "a text": (lambda out: "text", refused("raises in float32 too|loss")),
    "NaN": (lambda out: out.mean() * float("nan"), JUDGED),
    "a detached tensor": (lambda out: out.mean().detach(), refused("raises in float32 too|loss")),
    "a coroutine": (_async_loss, refused("the loss must run")),
    "a generator": (_yielding_loss, refused("the loss must run")),
    "sys.exit(0)": (lambda out: sys.exit(0), refused("SystemExit")),
    "an exception": (lambda out: 1 / 0, refused("ZeroDivisionError")),
    "integers": (lambda out: out.argmax(), refused("raises in float32 too|loss")),
}
for title, (loss, report) in LOSSES.items():
    add(f"loss: {title}", report, lambda f=loss: Subject(given(Base()), loss=f))
