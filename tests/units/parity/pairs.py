"""Pairs of implementations, and what a comparison has to say of each: the outcome, and what its message names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ampcheck.records.parity import AGREE, ANOTHER, UNDECIDED, WRONG

Make = Callable[[], "tuple[Any, Any, tuple[torch.Tensor, ...]]"]
BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Pair:
    make: Make
    outcome: str
    names: str


PAIRS: dict[str, Pair] = {}


def pair(outcome: str, names: str = "") -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        PAIRS[make.__name__] = Pair(make, outcome, names)
        return make

    return register


def draw(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


# Norms ----------------------------------------------------------------------------------------------------------------


def rms_norm(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


NORM = (draw(8, 192), draw(192, seed=1))


@pair(AGREE)
def rms_norm_of_torch() -> Any:
    return rms_norm, lambda x, w: F.rms_norm(x, (192,), w, 1e-6), NORM


@pair(AGREE)
def rms_norm_by_a_division() -> Any:
    def divided(x: Any, w: Any) -> Any:
        wide = x.float()
        return (wide / (wide.pow(2).sum(-1, keepdim=True) / 192 + 1e-6).sqrt() * w.float()).to(x.dtype)

    return rms_norm, divided, NORM


@pair(ANOTHER, "aten::add")
def rms_norm_with_another_eps() -> Any:
    return rms_norm, lambda x, w: rms_norm(x, w, 1.1e-6), NORM


@pair(ANOTHER, "aten::add")
def rms_norm_of_one_plus_weight() -> Any:
    return rms_norm, lambda x, w: rms_norm(x, 1 + w), NORM


@pair(ANOTHER, "aten::mul")
def rms_norm_scaled_by_a_ten_millionth() -> Any:
    return rms_norm, lambda x, w: rms_norm(x, w) * (1 + 1e-7), NORM


@pair(WRONG, "b is beyond")
def layer_norm_by_moments() -> Any:
    def moments(x: Any) -> Any:
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * ((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5).rsqrt()

    return lambda x: F.layer_norm(x, (192,)), moments, (draw(8, 192) + 40,)


@pair(WRONG, "b is beyond")
def float32_layer_norm_by_moments() -> Any:
    def moments(x: Any) -> Any:
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * ((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5).rsqrt()

    return lambda x: F.layer_norm(x, (192,)), moments, (draw(8, 192, dtype=torch.float32) + 300,)


@pair(AGREE)
def layer_norm_in_two_passes() -> Any:
    def passes(x: Any) -> Any:
        wide = x.float()
        away = wide - wide.mean(-1, keepdim=True)
        return (away * (away.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)

    return lambda x: F.layer_norm(x, (192,)), passes, (draw(8, 192) + 40,)


@pair(ANOTHER, "aten::var")
def variance_over_one_less() -> Any:
    return lambda x: x.float().var(-1, correction=0), lambda x: x.float().var(-1), (draw(6, 2048),)


@pair(ANOTHER, "native_batch_norm")
def batch_norm_in_evaluation() -> Any:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16)
    return lambda x: norm.train()(x), lambda x: norm.eval()(x), (draw(32, 16, dtype=torch.float32),)


# Attention ------------------------------------------------------------------------------------------------------------


def attention(q: Any, k: Any, v: Any, *, ahead: int | None = None, scale: float | None = None) -> Any:
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if ahead is not None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(ahead)
        scores = scores.masked_fill(future, -math.inf)
    return scores.float().softmax(-1).to(q.dtype) @ v


QKV = (draw(2, 4, 48, 32), draw(2, 4, 48, 32, seed=1), draw(2, 4, 48, 32, seed=2))
GROUPED = (draw(2, 8, 32, 16), draw(2, 2, 32, 16, seed=1), draw(2, 2, 32, 16, seed=2))


@pair(AGREE)
def attention_and_sdpa() -> Any:
    return lambda *t: attention(*t, ahead=1), lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), QKV


@pair(ANOTHER, "aten::mul")
def attention_with_another_scale() -> Any:
    return attention, lambda *t: attention(*t, scale=128**-0.5), QKV


@pair(ANOTHER)
def attention_that_sees_the_next_token() -> Any:
    return lambda *t: attention(*t, ahead=1), lambda *t: attention(*t, ahead=2), QKV


@pair(AGREE)
def attention_in_blocks() -> Any:
    def blocks(q: Any, k: Any, v: Any, size: int = 16) -> Any:
        wide = q.float() * q.shape[-1] ** -0.5
        largest, total, out = torch.full((*q.shape[:-1], 1), -1e30), torch.zeros(*q.shape[:-1], 1), torch.zeros(q.shape)
        for start in range(0, k.shape[2], size):
            scores = wide @ k[:, :, start : start + size].float().mT
            peak = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - peak).exp(), (largest - peak).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            out = out * shrink + weights @ v[:, :, start : start + size].float()
            largest = peak
        return (out / total).to(v.dtype)

    return attention, blocks, QKV


@pair(AGREE)
def grouped_heads_repeated_and_expanded() -> Any:
    def expanded(q: Any, k: Any, v: Any) -> Any:
        batch, heads, tokens, width = q.shape
        out = attention(q.view(batch, 2, heads // 2, tokens, width), k[:, :, None], v[:, :, None])
        return out.reshape(q.shape)

    def repeated(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))

    return repeated, expanded, GROUPED


@pair(ANOTHER)
def grouped_heads_in_tiles() -> Any:
    def heads(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))

    return heads, lambda q, k, v: attention(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1)), GROUPED


@pair(ANOTHER)
def softmax_over_queries() -> Any:
    def queries(q: Any, k: Any, v: Any) -> Any:
        return (q @ k.mT * q.shape[-1] ** -0.5).float().softmax(-2).to(q.dtype) @ v

    return attention, queries, QKV


@pair(AGREE)
def decoding_with_a_cache() -> Any:
    projections = [draw(48, 48, seed=s, scale=0.14) for s in (3, 4, 5)]

    def full(x: Any) -> Any:
        return attention(*((x @ p)[:, None] for p in projections), ahead=1)[:, 0]

    def cached(x: Any) -> Any:
        keys, values, out = x.new_zeros(x.shape), x.new_zeros(x.shape), []
        for i in range(x.shape[1]):
            q, keys[:, i], values[:, i] = (x[:, i] @ p for p in projections)
            out.append(attention(q[:, None, None], keys[:, None, : i + 1], values[:, None, : i + 1])[:, 0])
        return torch.cat(out, 1)

    return full, cached, (draw(2, 10, 48),)


# Positions ------------------------------------------------------------------------------------------------------------


def angles(tokens: int, width: int, base: float = 10000.0) -> torch.Tensor:
    return torch.outer(torch.arange(tokens).float(), base ** -(torch.arange(0, width, 2).float() / width))


def rotated(x: Any, base: float = 10000.0) -> Any:
    turn = torch.cat([angles(x.shape[-2], x.shape[-1], base)] * 2, -1)
    first, second = x.float().chunk(2, -1)
    return (x.float() * turn.cos() + torch.cat([-second, first], -1) * turn.sin()).to(x.dtype)


TOKENS = (draw(2, 4, 64, 32),)


@pair(AGREE)
def rotary_by_complex_numbers() -> Any:
    def turned(x: Any) -> Any:
        turn = angles(x.shape[-2], x.shape[-1])
        out = torch.complex(*x.float().chunk(2, -1)) * torch.polar(torch.ones_like(turn), turn)
        return torch.cat([out.real, out.imag], -1).to(x.dtype)

    return rotated, turned, TOKENS


@pair(ANOTHER, "aten::pow")
def rotary_of_another_base() -> Any:
    return rotated, lambda x: rotated(x, 10005.0), TOKENS


@pair(AGREE, "")
def rotary_with_a_table_in_float32() -> Any:
    cos, sin = (torch.cat([f(angles(64, 32))] * 2, -1) for f in (torch.cos, torch.sin))

    def looked_up(x: Any) -> Any:
        first, second = x.float().chunk(2, -1)
        return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)

    return rotated, looked_up, TOKENS


@pair(WRONG, "b is beyond")
def rotary_angles_in_bfloat16() -> Any:
    def coarse(x: Any) -> Any:
        turn = torch.cat([angles(x.shape[-2], x.shape[-1]).to(BF16)] * 2, -1)
        first, second = x.chunk(2, -1)
        return x * turn.cos() + torch.cat([-second, first], -1) * turn.sin()

    return rotated, coarse, (draw(1, 2, 700, 32),)


# Losses, layers, embeddings -------------------------------------------------------------------------------------------

CLASSES = torch.randint(0, 300, (32,), generator=torch.Generator().manual_seed(0))
LOGITS = (draw(32, 300, scale=3),)


@pair(AGREE)
def cross_entropy_by_logsumexp() -> Any:
    def by_hand(x: Any) -> Any:
        wide = x.float()
        return (wide.logsumexp(-1) - wide.gather(1, CLASSES[:, None])[:, 0]).mean()

    return lambda x: F.cross_entropy(x.float(), CLASSES), by_hand, LOGITS


@pair(ANOTHER)
def cross_entropy_with_smoothing() -> Any:
    smoothed = lambda x: F.cross_entropy(x.float(), CLASSES, label_smoothing=1e-4)  # noqa: E731
    return lambda x: F.cross_entropy(x.float(), CLASSES), smoothed, LOGITS


@pair(ANOTHER)
def softmax_at_another_temperature() -> Any:
    return lambda x: x.float().softmax(-1), lambda x: (x.float() / 1.001).softmax(-1), LOGITS


@pair(WRONG, "b is beyond")
def log_of_a_softmax_in_float16() -> Any:
    return (
        lambda x: x.float().log_softmax(-1),
        lambda x: x.softmax(-1).float().log(),
        (draw(8, 64, scale=8, dtype=F16),),
    )


@pair(WRONG, "became inf or NaN")
def squares_that_overflow() -> Any:
    def norm(x: Any) -> Any:
        return x * (x * x).mean(-1, keepdim=True).rsqrt()

    wide = lambda x: (x.float() * x.float().square().mean(-1, keepdim=True).rsqrt()).half()  # noqa: E731
    return wide, norm, (draw(4, 64, scale=400, dtype=F16),)


@pair(WRONG, "b is beyond")
def sum_of_many_in_bfloat16() -> Any:
    def loop(x: Any) -> Any:
        total = torch.zeros(x.shape[1], dtype=BF16)
        for row in x:
            total = total + row
        return total

    return lambda x: x.float().sum(0).to(BF16), loop, (draw(600, 16).abs(),)


@pair(ANOTHER, "gelu")
def gelu_by_tanh() -> Any:
    return F.gelu, lambda x: F.gelu(x, approximate="tanh"), (draw(64, 32),)


@pair(ANOTHER)
def gate_and_value_exchanged() -> Any:
    weight = draw(48, 96, seed=1, scale=0.14)

    def gated(x: Any, order: int = 1) -> Any:
        gate, value = (x @ weight).chunk(2, -1)[::order]
        return F.silu(gate) * value

    return gated, lambda x: gated(x, -1), (draw(16, 48),)


@pair(AGREE)
def three_projections_fused() -> Any:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(32, 32, dtype=BF16) for _ in range(3))

        def forward(self, x: Any) -> Any:
            return attention(*(part(x)[:, None] for part in self.parts))

    class One(nn.Module):
        def __init__(self, three: Three) -> None:
            super().__init__()
            self.whole = nn.Linear(32, 96, dtype=BF16)
            states = [part.state_dict() for part in three.parts]
            self.whole.load_state_dict({name: torch.cat([s[name] for s in states]) for name in states[0]})

        def forward(self, x: Any) -> Any:
            return attention(*(t[:, None] for t in self.whole(x).chunk(3, -1)))

    torch.manual_seed(0)
    three = Three()
    return three, One(three), (draw(2, 12, 32),)


@pair(AGREE)
def convolution_by_unfolding() -> Any:
    weight = draw(8, 4, 3, 3, seed=1)
    unfolded = lambda x: (weight.view(8, -1) @ F.unfold(x, 3)).view(2, 8, 10, 10)  # noqa: E731
    return lambda x: F.conv2d(x, weight), unfolded, (draw(2, 4, 12, 12),)


@pair(AGREE)
def embedding_by_one_hot_rows() -> Any:
    ids = torch.randint(0, 40, (4, 7), generator=torch.Generator().manual_seed(0))
    return lambda w: F.embedding(ids, w), lambda w: F.one_hot(ids, 40).to(w.dtype) @ w, (draw(40, 24),)


@pair(AGREE)
def relu_near_its_kink() -> Any:
    weight, bias = draw(96, 96, seed=1, scale=0.1), draw(96, seed=2)
    wide = lambda x: F.relu(x.float() @ weight.float() + bias.float()).to(BF16) @ weight  # noqa: E731
    return lambda x: F.relu(x @ weight + bias) @ weight, wide, (draw(256, 96),)


@pair(ANOTHER, "only a gives gradient parameter weight")
def weight_that_is_detached() -> Any:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    return layer, lambda x: F.linear(x, layer.weight.detach(), layer.bias), (draw(4, 8, dtype=torch.float32),)


@pair(AGREE)
def equal_values_sorted_in_another_order() -> Any:
    return lambda x: x.sort(-1, descending=True)[0][..., :5], lambda x: x.topk(5, -1)[0], (draw(64, 50),)


@pair(ANOTHER, "gradient")
def gradient_that_is_stopped() -> Any:
    return lambda x: x * x.sigmoid(), lambda x: x * x.detach().sigmoid(), (draw(8, 64),)


@pair(ANOTHER, "written argument 0")
def cache_written_one_place_off() -> Any:
    def write(place: int) -> Callable[..., Any]:
        def step(cache: Any, new: Any) -> Any:
            cache.data.narrow(1, place, 1).copy_(new)
            return new * 2

        return step

    return write(3), write(4), (torch.zeros(2, 8, 16, dtype=BF16), draw(2, 1, 16))


@pair(ANOTHER, "only b gives")
def another_output() -> Any:
    return lambda x: {"y": x.exp()}, lambda x: {"y": x.exp(), "z": x}, (draw(4, 8),)


@pair(UNDECIDED, "zero")
def zeros() -> Any:
    return F.relu, lambda x: 2 * F.relu(x), (-draw(8, 16).abs(),)


@pair(UNDECIDED, "make both from the same numbers")
def norm_folded_into_a_weight_of_16_bits() -> Any:
    weight, scale = draw(48, 48, seed=1, scale=0.14), draw(48, seed=2)
    folded = (scale.float()[:, None] * weight.float()).to(BF16)
    return lambda x: (x * scale) @ weight, lambda x: x @ folded, (draw(16, 48),)


# Experts --------------------------------------------------------------------------------------------------------------

GATE, EXPERTS = draw(32, 8, seed=7, scale=0.2), draw(8, 32, 16, seed=8, scale=0.2)


def routed(x: Any, *, wide: bool = False, normal: bool = True) -> Any:
    logits = x.float() @ GATE.float() if wide else (x @ GATE).float()
    weights, chosen = logits.softmax(-1).topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True) if normal else weights
    return torch.einsum("tk,tkd->td", weights.to(x.dtype), torch.einsum("td,tkde->tke", x, EXPERTS[chosen]))


@pair(AGREE)
def experts_one_by_one() -> Any:
    def one_by_one(x: Any) -> Any:
        weights, chosen = (x @ GATE).float().softmax(-1).topk(2, -1)
        weights, out = weights / weights.sum(-1, keepdim=True), torch.zeros(len(x), 16)
        for expert in range(8):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, token, weights[token, place, None] * (x[token] @ EXPERTS[expert]).float())
        return out.to(x.dtype)

    return routed, one_by_one, (draw(64, 32),)


@pair(AGREE, "")
def experts_near_a_tie() -> Any:
    return routed, lambda x: routed(x, wide=True), (draw(1024, 32),)


@pair(ANOTHER)
def experts_whose_weights_are_not_normal() -> Any:
    return routed, lambda x: routed(x, normal=False), (draw(64, 32),)


# Kernels inside -------------------------------------------------------------------------------------------------------


def kernel(name: str, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A custom op for 16 bits alone, whose inside is not seen."""

    @torch.library.custom_op(f"ampcheck_pairs::{name}", mutates_args=())
    def op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.dtype.itemsize != 2:
            raise RuntimeError("this kernel takes 16 bits alone")
        return compute(x, y)

    return op


def _blocks(x: torch.Tensor, y: torch.Tensor, left_out: int = 0) -> torch.Tensor:
    total = torch.zeros(x.shape[0], y.shape[1])
    for i in range(0, x.shape[1] - left_out, 32):
        total += x[:, i : i + 32].float() @ y[i : i + 32].float()
    return total.to(x.dtype)


BLOCKS = kernel("blocks", _blocks)
DROPPED = kernel("dropped", lambda x, y: _blocks(x, y, left_out=32))
LAYER = (draw(16, 128), draw(128, 128, seed=1, scale=0.09))


def _layer(product: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: F.silu(product(F.layer_norm(x, (128,)), w)) @ w.t()


@pair(AGREE)
def kernel_inside_a_layer() -> Any:
    return _layer(BLOCKS), _layer(torch.matmul), LAYER


@pair(WRONG, "ampcheck_pairs::dropped")
def kernel_that_drops_a_block() -> Any:
    return _layer(DROPPED), _layer(torch.matmul), LAYER


@pair(ANOTHER, "is given is no value of the other side")
def factor_before_a_kernel() -> Any:
    def scaled(x: Any, w: Any) -> Any:
        return BLOCKS(F.layer_norm(x, (128,)) * 1.01, w)

    return scaled, lambda x, w: F.layer_norm(x, (128,)) @ w, LAYER


@pair(ANOTHER)
def kernel_that_is_right_in_another_function() -> Any:
    return _layer(BLOCKS), lambda x, w: 2 * _layer(torch.matmul)(x, w), LAYER


@pair(ANOTHER, "aten::gelu")
def another_gelu_beside_a_weight_that_one_side_does_not_use() -> Any:
    class Layer(nn.Module):
        def __init__(self, *, pooled: bool) -> None:
            super().__init__()
            self.pooled, self.norm = pooled, nn.LayerNorm(48, dtype=BF16)
            nn.init.normal_(self.norm.bias, generator=torch.Generator().manual_seed(3))

        def forward(self, x: Any) -> Any:
            if not self.pooled:
                return F.gelu(x)
            out = F.gelu(x, approximate="tanh")
            self.norm(out)  # of which the result is not returned
            return out

    return Layer(pooled=True), Layer(pooled=False), (draw(16, 48),)
