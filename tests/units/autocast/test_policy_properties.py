"""What a policy says of an op is what autocast does to it, whatever the dtypes, shapes, layouts and nesting.

The oracle casts by the rule and runs the op without autocast (`op_oracle.predicted`); on the CPU it judges the real
autocast of the installed PyTorch, under emulation ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_oracle import observed, predicted

from ampcheck.autocast.emulate import Emulation, emulated_policy
from ampcheck.autocast.kernels import target_dtype
from ampcheck.autocast.probe import measure_policy
from ampcheck.records.policy import FP32, LOWER, PROMOTE, Policy
from ampcheck.strategies import broadcastable, log_uniform, shapes, tensors
from ampcheck.torchtools.source import overload

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LOW = (torch.bfloat16, torch.float16)
side = st.integers(1, 4)
sizes = log_uniform(2.0**-6, 2.0**4).map(lambda x: float(torch.tensor(x).bfloat16()))


@dataclass(frozen=True)
class Op:
    """An overload, the shapes of its tensors, and what it takes besides. listed: it takes a list of tensors."""

    name: str
    shapes: st.SearchStrategy[tuple[tuple[int, ...], ...]]
    rest: tuple[Any, ...] = ()
    listed: bool = False


any_shape = shapes(max_dims=3, max_side=4)
one = any_shape.map(lambda shape: (shape,))
broadcast = any_shape.flatmap(broadcastable)
thrice = any_shape.flatmap(lambda shape: broadcastable(shape, 3))
alike = any_shape.map(lambda shape: (shape, shape))
product = st.builds(lambda m, k, n: ((m, k), (k, n)), side, side, side)
batched = st.builds(lambda b, m, k, n: ((b, m, k), (b, k, n)), side, side, side, side)
spread = st.tuples(shapes(max_dims=2, max_side=3).flatmap(broadcastable), product).map(
    lambda both: tuple((*outer, *inner) for outer, inner in zip(*both, strict=True))
)
OPS = [
    Op("aten::mm", product),
    Op("aten::bmm", batched),
    Op("aten::matmul", spread),
    Op("aten::addmm", st.builds(lambda m, k, n: ((n,), (m, k), (k, n)), side, side, side)),
    Op("aten::baddbmm", st.builds(lambda b, m, k, n: ((b, 1, n), (b, m, k), (b, k, n)), side, side, side, side)),
    Op("aten::linear", st.builds(lambda b, m, n: ((b, m), (n, m), (n,)), side, side, side)),
    Op("aten::conv1d", st.builds(lambda b, i, o, n: ((b, i, n), (o, i, 1), (o,)), side, side, side, side)),
    Op("aten::prelu", st.builds(lambda b, n: ((b, n), (n,)), side, side)),
    Op("aten::linalg_vecdot", alike),
    Op("aten::mse_loss", alike),
    Op("aten::l1_loss", alike),
    Op("aten::huber_loss", alike),
    Op("aten::soft_margin_loss", alike),
    Op("aten::poisson_nll_loss", alike, (True, False, 1e-8, 1)),
    Op("aten::cdist", st.builds(lambda m, n, k: ((m, k), (n, k)), side, side, side)),
    Op("aten::prod", one),
    Op("aten::trace", st.builds(lambda m, n: ((m, n),), side, side)),
    Op("aten::replication_pad1d", st.builds(lambda b, n: ((b, n),), side, side), ([1, 1],)),
    Op("aten::cat", alike, (0,), listed=True),
    Op("aten::stack", alike, (0,), listed=True),
    Op("aten::add.Tensor", broadcast),
    Op("aten::mul.Tensor", broadcast),
    Op("aten::maximum", broadcast),
    Op("aten::addcmul", thrice),
    Op("aten::addcdiv", thrice),
    Op("aten::exp", one),
    Op("aten::relu", one),
    Op("aten::softmax.int", one, (-1,)),
    Op("aten::log_softmax.int", one, (-1,)),
    Op("aten::cumsum", one, (0,)),
    Op("aten::sum", one),
    Op("aten::norm.Scalar", one),
    Op("aten::pow.Tensor_Scalar", one, (2,)),
    Op("aten::atan2", broadcast),
    Op("aten::dot", side.map(lambda n: ((n,), (n,)))),
    Op("aten::binary_cross_entropy", alike),
]


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, tuple[Any, ...]]:
    """An op with tensors of drawn shapes, dtypes and layouts; a dtype that all share is as likely as a mixture."""
    op = draw(st.sampled_from(OPS))
    wanted = draw(op.shapes)
    kinds = draw(
        st.sampled_from(FLOATS).map(lambda kind: [kind] * len(wanted))
        | st.lists(st.sampled_from(FLOATS), min_size=len(wanted), max_size=len(wanted))
    )
    given_ = [
        draw(tensors(kind, shape=shape, elements=sizes, layout="any"))
        for kind, shape in zip(kinds, wanted, strict=True)
    ]
    return op.name, ((given_, *op.rest) if op.listed else (*given_, *op.rest))


regions = st.lists(st.tuples(st.booleans(), st.sampled_from(LOW)), max_size=3)
"""Nested `torch.autocast` regions, the outermost first: whether enabled, and the dtype."""


def under(nested: Sequence[tuple[bool, torch.dtype]], run: Callable[[], Any], device: str = "cpu") -> Any:
    with ExitStack() as stack:
        for enabled, low in nested:
            stack.enter_context(torch.autocast(device, low, enabled=enabled))
        return observed(run)


@lru_cache
def policy(device: str, low: torch.dtype) -> Policy:
    return measure_policy(device, low)


def expected(nested: Sequence[tuple[bool, torch.dtype]], device: str, name: str, args: tuple[Any, ...]) -> Any:
    """The innermost region decides, and where none is enabled the op runs as it is."""
    enabled, low = nested[-1] if nested else (False, torch.bfloat16)
    rule = policy(device, low).ops.get(name) if enabled else None
    return observed(lambda: predicted(rule, low, name, args, {}))


@given(call=calls(), nested=regions)
def test_real_autocast_of_the_cpu_does_what_the_policy_says_in_any_nesting(
    call: tuple[str, tuple[Any, ...]], nested: list[tuple[bool, torch.dtype]]
) -> None:
    name, args = call
    got = under(nested, lambda: overload(name)(*args))
    wanted = expected(nested, "cpu", name, args)
    assert got.difference(wanted, values=True) == "", (got, wanted)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@given(many=st.lists(st.tuples(calls(), regions), min_size=1, max_size=2))
def test_emulated_autocast_does_what_the_policy_says_in_any_nesting(
    device: str, many: list[tuple[tuple[str, tuple[Any, ...]], list[tuple[bool, torch.dtype]]]]
) -> None:
    wanted = [expected(nested, device, name, args) for (name, args), nested in many]
    # With an observer every rule is followed by our kernels, none by PyTorch's.
    with Emulation(emulated_policy(device), observe=lambda *call: None):
        got = [under(nested, lambda: overload(name)(*args), device) for (name, args), nested in many]  # noqa: B023
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.difference(theirs, values=True) == "", (ours, theirs)


def eligible(args: Sequence[Any]) -> list[torch.Tensor]:
    flat = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
    return [x for x in flat if isinstance(x, torch.Tensor) and x.dtype is not torch.float64]


@given(call=calls(), low=st.sampled_from(LOW))
def test_the_dtype_that_a_rule_casts_to_is_the_one_that_runs_below_real_autocast(
    call: tuple[str, tuple[Any, ...]], low: torch.dtype
) -> None:
    name, args = call
    rule = policy("cpu", low).rule(name)
    got = under([(True, low)], lambda: overload(name)(*args))
    before = takewhile(lambda x: x.dtype is not torch.float32, eligible(args))
    if rule == PROMOTE and any(x.dtype is not low for x in before):  # PyTorch knows no wider of two 16-bit dtypes
        assert got.raised
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            target_dtype(rule, args, low)
        return
    cast = target_dtype(rule, args, low)
    if cast is None or not eligible(args):
        return
    assert {LOWER: cast is low, FP32: cast is torch.float32}.get(rule, rule == PROMOTE)
    wide = {torch.float64} if len(eligible(args)) < len([x for x in args if isinstance(x, torch.Tensor)]) else set()
    if got.ops and not any(isinstance(arg, list) for arg in args):
        assert set(got.ops[0][1]) <= {cast} | wide


# Weights, whose casts are kept --------------------------------------------------------------------------------------

SHARED = ("mm", "mse_loss", "cat", "add")
acts = st.one_of(
    st.tuples(st.just("enter"), st.booleans(), st.sampled_from(LOW), st.booleans()),
    st.just(("leave",)),
    st.tuples(
        st.sampled_from(SHARED), st.integers(0, 1), st.integers(0, 1), st.sampled_from(["grad", "none", "infer"])
    ),
)
programs = st.lists(st.lists(acts, max_size=8), min_size=1, max_size=6)
Result = tuple[list[Any], list[Any]]


def ran(program: Sequence[tuple[Any, ...]], weights: Sequence[torch.Tensor]) -> Result:
    """What a program of regions and ops on two weights gives: dtypes, bits, and gradients."""
    leaves = [weight.clone().requires_grad_() for weight in weights]
    told: list[Any] = []
    total = torch.zeros(())
    with ExitStack() as stack:
        open_: list[ExitStack] = []
        for act, *how in program:
            if act == "enter":
                open_.append(stack.enter_context(ExitStack()))
                open_[-1].enter_context(torch.autocast("cpu", how[1], enabled=how[0], cache_enabled=how[2]))
            elif act == "leave":
                if open_:
                    open_.pop().close()
            else:
                mode = {"grad": torch.enable_grad, "none": torch.no_grad, "infer": torch.inference_mode}[how[2]]
                a, b = leaves[how[0]], leaves[how[1]]
                with mode():
                    out = {
                        "mm": lambda: torch.mm(a, b),  # noqa: B023
                        "mse_loss": lambda: torch.nn.functional.mse_loss(a, b),  # noqa: B023
                        "cat": lambda: torch.cat([a, b.half()]),  # noqa: B023
                        "add": lambda: a + b,  # noqa: B023
                    }[act]()
                told.append((out.dtype, out.requires_grad, out.detach().to(torch.float64).tolist()))
                if out.requires_grad:
                    total = total + out.to(torch.float32).sum()
    if total.requires_grad:
        total.backward()
    return told, [None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves]


def outcome(program: Sequence[tuple[Any, ...]], weights: Sequence[torch.Tensor]) -> Result | str:
    try:
        return ran(program, weights)
    except RuntimeError as error:  # that it raises is an outcome; of which words it is, PyTorch's
        return type(error).__name__


@given(many=programs, weights=st.tuples(*[tensors("float32", shape=(2, 2), elements=sizes)] * 2))
def test_weights_in_any_regions_get_the_casts_bits_and_gradients_of_real_autocast(
    many: list[list[tuple[Any, ...]]], weights: tuple[torch.Tensor, torch.Tensor]
) -> None:
    real = [outcome(program, weights) for program in many]
    with Emulation(emulated_policy("cpu"), observe=lambda *call: None):
        ours = [outcome(program, weights) for program in many]
    assert ours == real
