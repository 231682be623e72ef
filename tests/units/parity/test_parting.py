"""What two sides are given, how they run, and where the comparison says that they part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from ampcheck import assert_parity
from ampcheck.parity.kernels import compare_kernel
from ampcheck.shadow.result import Reference


class Scaled(torch.Tensor):
    """A tensor with a factor of its own, as quantised weights have one."""

    scale: float

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: float) -> Scaled:
        tensor: Scaled = torch.Tensor._make_subclass(cls, data)
        tensor.scale = scale
        return tensor


def dequantised(x: torch.Tensor, weight: Scaled) -> torch.Tensor:
    return x @ (weight.as_subclass(torch.Tensor) * weight.scale)


def test_an_argument_keeps_its_class_and_attributes() -> None:
    args = torch.randn(3, 4), Scaled(torch.randn(4, 4), 0.5)
    assert_parity(dequantised, lambda x, weight: x @ (weight.as_subclass(torch.Tensor) * 0.5), args)
    with pytest.raises(AssertionError, match="exact values differ by"):
        assert_parity(dequantised, lambda x, weight: x @ weight.as_subclass(torch.Tensor), args)


def test_a_function_takes_gradients_of_its_own_where_none_are_compared() -> None:
    def slopes(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(x.sin().sum(), x)
        return slope

    assert_parity(slopes, torch.cos, (torch.randn(16),), backward=False)
    with torch.no_grad(), pytest.raises(Exception, match="does not require grad"):
        assert_parity(slopes, torch.cos, (torch.randn(16),), backward=False)


def test_rows_of_nan_are_no_values_that_both_have() -> None:
    allowed = torch.ones(8, 8, dtype=torch.bool).tril(-1)  # nothing for the first row

    def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).masked_fill(~allowed, -torch.inf).softmax(-1) @ v

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=1.0)  # zeros in such a row

    with pytest.raises(AssertionError, match="infinities or NaN") as raised:
        assert_parity(by_hand, fused, tuple(torch.randn(1, 2, 8, 8) for _ in range(3)), backward=False)
    text = str(raised.value)
    assert "then b runs forward, aten::_scaled_dot_product" in text
    assert "ends with it" not in text


def test_rows_of_zeros_are_no_values_that_both_have() -> None:
    def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return F.relu(x) * gate[:, None]

    def ungated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        unused = torch.zeros_like(x) * gate[:, None]  # rows of zeros lie about
        return F.relu(x) + unused

    x, gate = torch.randn(6, 16), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    with pytest.raises(AssertionError) as raised:
        assert_parity(gated, ungated, (x, gate), backward=False)
    assert "then a runs forward, aten::mul.Tensor" in str(raised.value)


def test_a_view_of_what_both_have_is_not_where_they_part() -> None:
    def by_rows(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return torch.stack([wide[:, t, :, None] * 1.5 for t in range(x.shape[1])], 1)

    def at_once(x: torch.Tensor) -> torch.Tensor:
        return (x.float() * 1.25)[..., None]

    with pytest.raises(AssertionError) as raised:
        assert_parity(by_rows, at_once, (torch.randn(3, 5, 8, dtype=torch.bfloat16),), backward=False)
    assert "then a runs forward, aten::mul.Tensor" in str(raised.value)


def test_the_last_values_of_both_sides_are_told_apart() -> None:
    def routed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * 2) * (x @ w).softmax(-1)

    def unrouted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x @ w
        return x * 2

    text = r"are made by .*aten::mm.* in a and by .*aten::mul.* in b; then a runs .*softmax.*; b ends with it"
    with pytest.raises(AssertionError, match=text):
        assert_parity(routed, unrouted, (torch.randn(4, 8), torch.randn(8, 8)), backward=False)


@pytest.mark.parametrize("seed", range(6))
def test_a_kernel_within_its_bound_has_no_error_above_its_limit(seed: int) -> None:
    exact = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2.0**-16
    message, error, limit = compare_kernel(exact.to(torch.float16), Reference(exact, exact.float(), 2.0**-11))
    assert not message
    assert error <= limit


def test_where_both_have_all_values_the_ops_that_choose_are_named() -> None:
    def last(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh().index_select(1, torch.tensor([5]))

    def before(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh().index_select(1, torch.tensor([4]))

    text = r"both have is made by .*aten::tanh.*; then a runs .*index_select.*; then b runs .*index_select"
    with pytest.raises(AssertionError, match=text):
        assert_parity(last, before, (torch.randn(3, 6, 8), torch.randn(8, 8)), backward=False)
    with pytest.raises(AssertionError, match="they take other elements of it"):
        assert_parity(lambda x: (x * 2)[:, -1], lambda x: (x * 2)[:, -2], (torch.randn(3, 6, 8),), backward=False)


def weighted(factor: float = 1.0, bias: float = 1.0) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor if parameter.dim() > 1 else bias)
    return model.bfloat16()


def outcome(a: torch.nn.Module, b: torch.nn.Module, relation: str = "function") -> str:
    torch.manual_seed(1)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    try:
        return str(assert_parity(a, b, (x,), relation=relation, backward=False).findings[0].verdict)
    except AssertionError as error:
        return str(error).partition(" exact values ")[1].strip() or str(error)


def test_weights_in_one_format_are_no_roundings_of_each_other() -> None:
    assert outcome(weighted(), weighted()) == "pass"
    assert outcome(weighted(), weighted(1.005)) == "undecided"  # within a rounding of what both may be rounded from
    assert outcome(weighted(), weighted(1.03)) == "exact values"
    assert outcome(weighted(), weighted(bias=0.0)) == "exact values"
    assert outcome(weighted(), weighted(bias=0.9)) == "exact values"


@pytest.mark.parametrize("relation", ["function", "rounding"])
def test_wrong_compiled_code_is_another_function(relation: str) -> None:
    def without_residual(graph: torch.fx.GraphModule, _: object) -> object:
        for node in graph.graph.nodes:
            if node.target in (torch.add, "add") or getattr(node.target, "__name__", "") == "add":
                node.replace_all_uses_with(node.args[1])
        graph.recompile()
        return graph.forward

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + x.tanh()

    compiled = torch.compile(block, backend=without_residual)
    with pytest.raises(AssertionError, match="compiled"):
        assert_parity(block, compiled, (torch.randn(4, 8),), relation=relation, backward=False)


CHOSEN = torch.arange(1, 6)


def in_heads(x: torch.Tensor, weight: torch.Tensor, *, swapped: bool) -> torch.Tensor:
    projected = x @ weight
    q = projected.view(3, 6, 2, 4).permute(0, 3, 1, 2) if swapped else projected.view(3, 6, 4, 2).transpose(1, 2)
    return (q @ q.mT).softmax(-1) @ q


def rotated(x: torch.Tensor, weight: torch.Tensor, *, offset: int) -> torch.Tensor:
    position = torch.arange(x.shape[1]) + offset
    angle = position.float()[:, None] * 10000.0 ** -(torch.arange(4) / 4)
    first, second = (x @ weight).chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


@pytest.mark.parametrize(
    ("a", "b", "place"),
    [
        (
            lambda x, w: ((x @ w).tanh()[:, CHOSEN] @ w).exp(),
            lambda x, w: ((x @ w).tanh()[:, CHOSEN - 1] @ w).exp(),
            r"aten::tanh, [^;]+; then a runs [^;]+index[^;]+; then b runs [^;]+index",
        ),
        (
            partial(in_heads, swapped=False),
            partial(in_heads, swapped=True),
            r"aten::mm, [^;]+; then a runs [^;]+; then b runs [^;]+; they take other elements",
        ),
        (partial(rotated, offset=0), partial(rotated, offset=1), r"arguments on; then a runs [^;]+_to_copy"),
        (
            lambda x, w: F.embedding(torch.arange(6), w) @ w + x,
            lambda x, w: F.embedding(torch.arange(6) + 2, w) @ w + x,
            r"then a runs [^;]+embedding[^;]+; then b runs [^;]+embedding",
        ),
        (
            lambda x, w: (x @ w).sigmoid().roll(1, 1) * x,
            lambda x, w: (x @ w).sigmoid().roll(-1, 1) * x,
            r"aten::sigmoid, [^;]+; then a runs [^;]+roll[^;]+; then b runs [^;]+roll",
        ),
        (
            lambda x, w: (x @ w).tanh()[:, :-1] @ w,
            lambda x, w: (x @ w).tanh()[:, 1:] @ w,
            r"aten::tanh, [^;]+; then a runs [^;]+; then b runs [^;]+; they take other elements",
        ),
    ],
)
def test_what_takes_other_elements_in_the_middle_is_named(
    a: Callable[..., torch.Tensor], b: Callable[..., torch.Tensor], place: str
) -> None:
    x, w = torch.randn(3, 6, 8), torch.randn(8, 8)
    with pytest.raises(AssertionError, match=place):
        assert_parity(a, b, (x, w), backward=False)
