"""Modules that raise or end the interpreter, wherever ampcheck runs their code."""

from __future__ import annotations

import asyncio
import sys
import unittest
from typing import Any

import pytest
import torch
from odd_rows import PASSES, Base, add, fails, given, is_low, module, raises, refused, row


class OwnError(BaseException):
    """A user's own exception beside `Exception`."""


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


class NoTextError(Exception):
    def __str__(self) -> Any:
        return 3


def _recurse() -> None:
    _recurse()


def _throw(error: BaseException) -> None:
    raise error


RAISERS = {
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit()": lambda: sys.exit(),
    "sys.exit(1)": lambda: sys.exit(1),
    "sys.exit(text)": lambda: sys.exit("bye"),
    "quit()": lambda: _throw(SystemExit),  # site.quit closes stdin besides
    "GeneratorExit": lambda: _throw(GeneratorExit()),
    "CancelledError": lambda: _throw(asyncio.CancelledError()),
    "BaseException": lambda: _throw(BaseException("base")),
    "own BaseException": lambda: _throw(OwnError("own")),
    "ExceptionGroup": lambda: _throw(_group()),
    "RecursionError": _recurse,
    "MemoryError": lambda: _throw(MemoryError()),
    "StopIteration": lambda: next(iter(())),
    "AssertionError": lambda: _throw(AssertionError()),
    "unreadable": lambda: _throw(UnreadableError()),
    "no text": lambda: _throw(NoTextError()),
    "10 MB": lambda: _throw(ValueError("x" * 10**7)),
    "control characters": lambda: _throw(ValueError("\n\n\x1b[2J\x07red\x00")),
}


def _group() -> BaseException:
    kind = getattr(__builtins__, "BaseExceptionGroup", None) if not isinstance(__builtins__, dict) else None
    kind = kind or (__builtins__.get("BaseExceptionGroup") if isinstance(__builtins__, dict) else None)
    return kind("several", [SystemExit(0)]) if kind else OwnError("several")


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, throw: Any) -> torch.Tensor:
        ctx.throw, ctx.low = throw, is_low()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.low:
            ctx.throw()
        return grad, None


for name, throw in RAISERS.items():

    def always(self: Any, x: torch.Tensor, throw: Any = throw) -> Any:
        throw()

    def when_low(self: Any, x: torch.Tensor, throw: Any = throw) -> Any:
        if is_low():
            throw()
        return self.inner(x)

    def in_backward(self: Any, x: torch.Tensor, throw: Any = throw) -> Any:
        return InBackward.apply(self.inner(x), throw)

    add(f"forward raises {name}", refused("raises in float32 too, in forward"), lambda f=always: given(module(f)))
    add(f"forward raises {name} in float16", fails("low-precision-error"), lambda f=when_low: given(module(f)))
    if name in ("sys.exit(0)", "own BaseException", "RecursionError", "StopIteration", "unreadable"):
        add(f"backward raises {name} in float16", fails("low-precision-error"), lambda f=in_backward: given(module(f)))


for name, report, throw in [
    ("Ctrl-C", raises(KeyboardInterrupt), lambda: _throw(KeyboardInterrupt())),
    ("pytest.skip", raises(pytest.skip.Exception), lambda: pytest.skip("not here")),
    ("pytest.fail", raises(pytest.fail.Exception), lambda: pytest.fail("no")),
    ("pytest.exit", raises(pytest.exit.Exception), lambda: pytest.exit("end")),
    ("unittest.SkipTest", raises(unittest.SkipTest), lambda: _throw(unittest.SkipTest("not here"))),
]:

    def interrupted(self: Any, x: torch.Tensor, throw: Any = throw) -> Any:
        torch.set_grad_enabled(True)
        throw()

    add(f"forward is ended by {name}", report, lambda f=interrupted: given(module(f)))

    def interrupted_low(self: Any, x: torch.Tensor, throw: Any = throw) -> Any:
        if is_low():
            throw()
        return self.inner(x)

    add(f"forward in float16 is ended by {name}", report, lambda f=interrupted_low: given(module(f)))


def _raises_in(method: str, throw: Any) -> Any:
    """A module whose `method` raises once it is made."""

    def raising(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "ready" in self.__dict__:
            throw()
        return getattr(super(odd, self), method)(*args, **kwargs)

    odd = type("Odd", (Base,), {method: raising, "__module__": __name__})
    made = odd()
    made.__dict__["ready"] = True
    return made


def _boom() -> None:
    raise RuntimeError("boom")


def _exit() -> None:
    sys.exit(0)


for how, throw in {"raises": _boom, "exits": _exit}.items():
    for method in ("named_parameters", "parameters", "named_buffers", "modules", "named_modules", "_apply"):
        add(f"{method} {how}", refused("boom|SystemExit"), lambda m=method, t=throw: given(_raises_in(m, t)))
    for method in ("__deepcopy__", "__reduce_ex__"):

        def copied(self: Any, *args: Any, throw: Any = throw) -> Any:
            throw()

        add(
            f"{method} {how}",
            refused("must be copied"),
            lambda m=method, c=copied: given(module(Base.forward, **{m: c})),
        )

    def missing(self: Any, name: str, throw: Any = throw) -> Any:
        if "ready" in self.__dict__ and not name.startswith("__"):
            throw()
        return torch.nn.Module.__getattr__(self, name)

    def guarded(missing: Any = missing) -> Any:
        odd = module(lambda self, x: x * self._parameters["weight"], __getattr__=missing)
        odd.weight = torch.nn.Parameter(torch.ones(4))
        odd.__dict__["ready"] = True
        return given(odd)

    add(f"__getattr__ {how}", refused("boom|SystemExit"), guarded)

    def hooked(method: str, throw: Any = throw) -> Any:
        odd = Base()
        getattr(odd.inner, method)(lambda *args: throw() if is_low() else None)
        return given(odd)

    add(f"a forward hook {how} in float16", fails("low-precision-error"), lambda h=hooked: h("register_forward_hook"))
    add(f"a pre-hook {how} in float16", fails("low-precision-error"), lambda h=hooked: h("register_forward_pre_hook"))

    def tensor_hook(self: Any, x: torch.Tensor, throw: Any = throw) -> Any:
        out, low = self.inner(x), is_low()
        out.register_hook(lambda grad: throw() if low else None)
        return out

    add(f"a tensor hook {how} in float16", fails("low-precision-error"), lambda f=tensor_hook: given(module(f)))


for method in ("__len__", "__bool__", "__repr__", "__str__", "__eq__", "__iter__", "__contains__", "extra_repr"):

    def special(self: Any, *args: Any, throw: Any = _exit) -> Any:
        throw()

    extra = {"__hash__": torch.nn.Module.__hash__} if method == "__eq__" else {}
    add(
        f"{method} exits",
        PASSES,
        lambda m=method, s=special, e=extra: given(module(Base.forward, **{m: s, **e})),
    )
for method in ("train", "eval", "state_dict", "load_state_dict", "__dir__", "zero_grad", "requires_grad_"):
    add(f"{method} exits", PASSES, lambda m=method, t=_exit: given(_raises_in(m, t)))


def prop(self: Any, throw: Any = _exit) -> Any:
    throw()


for attribute in ("loss", "device", "dtype", "config", "shape", "_orig_mod", "__name__", "is_sparse"):
    add(
        f"property {attribute} exits",
        PASSES,
        lambda a=attribute, p=prop: given(module(Base.forward, **{a: property(p)})),
    )


@row(PASSES, "a module that holds a generator")
def holds_generator() -> Any:
    odd = Base()
    odd.state = (number for number in range(3))
    return given(odd)


@row(refused("nest|RecursionError"), "inputs nested 20,000 deep")
def nested() -> Any:
    deep: Any = torch.randn(4)
    for _ in range(20_000):
        deep = [deep]
    return Base(), (deep,)
