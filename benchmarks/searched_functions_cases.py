"""Functions of PyTorch itself, each with the domain in which its true value fits into the format.

A function whose result grows (exp, a product, a sum) leaves the range of 16 bits at large inputs, which no kernel can
mend; its domain ends where its true value does, so that a search shows what the kernel does before. A function without
such a limit is given every finite number. Where a function is finite at the ends of the format and its kernel is not,
the domain reaches there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.strategies import shapes, tensors

Bound = float | Callable[[FloatFormat], float] | None
"""A number, one that follows from the format, or no bound."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One argument. shape: None for any of one to three dimensions, a number for that many dimensions at least."""

    low: Bound = None
    high: Bound = None
    shape: tuple[int, ...] | int | None = None
    integer: bool = False

    def bounds(self, dtype: str) -> tuple[float | None, float | None]:
        fmt = format_of(dtype)
        low, high = (bound(fmt) if callable(bound) else bound for bound in (self.low, self.high))
        return low, high

    def drawn(self, dtype: str, shape: tuple[int, ...] | None = None) -> st.SearchStrategy[Tensor]:
        """shape: in the place of the operand's own."""
        own: Any = shapes(min_dims=self.shape) if isinstance(self.shape, int) else self.shape
        low, high = self.bounds(dtype)
        held = "int64" if self.integer else dtype
        return tensors(held, shape=own if shape is None else shape, min_value=low, max_value=high)

    def domain(self, dtype: str) -> str:
        low, high = self.bounds(dtype)
        if low is None and high is None:
            return "any"
        if low is not None and high is not None and low == -high:
            return f"|x| <= {high:.3g}"
        least, most = ("" if low is None else f"{low:.3g} <= "), ("" if high is None else f" <= {high:.3g}")
        return f"{least}x{most}"


@dataclass(frozen=True, slots=True)
class Case:
    """A function and its operands. alike: they have one shape, whichever is drawn."""

    function: Callable[..., Any]
    operands: tuple[Operand, ...] = (Operand(),)
    alike: bool = False

    def inputs(self, dtype: str) -> st.SearchStrategy[Any]:
        if not self.alike:
            return st.tuples(*(one.drawn(dtype) for one in self.operands))
        return shapes().flatmap(lambda shape: st.tuples(*(one.drawn(dtype, shape) for one in self.operands)))

    def domain(self, dtype: str) -> str:
        return "; ".join(one.domain(dtype) for one in self.operands)


def share(of: float) -> Callable[[FloatFormat], float]:
    """The largest value, over `of`."""
    return lambda fmt: fmt.max / of


def root(degree: float = 2.0, of: float = 1.0) -> Callable[[FloatFormat], float]:
    """What the largest value is this power of, over `of`."""
    return lambda fmt: fmt.max ** (1 / degree) / of


def logarithm(more: float = 0.0, base: float = math.e) -> Callable[[FloatFormat], float]:
    """The logarithm of the largest value, and so much more."""
    return lambda fmt: math.log(fmt.max) / math.log(base) + more


def by_logarithm(fmt: FloatFormat) -> float:
    """Where x log(x) is half of the largest value, nearly."""
    return fmt.max / (2 * math.log(fmt.max))


def normal(fmt: FloatFormat) -> float:
    return fmt.smallest_normal


def one_over(bound: Callable[[FloatFormat], float]) -> Callable[[FloatFormat], float]:
    return lambda fmt: 1 / bound(fmt)


def minus(bound: Callable[[FloatFormat], float]) -> Callable[[FloatFormat], float]:
    return lambda fmt: -bound(fmt)


def within(bound: float | Callable[[FloatFormat], float], shape: tuple[int, ...] | int | None = None) -> Operand:
    return Operand(minus(bound) if callable(bound) else -bound, bound, shape)


def shaped(*shapes_: tuple[int, ...], bound: Callable[[FloatFormat], float] | None = None) -> tuple[Operand, ...]:
    return tuple(Operand(shape=shape) if bound is None else within(bound, shape) for shape in shapes_)


def alike(function: Callable[..., Any], *operands: Operand) -> Case:
    return Case(function, operands, alike=True)


def along(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function along the last dimension."""
    return lambda x: function(x, dim=-1, **options)


def _named(space: Any, names: str, *operands: Operand, prefix: str = "") -> dict[str, Case]:
    return {prefix + name: Case(getattr(space, name), operands or (Operand(),)) for name in names.split()}


def _along(names: str, *operands: Operand) -> dict[str, Case]:
    return {name: Case(along(getattr(torch, name)), operands or (Operand(),)) for name in names.split()}


UNARY = {
    **_named(
        torch,
        "abs asinh atan ceil cos deg2rad erf erfc floor frac neg round sigmoid sign sin sinc tan tanh trunc nan_to_num",
    ),
    **_named(torch, "acos asin atanh erfinv", within(1.0)),
    **_named(torch, "log log10 log1p log2 rsqrt sqrt", Operand(0.0)),
    **_named(torch, "exp expm1", Operand(None, logarithm())),
    **_named(torch, "sinh cosh", within(logarithm(0.68))),
    **_named(torch, "digamma reciprocal", Operand(normal)),
    "exp2": Case(torch.exp2, (Operand(None, logarithm(base=2.0)),)),
    "i0": Case(torch.i0, (within(logarithm(1.5)),)),
    "digamma of negatives": Case(torch.digamma, (Operand(-100.0, minus(normal)),)),
    "lgamma": Case(torch.lgamma, (within(by_logarithm),)),
    "rad2deg": Case(torch.rad2deg, (within(share(64)),)),
    "square": Case(torch.square, (within(root()),)),
    "acosh": Case(torch.acosh, (Operand(1.0),)),
    "logit": Case(torch.logit, (Operand(0.0, 1.0),)),
    "x ** 2": Case(lambda x: x**2, (within(root()),)),
    "x ** 3": Case(lambda x: x**3, (within(root(3)),)),
    "x ** 0.5": Case(lambda x: x**0.5, (Operand(0.0),)),
    "clamp(-1, 1)": Case(lambda x: x.clamp(-1, 1)),
    **_named(torch.special, "i0e i1e log_ndtr ndtr expit bessel_j0 bessel_j1 airy_ai", prefix="special."),
    "special.entr": Case(torch.special.entr, (Operand(0.0, by_logarithm),)),
    "special.erfcx": Case(torch.special.erfcx, (Operand(lambda fmt: -(math.log(fmt.max / 2) ** 0.5)),)),
    "special.i1": Case(torch.special.i1, (within(logarithm(1.5)),)),
    "special.ndtri": Case(torch.special.ndtri, (Operand(0.0, 1.0),)),
}

ACTIVATIONS = {
    **_named(
        F,
        "relu elu celu gelu silu mish softplus softsign hardtanh hardswish hardsigmoid leaky_relu logsigmoid "
        "tanhshrink softshrink hardshrink relu6",
        prefix="F.",
    ),
    "F.selu": Case(F.selu, (within(share(2)),)),
    "F.gelu(approximate='tanh')": Case(lambda x: F.gelu(x, approximate="tanh")),
    "F.glu": Case(F.glu, shaped((3, 4))),
    "F.softmax": Case(along(F.softmax)),
    "F.softmin": Case(along(F.softmin)),
    "F.log_softmax": Case(along(F.log_softmax), (within(share(4)),)),
    "softmax in float32": Case(lambda x: x.float().softmax(-1).to(x.dtype)),
    "softmax behind a mask of -inf": Case(lambda x: x.masked_fill(x > 0, -math.inf).softmax(-1)),
    "softmax behind a mask of finfo.min": Case(lambda x: x.masked_fill(x > 0, torch.finfo(x.dtype).min).softmax(-1)),
}


def _batch_norm_eval(x: Tensor) -> Tensor:
    mean, var = (torch.full(x.shape[1:2], value, dtype=x.dtype) for value in (1.0, 2.0))
    return F.batch_norm(x, mean, var)


NORMS = {
    "F.layer_norm": Case(lambda x: F.layer_norm(x, x.shape[-1:])),
    "F.rms_norm(eps=1e-5)": Case(lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5)),
    "F.group_norm": Case(lambda x: F.group_norm(x, 2), shaped((2, 4, 3))),
    "F.instance_norm": Case(F.instance_norm, shaped((2, 4, 3))),
    "F.batch_norm, training": Case(lambda x: F.batch_norm(x, None, None, training=True), shaped((4, 3))),
    "F.batch_norm, evaluation": Case(_batch_norm_eval, shaped((4, 3), bound=share(2))),
    "F.normalize": Case(F.normalize, (Operand(shape=2),)),
    "renorm": Case(lambda x: torch.renorm(x, 2, 0, 1.0), shaped((3, 4))),
}

REDUCTIONS = {
    **_along("mean logsumexp amax amin argmax argmin median logcumsumexp count_nonzero argsort sort cummax"),
    **_along("sum cumsum", within(share(8))),
    **_along("prod cumprod", within(root(8))),
    **_along("var", within(root(of=2))),
    **_along("std std_mean", within(share(2))),
    "var(correction=0)": Case(along(torch.var, correction=0), (within(root(of=2)),)),
    "norm": Case(along(torch.norm), (within(share(4)),)),
    "linalg.vector_norm": Case(torch.linalg.vector_norm, (within(share(32)),)),
    "sum of all": Case(torch.sum, (within(share(512)),)),
    "mean of all": Case(torch.mean),
    "diff": Case(torch.diff, (within(share(2)),)),
    "flip": Case(lambda x: torch.flip(x, (0,))),
    "topk": Case(lambda x: x.topk(2).values, shaped((5,))),
    "trapezoid": Case(torch.trapezoid, (within(share(8)),)),
}

_ANY = Operand()
BINARY = {
    **{
        name: alike(getattr(torch, name), _ANY, _ANY)
        for name in "atan2 fmod remainder maximum minimum logaddexp logaddexp2 lt eq copysign".split()
    },
    **{name: alike(getattr(torch, name), *[within(share(2))] * 2) for name in "add sub hypot".split()},
    **{
        name: alike(getattr(torch, name), within(root()), Operand(one_over(root()), root()))
        for name in "div floor_divide".split()
    },
    "mul": alike(torch.mul, *[within(root())] * 2),
    "xlogy": alike(torch.xlogy, within(by_logarithm), Operand(0.0)),
    "ldexp": alike(torch.ldexp, within(0.25), Operand(-24.0, logarithm(1.0, base=2.0))),
    "pow": alike(torch.pow, Operand(one_over(root(4)), root(4)), within(4.0)),
    "lerp(weight=0.3)": alike(lambda a, b: torch.lerp(a, b, 0.3), _ANY, _ANY),
    "where": alike(lambda a, b: torch.where(a > b, a, b), _ANY, _ANY),
    "addcmul": alike(torch.addcmul, within(share(2)), *[within(root(of=2))] * 2),
    "addcdiv": alike(torch.addcdiv, within(share(2)), within(root(of=2)), Operand(one_over(root()), root())),
    "F.cosine_similarity": alike(lambda a, b: F.cosine_similarity(a, b, dim=-1), _ANY, _ANY),
    "F.pairwise_distance": Case(F.pairwise_distance, shaped((3, 4), (3, 4), bound=share(8))),
    "cdist": Case(torch.cdist, shaped((3, 4), (2, 4), bound=share(8))),
    "linalg.cross": Case(torch.linalg.cross, shaped((2, 3), (2, 3), bound=root(of=2))),
}

_PRODUCT = root(of=4)
"""Products of up to 16 of such factors fit."""

PRODUCTS = {
    "mm": Case(torch.mm, shaped((3, 5), (5, 2), bound=_PRODUCT)),
    "bmm": Case(torch.bmm, shaped((2, 3, 5), (2, 5, 2), bound=_PRODUCT)),
    "baddbmm": Case(torch.baddbmm, shaped((2, 3, 2), (2, 3, 5), (2, 5, 2), bound=_PRODUCT)),
    "dot": Case(torch.dot, shaped((6,), (6,), bound=_PRODUCT)),
    "outer": Case(torch.outer, shaped((3,), (4,), bound=root())),
    "einsum('ij,kj->ik')": Case(lambda a, b: torch.einsum("ij,kj->ik", a, b), shaped((3, 5), (2, 5), bound=_PRODUCT)),
    "F.linear": Case(F.linear, shaped((3, 5), (2, 5), (2,), bound=_PRODUCT)),
    "F.conv1d": Case(F.conv1d, shaped((1, 2, 7), (3, 2, 3), bound=_PRODUCT)),
    "F.conv2d": Case(F.conv2d, shaped((1, 2, 5, 5), (3, 2, 3, 3), bound=root(of=8))),
    "F.conv_transpose1d": Case(F.conv_transpose1d, shaped((1, 2, 7), (2, 3, 3), bound=_PRODUCT)),
    "attention": Case(F.scaled_dot_product_attention, shaped(*[(1, 2, 4, 8)] * 3)),
    "attention within 50": Case(F.scaled_dot_product_attention, (within(50.0, (1, 2, 4, 8)),) * 3),
    "causal attention within 50": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (within(50.0, (1, 2, 4, 8)),) * 3
    ),
}

_LOGITS, _CLASS = within(share(4), (3, 4)), Operand(0, 3, (3,), integer=True)
LOSSES = {
    "F.mse_loss": alike(F.mse_loss, *[within(root(of=2))] * 2),
    **{
        f"F.{name}": alike(getattr(F, name), *[within(share(2))] * 2)
        for name in "l1_loss smooth_l1_loss huber_loss".split()
    },
    "F.soft_margin_loss": alike(F.soft_margin_loss, *[within(root())] * 2),
    "F.binary_cross_entropy": Case(F.binary_cross_entropy, (Operand(0.0, 1.0, (5,)),) * 2),
    "F.binary_cross_entropy_with_logits": Case(
        F.binary_cross_entropy_with_logits, (Operand(shape=(5,)), Operand(0.0, 1.0, (5,)))
    ),
    "F.kl_div of softmaxes": Case(
        lambda a, b: F.kl_div(F.log_softmax(a, -1), F.softmax(b, -1), reduction="batchmean"), (_LOGITS, _LOGITS)
    ),
    "F.cross_entropy": Case(F.cross_entropy, (_LOGITS, _CLASS)),
    "F.nll_loss of log_softmax": Case(lambda x, t: F.nll_loss(F.log_softmax(x, -1), t), (_LOGITS, _CLASS)),
    "F.poisson_nll_loss": Case(F.poisson_nll_loss, (within(10.0, (5,)), Operand(0.0, 100.0, (5,)))),
    "F.gaussian_nll_loss": Case(
        F.gaussian_nll_loss, (*shaped((5,), (5,), bound=root(of=4)), Operand(1.0, 100.0, (5,)))
    ),
    "F.triplet_margin_loss": Case(F.triplet_margin_loss, shaped(*[(3, 4)] * 3, bound=share(8))),
    "F.hinge_embedding_loss": Case(lambda x: F.hinge_embedding_loss(x, torch.ones_like(x))),
}

PLACES = {
    "F.avg_pool1d": Case(lambda x: F.avg_pool1d(x, 2), shaped((1, 2, 6))),
    "F.max_pool1d": Case(lambda x: F.max_pool1d(x, 2), shaped((1, 2, 6))),
    "F.adaptive_avg_pool2d": Case(lambda x: F.adaptive_avg_pool2d(x, 1), shaped((1, 2, 3, 3))),
    "F.lp_pool1d": Case(lambda x: F.lp_pool1d(x, 2, 2), (Operand(0.0, share(2), (1, 2, 6)),)),
    "F.interpolate(mode='bilinear')": Case(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), shaped((1, 2, 3, 3))
    ),
    "F.interpolate(mode='bicubic')": Case(
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), shaped((1, 2, 3, 3), bound=share(2))
    ),
    "F.grid_sample": Case(
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        (Operand(shape=(1, 2, 3, 3)), within(1.0, (1, 2, 2, 2))),
    ),
    "F.embedding": Case(F.embedding, (Operand(0, 4, (3,), integer=True), Operand(shape=(5, 3)))),
}

CASES: dict[str, Case] = {
    **UNARY, **ACTIVATIONS, **NORMS, **REDUCTIONS, **BINARY, **PRODUCTS, **LOSSES, **PLACES
}  # fmt: skip
