"""Promise: floating numbers that an op makes of integers alone are exact as well, and the default dtype stays alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from opinfo import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.facts.values import CompanionStore
from ampcheck.ops.traits import traits
from ampcheck.shadow import Shadow
from ampcheck.shadow.call import Call, Side, leaves, results_of

INTEGERS = (torch.int64, torch.bool, torch.uint8)
SAMPLES = 4
DTYPES = {"exact": torch.float64, "moved": torch.float32}

PLAIN: dict[str, Callable[[], Any]] = {
    "arange": lambda: torch.arange(0, 1, 0.1),
    "range": lambda: torch.ops.aten.range(0.0, 1.0),
    "full": lambda: torch.full((3,), 0.1),
    "full of complex numbers": lambda: torch.full((3,), 0.1 + 0.2j),
    "full_like": lambda: torch.full_like(torch.arange(3), 0.1, dtype=torch.float32),
    "linspace": lambda: torch.linspace(0, 1, 7),
    "linspace of tensors": lambda: torch.linspace(torch.tensor(0), torch.tensor(1), 7),
    "logspace": lambda: torch.logspace(0, 1, 7),
    "eye": lambda: torch.eye(3) / 3,
    "scalar_tensor": lambda: torch.scalar_tensor(0.1),
    "hann_window": lambda: torch.hann_window(7),
    "kaiser_window": lambda: torch.kaiser_window(7),
    "where of two numbers": lambda: torch.where(torch.tensor([True, False]), 0.1, 0.3),
    "where of a number": lambda: torch.where(torch.tensor([True, False]), torch.arange(2), 0.3),
    "times a complex number": lambda: torch.arange(3) * 0.1j,
    "zero-dimensional": lambda: torch.tensor(7) / torch.tensor([3]),
    "a number less a mask": lambda: 0.1 - torch.tensor([True, False]).int(),
    "a sum of a mask": lambda: torch.tensor([True, False]).mean(dtype=torch.float32) / 3,
    "foreach division": lambda: torch._foreach_div([torch.arange(3), torch.arange(2)], 3),
    "foreach power": lambda: torch._foreach_pow(2.5, [torch.arange(3)]),
    "foreach numbers": lambda: torch._foreach_add([torch.arange(3), torch.arange(2)], [0.1, 0.2]),
    "logsumexp": lambda: torch.logsumexp(torch.arange(3), 0),
    "add_relu": lambda: torch.ops.aten._add_relu.Scalar(torch.arange(3), 0.1),
    "in place into a list": lambda: torch.ones(3).div_(3).add_(torch.arange(3)),
}


class IntegersAlone(TorchDispatchMode):
    """Collects the calls that make floating numbers without a floating argument."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = Call(func, traits(func), args, kwargs or {})
        call.out = func(*args, **call.kwargs)
        floats = [t.is_floating_point() or t.is_complex() for t in leaves((args, tuple(call.kwargs.values())))]
        drawn = call.traits.random or call.traits.unset or call.traits.view
        if not any(floats) and not drawn and any(t is not None for t in results_of(call.out)):
            self.calls.append(call)
        return call.out


def with_default(call: Call, dtype: torch.dtype) -> Any:
    """The op in a process of which this is the default dtype: the oracle. Formats that the call names are lifted."""
    side = Side(CompanionStore(), "exact" if dtype is torch.float64 else "moved")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return call.op(*side.lift(call.args), **{name: side.lift(value) for name, value in call.kwargs.items()})
    finally:
        torch.set_default_dtype(before)


def check(calls: list[Call], default: torch.dtype) -> None:
    for call in calls:
        for name, dtype in DTYPES.items():
            expected = with_default(call, dtype)
            before = torch.get_default_dtype()
            torch.set_default_dtype(default)  # a side does not read it
            try:
                result = Side(CompanionStore(), name).run(call)
            finally:
                torch.set_default_dtype(before)
            for got, wanted in zip(leaves(result), leaves(expected), strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True, msg=str(call.op))


def operators() -> Iterator[Any]:
    supported = (op for op in op_db() if any(op.supports_dtype(dtype, "cpu") for dtype in INTEGERS))
    return (op for op in supported if not op.name.startswith("jiterator"))  # of CUDA alone


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_operators_of_opinfo_give_what_they_give_with_that_default_dtype(default: torch.dtype) -> None:
    seen = IntegersAlone()
    for op in operators():
        for dtype in INTEGERS:
            if not op.supports_dtype(dtype, "cpu"):
                continue
            samples = op.sample_inputs_func(op, "cpu", dtype, requires_grad=False)  # its wrapper reads every frame
            for sample in itertools.islice(samples, SAMPLES):
                with seen:
                    try:
                        op(sample.input, *sample.args, **sample.kwargs)
                    except (RuntimeError, TypeError, ValueError):  # refuses this input
                        continue
    names = {call.name for call in seen.calls}
    assert {"div", "mul", "sqrt", "atan2", "special_zeta", "polygamma", "logsumexp", "sum", "_to_copy"} <= names
    assert len(names) >= 80
    check(seen.calls, default)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_calls_do_as_well(name: str) -> None:
    seen = IntegersAlone()
    with seen:
        PLAIN[name]()
    assert seen.calls
    check(seen.calls, torch.float32)


@pytest.mark.parametrize("name", PLAIN)
def test_the_default_dtype_of_other_threads_stays_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets it while the run goes on sets it for every thread."""
    set_by: list[object] = []
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: set_by.append(dtype))
    with Shadow():
        PLAIN[name]()
    assert set_by == []


@pytest.mark.parametrize("name", DTYPES)
def test_a_thread_that_computes_while_a_companion_is_made_keeps_its_dtypes(name: str) -> None:
    """The other thread computes in the very middle."""
    seen, others = IntegersAlone(), list[torch.dtype]()
    with seen:
        torch.arange(1, 5) / 3
    call = seen.calls[-1]

    def compute() -> None:
        others.extend((torch.full((2,), 0.5).dtype, (torch.arange(2) / 3).dtype, torch.randn(2).dtype))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        return call.op(*args, **kwargs)

    result = Side(CompanionStore(), name).run(call, interrupted)
    assert others == [torch.float32] * 3
    assert result.tolist() == (torch.arange(1, 5).to(DTYPES[name]) / 3).tolist()
