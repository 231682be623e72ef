"""Pairs of the kinds that users have: each honest one with a planted twin, registered beside the others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from parity.pairs import BF16, BLOCKS, CLASSES, LOGITS, angles, draw, pair, rotated
from torch import nn

from ampcheck.records.parity import AGREE, ANOTHER, UNDECIDED

FLOAT = torch.float32

# The same weights in another format -----------------------------------------------------------------------------------


def layers(eps: float = 1e-5, gelu: str = "none") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32, eps=eps), nn.GELU(gelu), nn.Linear(32, 8))


class In(nn.Module):
    """A model in a format of its own."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model.to(dtype), dtype

    def forward(self, x: Any) -> Any:
        return self.model(x.to(self.dtype)).float()


X = (draw(6, 16, dtype=FLOAT),)


@pair(AGREE)
def bfloat16_and_its_weights_in_float32() -> Any:
    model = layers().to(BF16)
    return In(model, BF16), In(copy.deepcopy(model), FLOAT), X


@pair(AGREE)
def bfloat16_and_float32() -> Any:
    return In(layers(), BF16), In(layers(), FLOAT), X


@pair(AGREE)
def bfloat16_and_float16() -> Any:
    return In(layers(), BF16), In(layers(), torch.float16), X


@pair(ANOTHER, "native_layer_norm")
def bfloat16_and_float32_with_another_eps() -> Any:
    return In(layers(), BF16), In(layers(eps=2e-5), FLOAT), X


@pair(ANOTHER, "then b runs forward, model.2, aten::gelu")
def bfloat16_and_float32_with_another_gelu() -> Any:
    return In(layers(), BF16), In(layers(gelu="tanh"), FLOAT), X


@pair(ANOTHER, "model.3, aten::addmm")
def bfloat16_and_float32_with_one_wrong_weight() -> Any:
    wrong = layers()
    with torch.no_grad():
        wrong[3].weight[0, 0] *= 1.05
    return In(layers(), BF16), In(wrong, FLOAT), X


class Gated(nn.Module):
    """A gated layer of two projections, or of one of both."""

    def __init__(self, *, fused: bool, swapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Linear(16, 24, bias=False) for _ in range(2)]
        self.last = nn.Linear(24, 16, bias=False)
        self.parts = nn.ModuleList(parts[::-1] if swapped else parts)
        if fused:
            self.parts = nn.ModuleList([nn.Linear(16, 48, bias=False)])
            self.parts[0].weight.data = torch.cat([part.weight.detach() for part in parts])

    def forward(self, x: Any) -> Any:
        gate, value = torch.cat([part(x) for part in self.parts], -1).chunk(2, -1)
        return self.last(F.silu(gate) * value)


@pair(AGREE)
def fused_in_bfloat16_and_two_in_float32() -> Any:
    return In(Gated(fused=True), BF16), In(Gated(fused=False), FLOAT), X


@pair(AGREE)
def two_in_bfloat16_and_fused_in_float32() -> Any:
    return In(Gated(fused=False), BF16), In(Gated(fused=True), FLOAT), X


@pair(ANOTHER, "aten::silu")
def fused_in_bfloat16_and_two_in_float32_that_are_swapped() -> Any:
    return In(Gated(fused=True), BF16), In(Gated(fused=False, swapped=True), FLOAT), X


TABLE = angles(9, 16).cos()


@pair(AGREE)
def table_in_float32() -> Any:
    return lambda x: x * angles(9, 16).cos(), lambda x: x * TABLE, (draw(2, 9, 8),)


@pair(ANOTHER, "aten::mul")
def factor_beside_a_table_in_float32() -> Any:
    return lambda x: x * angles(9, 16).cos(), lambda x: x * TABLE * (1 + 2e-6), (draw(2, 9, 8),)


# Folded and merged weights --------------------------------------------------------------------------------------------


def convolution_and_norm() -> tuple[Any, Any]:
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(8)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    nn.init.normal_(norm.weight)
    return nn.Conv2d(3, 8, 3).eval(), norm.eval()


def folded(eps: float) -> Any:
    convolution, norm = convolution_and_norm()
    scale = norm.weight / (norm.running_var + eps).sqrt()
    one = nn.Conv2d(3, 8, 3)
    one.weight.data = (convolution.weight * scale[:, None, None, None]).detach()
    one.bias.data = ((convolution.bias - norm.running_mean) * scale + norm.bias).detach()
    return one


PICTURE = (draw(2, 3, 9, 9, dtype=FLOAT),)


@pair(AGREE)
def norm_folded_into_a_convolution() -> Any:
    return nn.Sequential(*convolution_and_norm()), folded(1e-5), PICTURE


@pair(ANOTHER, "aten::convolution")
def norm_folded_without_its_eps() -> Any:
    return nn.Sequential(*convolution_and_norm()), folded(0.0), PICTURE


def adapted(scale: float, dtype: torch.dtype) -> Any:
    weight, down, up = (draw(*shape, seed=1, scale=0.25, dtype=dtype) for shape in ((16, 16), (4, 16), (16, 4)))
    merged = (weight.float() + scale * (up.float() @ down.float())).to(dtype)
    return lambda x: x @ weight.T + 2 * (x @ down.T) @ up.T, lambda x: x @ merged.T


@pair(AGREE)
def adapter_merged() -> Any:
    return *adapted(2.0, FLOAT), X


@pair(ANOTHER)
def adapter_merged_with_another_scale() -> Any:
    return *adapted(2.001, FLOAT), X


@pair(UNDECIDED, "make both from the same numbers")
def adapter_merged_in_bfloat16() -> Any:
    return *adapted(2.0, BF16), (draw(6, 16),)


# Positions, masks, caches ---------------------------------------------------------------------------------------------


def interleaved(x: Any) -> Any:
    turn = angles(x.shape[-2], x.shape[-1])
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    turned = first * turn.cos() - second * turn.sin(), first * turn.sin() + second * turn.cos()
    return torch.stack(turned, -1).flatten(-2).to(x.dtype)


WEIGHT = draw(16, 16, seed=3, scale=0.25)
ORDER = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])


@pair(AGREE)
def rotary_of_permuted_weights() -> Any:
    permuted = WEIGHT[ORDER].clone()
    return (
        lambda x: interleaved(x @ WEIGHT.T),
        lambda x: rotated(x @ permuted.T)[..., ORDER.argsort()],
        (draw(2, 9, 16),),
    )


@pair(ANOTHER)
def rotary_of_weights_that_are_not_permuted() -> Any:
    return lambda x: interleaved(x @ WEIGHT.T), lambda x: rotated(x @ WEIGHT.T), (draw(2, 9, 16),)


HEADS = tuple(draw(2, 4, 9, 8, seed=s) for s in range(3))
REAL = torch.arange(9) < torch.tensor([[9], [6]])


def masked(q: Any, k: Any, v: Any, mask: Any) -> Any:
    added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    return ((q @ k.mT) * 8**-0.5 + added).float().softmax(-1).to(q.dtype) @ v


@pair(AGREE)
def mask_of_padding_added_and_of_bools() -> Any:
    mask = torch.ones(9, 9, dtype=torch.bool).tril() & REAL[:, None, None]
    return lambda *t: F.scaled_dot_product_attention(*t, attn_mask=mask), lambda *t: masked(*t, mask), HEADS


@pair(ANOTHER)
def mask_that_forgets_the_padding() -> Any:
    mask = torch.ones(9, 9, dtype=torch.bool).tril() & REAL[:, None, None]
    return lambda *t: masked(*t, mask), lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), HEADS


@pair(AGREE)
def convolution_of_the_past_by_shifts() -> Any:
    weight = draw(8, 1, 4, seed=1)

    def shifts(x: Any) -> Any:
        return sum(weight[:, 0, j, None] * F.pad(x, (3 - j, 0))[..., : x.shape[-1]] for j in range(4))

    return lambda x: F.conv1d(F.pad(x, (3, 0)), weight, groups=8), shifts, (draw(2, 8, 12),)


@pair(ANOTHER, "constant_pad_nd")
def convolution_that_sees_the_future() -> Any:
    weight = draw(8, 1, 4, seed=1)

    def padded(*width: int) -> Callable[..., Any]:
        return lambda x: F.conv1d(F.pad(x, width), weight, groups=8)

    return padded(3, 0), padded(2, 1), (draw(2, 8, 12),)


# Losses, optimizers, layers -------------------------------------------------------------------------------------------

SOME = CLASSES.masked_fill(torch.arange(32) % 5 == 0, -100)


def smoothed(x: Any, *, every: bool) -> Any:
    logs, known = x.float().log_softmax(-1), SOME != -100
    right = -logs.gather(1, SOME.clamp(min=0)[:, None])[:, 0]
    others = -logs.mean(-1) if every else (-logs.sum(-1) - right) / 299
    return ((0.9 * right + 0.1 * others) * known).sum() / known.sum()


@pair(AGREE)
def smoothed_loss_of_some_tokens() -> Any:
    return lambda x: F.cross_entropy(x.float(), SOME, label_smoothing=0.1), lambda x: smoothed(x, every=True), LOGITS


@pair(ANOTHER)
def smoothed_loss_of_the_other_classes() -> Any:
    return lambda x: F.cross_entropy(x.float(), SOME, label_smoothing=0.1), lambda x: smoothed(x, every=False), LOGITS


@pair(ANOTHER)
def mean_loss_over_ignored_tokens() -> Any:
    each = lambda x: F.cross_entropy(x.float(), SOME, reduction="none").mean()  # noqa: E731
    return lambda x: F.cross_entropy(x.float(), SOME), each, LOGITS


@torch.no_grad()
def adamw_by_hand(p: Any, gradient: Any, decay: float = 0.1, *, coupled: bool = False) -> Any:
    p, mean, square = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
    for step in (1, 2, 3):
        g = gradient * step + (decay * p if coupled else 0)
        p = p if coupled else p * (1 - 0.01 * decay)
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        p = p - 0.01 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
    return p


def adamw(p: Any, gradient: Any) -> Any:
    weight = nn.Parameter(p.detach().clone())
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)
    for step in (1, 2, 3):
        weight.grad = (gradient * step).detach()
        optimizer.step()
    return weight.detach()


STEP = (draw(20, dtype=FLOAT), draw(20, seed=1, dtype=FLOAT))


@pair(AGREE)
def optimizer_by_hand() -> Any:
    return adamw, adamw_by_hand, STEP


@pair(ANOTHER)
def optimizer_whose_decay_is_coupled() -> Any:
    return adamw, lambda p, g: adamw_by_hand(p, g, coupled=True), STEP


@pair(AGREE)
def group_norm_of_one_group() -> Any:
    return lambda x: F.group_norm(x, 1), lambda x: F.layer_norm(x, x.shape[1:]), (draw(3, 6, 4, 4),)


@pair(ANOTHER, "native_group_norm")
def group_norm_of_two_groups() -> Any:
    return lambda x: F.group_norm(x, 1), lambda x: F.group_norm(x, 2), (draw(3, 6, 4, 4),)


@pair(AGREE)
def samples_between_pixels() -> Any:
    def sampled(x: Any) -> Any:
        places = (torch.arange(8).float() * 2 + 1) / 8 - 1
        grid = torch.stack(torch.meshgrid(places, places, indexing="xy"), -1)[None].expand(len(x), -1, -1, -1)
        return F.grid_sample(x, grid, align_corners=False, padding_mode="border")

    wide = lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")  # noqa: E731
    return wide, sampled, (draw(2, 3, 4, 4, dtype=FLOAT),)


@pair(ANOTHER, "upsample_bilinear2d")
def corners_that_are_aligned() -> Any:
    def scaled(aligned: bool) -> Callable[..., Any]:
        return lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=aligned)

    return scaled(False), scaled(True), (draw(2, 3, 4, 4),)


@pair(AGREE)
def index_that_leaves_near_a_tie() -> Any:
    def largest(x: Any, dtype: torch.dtype) -> int:
        return int((x.to(dtype) @ x.to(dtype).T).float().sum(0).argmax())

    return lambda x: largest(x, BF16), lambda x: largest(x, FLOAT), (draw(64, 32),)


@pair(ANOTHER, "aten::mul")
def dropout_that_is_on() -> Any:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16).to(BF16)
    return nn.Sequential(layer, nn.Dropout(0.1)).train(), layer, (draw(8, 16),)


# Rows of few elements -------------------------------------------------------------------------------------------------

SMALL = draw(4, 4, seed=3)


def small(x: Any, scale: float = 1.0) -> Any:
    return ((F.silu(x @ SMALL) * scale) @ SMALL).tanh()


@pair(AGREE)
def short_rows_one_by_one() -> Any:
    return small, lambda x: torch.cat([small(row) for row in x.split(1)]), (draw(6, 4),)


@pair(ANOTHER, "then b runs forward, aten::mul")
def short_rows_one_by_one_with_a_factor() -> Any:
    return small, lambda x: torch.cat([small(row, 1.01) for row in x.split(1)]), (draw(6, 4),)


# 8 bits ---------------------------------------------------------------------------------------------------------------


def narrowed(x: Any) -> tuple[Any, Any]:
    scale = x.float().abs().amax() / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def narrow_product(x: Any, w: Any, multiply: Callable[..., Any], factor: float = 1.0) -> Any:
    (left, first), (right, second) = narrowed(x), narrowed(w)
    return (multiply(left, right).float() * (first * second * factor)).to(BF16)


def in_bfloat16(a: Any, b: Any) -> Any:
    return a.to(BF16) @ b.to(BF16).T


EIGHT = (draw(4, 1024).abs(), draw(4, 1024, seed=1).abs())


@pair(AGREE)
def product_of_8_bits() -> Any:
    plain = lambda x, w: narrow_product(x, w, lambda a, b: a.float() @ b.float().T)  # noqa: E731
    return plain, lambda x, w: narrow_product(x, w, in_bfloat16), EIGHT


@pair(ANOTHER, "aten::mul")
def product_of_8_bits_with_another_scale() -> Any:
    return (
        lambda x, w: narrow_product(x, w, in_bfloat16),
        lambda x, w: narrow_product(x, w, in_bfloat16, factor=math.sqrt(1.001)),
        EIGHT,
    )


def of_blocks(w: Any, *, transposed: bool = False) -> Any:
    """A product with weights of 8 bits, of which each of 4 x 4 blocks has a scale."""
    blocks = w.float().view(4, 32, 4, 32)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    return (codes.float() * (scale.transpose(0, 2) if transposed else scale)).view(128, 128).to(w.dtype)


BLOCKS_OF_EIGHT = (draw(4, 128), draw(128, 128, seed=1, scale=0.09))


@pair(AGREE)
def scales_of_blocks_of_8_bits() -> Any:
    return lambda x, w: x @ of_blocks(w), lambda x, w: F.linear(x, of_blocks(w).T), BLOCKS_OF_EIGHT


@pair(ANOTHER, "aten::mul")
def scales_of_blocks_that_are_transposed() -> Any:
    return lambda x, w: x @ of_blocks(w), lambda x, w: x @ of_blocks(w, transposed=True), BLOCKS_OF_EIGHT


def quantized(x: Any, scale: float) -> Any:
    return x + ((x / scale).round().clamp(-128, 127) * scale - x).detach()


@pair(AGREE)
def fake_quantization_by_hand() -> Any:
    per_row = lambda x: torch.fake_quantize_per_channel_affine(  # noqa: E731
        x, torch.full((6,), 0.0625), torch.zeros(6, dtype=torch.int32), 0, -128, 127
    )
    of_torch = lambda x: (torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127), per_row(x))  # noqa: E731
    return of_torch, lambda x: (quantized(x, 0.05), quantized(x, 0.0625)), X


@pair(ANOTHER, "fake_quantize_per_tensor_affine_cachemask")
def fake_quantization_with_another_scale() -> Any:
    of_torch = lambda x: torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)  # noqa: E731
    return of_torch, lambda x: quantized(x, 0.050001), X


REAL_TOKENS = REAL.float()


@pair(AGREE)
def mask_that_only_one_side_differentiates() -> Any:
    def chosen(x: Any, mask: Any) -> Any:
        return torch.where(mask[..., None] == 0, 0, x).sum(1) / (mask != 0).sum(1, keepdim=True)

    averaged = lambda x, mask: (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)  # noqa: E731
    return averaged, chosen, (draw(2, 9, 8, dtype=FLOAT), REAL_TOKENS)


@pair(UNDECIDED, "make both from the same numbers")
def weights_in_bfloat16_behind_a_kernel() -> Any:
    first, second = (draw(128, 128, seed=s, scale=0.09, dtype=FLOAT) for s in (1, 2))
    one, two = first.to(BF16), second.to(BF16)
    return lambda x: BLOCKS(x, one) @ two, lambda x: ((x.float() @ first) @ second).to(BF16), (draw(16, 128),)
