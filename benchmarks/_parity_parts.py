"""Pairs of norms, attention, positions, optimizers and layers, of PyTorch and four libraries."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers.models.attention_processor as diffusers_attention
import diffusers.models.embeddings as diffusers_embeddings
import diffusers.models.normalization as diffusers_norms
import timm.layers
import timm.optim
import torch
import torch.nn.functional as F
import x_transformers.x_transformers as xt
from _parity_pair import draw, enliven, honest, planted
from diffusers.models.attention_processor import Attention
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope
from transformers.models.t5.modeling_t5 import T5LayerNorm

from ampcheck.records.parity import WRONG

Dtype = torch.dtype

# Norms ----------------------------------------------------------------------------------------------------------------

WIDTH = 96


def norms(dtype: Dtype, other: nn.Module, first: nn.Module | None = None) -> tuple[Any, ...]:
    """Two norms with one weight."""
    ours = enliven(first or LlamaRMSNorm(WIDTH, 1e-6), dtype)
    theirs = other.to(dtype)
    with torch.no_grad():
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            its.copy_(mine)
    return ours, theirs, (draw(4, 16, WIDTH, dtype=dtype),)


@honest("norm")
def rms_norm_of_transformers_and_torch(dtype: Dtype) -> Any:
    return norms(dtype, nn.RMSNorm(WIDTH, 1e-6))


@honest("norm")
def rms_norm_of_transformers_and_diffusers(dtype: Dtype) -> Any:
    return norms(dtype, diffusers_norms.RMSNorm(WIDTH, 1e-6))


@honest("norm")
def rms_norm_of_transformers_and_timm(dtype: Dtype) -> Any:
    return norms(dtype, timm.layers.RmsNorm(WIDTH, eps=1e-6))


@honest("norm")
def rms_norm_of_t5_and_timm_in_float32(dtype: Dtype) -> Any:
    return norms(dtype, timm.layers.RmsNormFp32(WIDTH, eps=1e-6), T5LayerNorm(WIDTH, 1e-6))


@honest("norm", "bfloat16", "float32")
def rms_norm_of_torch_and_x_transformers(dtype: Dtype) -> Any:
    return norms(dtype, xt.RMSNorm(WIDTH), nn.RMSNorm(WIDTH, 0.0))


@honest("norm")
def rms_norm_of_gemma_and_torch(dtype: Dtype) -> Any:
    ours = enliven(GemmaRMSNorm(WIDTH, 1e-6), dtype)
    weight = ours.weight
    theirs = lambda x: F.rms_norm(x.float(), (WIDTH,), 1 + weight.float(), 1e-6).to(x.dtype)  # noqa: E731
    return ours, theirs, (draw(4, 16, WIDTH, dtype=dtype),)


@honest("norm")
def layer_norm_of_torch_and_diffusers_in_float32(dtype: Dtype) -> Any:
    return norms(dtype, diffusers_norms.FP32LayerNorm(WIDTH, 1e-6), nn.LayerNorm(WIDTH, 1e-6))


@honest("norm")
def layer_norm_of_images_of_timm_and_permuted(dtype: Dtype) -> Any:
    ours = enliven(timm.layers.LayerNorm2d(WIDTH), dtype)

    def permuted(x: Any) -> Any:
        return F.layer_norm(x.permute(0, 2, 3, 1), (WIDTH,), ours.weight, ours.bias, 1e-6).permute(0, 3, 1, 2)

    return ours, permuted, (draw(2, WIDTH, 5, 6, dtype=dtype),)


@planted("norm", "eps of 1e-5 for 1e-6", r"rms_norm|mean|add|rsqrt")
def rms_norm_of_torch_with_another_eps(dtype: Dtype) -> Any:
    return norms(dtype, nn.RMSNorm(WIDTH, 1e-5))


@planted("norm", "eps of 1e-5 for 1e-6", r"aten::add", "bfloat16", "float32")
def rms_norm_of_diffusers_with_another_eps(dtype: Dtype) -> Any:
    return norms(dtype, diffusers_norms.RMSNorm(WIDTH, 1e-5))


@planted("norm", "weight for 1 + weight", r"aten::(add|mul)")
def rms_norm_of_gemma_without_one(dtype: Dtype) -> Any:
    return norms(dtype, LlamaRMSNorm(WIDTH, 1e-6), GemmaRMSNorm(WIDTH, 1e-6))


@planted("norm", "the mean is subtracted", r"aten::(pow|square|mean|native_layer_norm)")
def rms_norm_for_which_a_layer_norm_stands(dtype: Dtype) -> Any:
    other = nn.LayerNorm(WIDTH, 1e-6, bias=False)
    return norms(dtype, other)


@planted("norm", "normalised over the wrong dimension", r"norm|mean|permute|pow|square")
def layer_norm_over_rows_of_an_image(dtype: Dtype) -> Any:
    wrong = lambda x: F.layer_norm(x, x.shape[-1:], None, None, 1e-6)  # noqa: E731
    return timm.layers.LayerNorm2d(16, affine=False), wrong, (draw(2, 16, 8, 16, dtype=dtype),)


@planted("norm", "scale of sqrt(width) left out", r"aten::(mul|div)", "bfloat16", "float32")
def rms_norm_of_x_transformers_without_its_scale(dtype: Dtype) -> Any:
    ours, theirs, args = norms(dtype, xt.RMSNorm(WIDTH), xt.RMSNorm(WIDTH))
    theirs.scale = 1.0
    return ours, theirs, args


# Attention ------------------------------------------------------------------------------------------------------------


def qkv(dtype: Dtype, tokens: int = 24, heads: int = 4, groups: int = 4) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values."""
    shapes = (heads, groups, groups)
    return tuple(draw(2, n, tokens, 16, seed=seed, dtype=dtype) for seed, n in enumerate(shapes))


def eager(q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None, softcap: float = 0.0) -> Any:
    """Attention as transformers writes it."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if not softcap else softcap * torch.tanh(scores / softcap)
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def causal(tokens: int, dtype: Dtype, diagonal: int = 1, window: int = 0) -> torch.Tensor:
    """A mask to add."""
    ones = torch.ones(tokens, tokens, dtype=torch.bool)
    hidden = ones.triu(diagonal) | (ones.tril(-window) if window else ~ones)
    return torch.zeros(tokens, tokens, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


def backend(which: SDPBackend, **options: Any) -> Callable[..., Any]:
    """SDPA with one of its back ends."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(which):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return attend


@honest("attention")
def sdpa_math_and_flash(dtype: Dtype) -> Any:
    return backend(SDPBackend.MATH), backend(SDPBackend.FLASH_ATTENTION), qkv(dtype)


@honest("attention")
def sdpa_flash_causal_and_eager_masked(dtype: Dtype) -> Any:
    flash = backend(SDPBackend.FLASH_ATTENTION, is_causal=True)
    return lambda q, k, v: eager(q, k, v, causal(24, dtype)), flash, qkv(dtype)


@honest("attention")
def sdpa_groups_and_repeated_heads(dtype: Dtype) -> Any:
    def repeated(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))

    grouped = partial(F.scaled_dot_product_attention, enable_gqa=True)
    return repeated, lambda q, k, v: grouped(q, k, v), qkv(dtype, groups=2)


def flex(score: Any = None, keep: Any = None, tokens: int = 24) -> Callable[..., Any]:
    """`flex_attention`, not compiled."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        mask = create_block_mask(keep, None, None, tokens, tokens, device="cpu") if keep else None
        return flex_attention(q, k, v, score_mod=score, block_mask=mask)

    return attend


@honest("attention")
def flex_attention_causal_and_sdpa(dtype: Dtype) -> Any:
    keep = lambda b, h, q, k: q >= k  # noqa: E731
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), flex(keep=keep), qkv(dtype)


@honest("attention")
def flex_attention_with_a_window_and_a_mask(dtype: Dtype) -> Any:
    keep = lambda b, h, q, k: (q >= k) & (q - k < 6)  # noqa: E731
    masked = lambda q, k, v: eager(q, k, v, causal(24, dtype, window=6))  # noqa: E731
    return masked, flex(keep=keep), qkv(dtype)


@honest("attention")
def flex_attention_with_alibi_and_a_bias(dtype: Dtype) -> Any:
    def biased(q: Any, k: Any, v: Any, factor: float = 1.0) -> Any:
        slopes = factor * 2.0 ** -torch.arange(1, 5).float()
        places = torch.arange(24)
        return eager(q.float(), k.float(), v.float(), slopes[:, None, None] * (places - places[:, None])).to(q.dtype)

    return biased, flex(score=lambda s, b, h, q, k: s + 2.0 ** -(h + 1.0) * (k - q)), qkv(dtype)


@honest("attention")
def flex_attention_with_a_soft_cap_and_eager(dtype: Dtype) -> Any:
    capped = lambda q, k, v: eager(q, k, v, softcap=5.0)  # noqa: E731
    return capped, flex(score=lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0)), qkv(dtype)


def of_timm(dtype: Dtype, *, fused: bool) -> Any:
    torch.manual_seed(0)
    layer = enliven(timm.layers.attention.Attention(32, 4, qkv_bias=True), dtype)
    layer.fused_attn = fused
    return layer


@honest("attention")
def attention_of_timm_fused_and_plain(dtype: Dtype) -> Any:
    return of_timm(dtype, fused=True), of_timm(dtype, fused=False), (draw(2, 12, 32, dtype=dtype),)


def of_diffusers(dtype: Dtype, processor: Any) -> Any:
    torch.manual_seed(0)
    return enliven(Attention(32, heads=4, dim_head=8, bias=True, processor=processor), dtype)


@honest("attention")
def attention_of_diffusers_with_both_processors(dtype: Dtype) -> Any:
    processors = diffusers_attention.AttnProcessor(), diffusers_attention.AttnProcessor2_0()
    return *(of_diffusers(dtype, processor) for processor in processors), (draw(2, 12, 32, dtype=dtype),)


def like_timm(theirs: Any, ours: Any) -> Any:
    """The weights of timm's fused projection in the three of diffusers."""
    with torch.no_grad():
        for name, part in zip(("to_q", "to_k", "to_v"), range(3), strict=True):
            getattr(theirs, name).weight.copy_(ours.qkv.weight.chunk(3)[part])
            getattr(theirs, name).bias.copy_(ours.qkv.bias.chunk(3)[part])
        theirs.to_out[0].load_state_dict(ours.proj.state_dict())
    return theirs


@honest("attention")
def attention_of_timm_and_diffusers(dtype: Dtype) -> Any:
    ours, theirs = of_timm(dtype, fused=True), of_diffusers(dtype, diffusers_attention.AttnProcessor())
    return ours, like_timm(theirs, ours), (draw(2, 12, 32, dtype=dtype),)


@honest("attention")
def attention_of_torch_and_timm(dtype: Dtype) -> Any:
    ours = of_timm(dtype, fused=False)
    theirs = nn.MultiheadAttention(32, 4, batch_first=True).to(dtype)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.load_state_dict(ours.proj.state_dict())
    return ours, lambda x: theirs(x, x, x, need_weights=True)[0], (draw(2, 12, 32, dtype=dtype),)


@honest("attention", "bfloat16", "float32")
def attention_of_x_transformers_flash_and_plain(dtype: Dtype) -> Any:
    def make(flash: bool) -> Any:
        torch.manual_seed(0)
        layer = enliven(xt.Attention(32, dim_head=8, heads=4, causal=True, flash=flash), dtype)
        return lambda x: layer(x)[0] if isinstance(layer(x), tuple) else layer(x)

    return make(True), make(False), (draw(2, 12, 32, dtype=dtype),)


@planted("attention", "scale 1/8 for 1/4", r"mul|scaled_dot|matmul|bmm")
def sdpa_with_another_scale(dtype: Dtype) -> Any:
    return lambda q, k, v: eager(q, k, v), lambda q, k, v: eager(q, k, v, scale=0.125), qkv(dtype)


@planted("attention", "the mask lets a token see the next", r"add|masked_fill|triu|softmax|mask", "bfloat16", "float16")
def sdpa_mask_off_by_one(dtype: Dtype) -> Any:
    ours, theirs = (lambda q, k, v, at=at: eager(q, k, v, causal(24, dtype, at)) for at in (1, 2))
    return ours, theirs, qkv(dtype)


@planted("attention", "a window of 7 for 6", r"add|masked_fill|where|softmax|lt|bitwise|logical", "bfloat16", "float32")
def flex_attention_window_off_by_one(dtype: Dtype) -> Any:
    keeps = (lambda b, h, q, k, n=n: (q >= k) & (q - k < n) for n in (6, 7))
    return *(flex(keep=keep) for keep in keeps), qkv(dtype)


@planted("attention", "soft cap of 4.9 for 5", r"div|tanh|mul")
def flex_attention_with_another_soft_cap(dtype: Dtype) -> Any:
    capped = lambda q, k, v: eager(q, k, v, softcap=5.0)  # noqa: E731
    return capped, flex(score=lambda s, b, h, q, k: 4.9 * torch.tanh(s / 4.9)), qkv(dtype)


@planted("attention", "heads in tiles instead of repeated", r"repeat|expand|clone|transpose|matmul|bmm|copy|index")
def sdpa_groups_in_tiles(dtype: Dtype) -> Any:
    ours = lambda q, k, v: eager(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))  # noqa: E731
    return ours, lambda q, k, v: eager(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), qkv(dtype, groups=2)


@planted("attention", "slopes of ALiBi one exponent off", r"mul|add|pow|exp2|_to_copy")
def flex_attention_with_other_slopes(dtype: Dtype) -> Any:
    scores = (lambda s, b, h, q, k, n=n: s + 2.0 ** -(h + n) * (k - q) for n in (1.0, 2.0))
    return *(flex(score=score) for score in scores), qkv(dtype)


@planted("attention", "keys and values exchanged when copied", r"to_[qkv]|qkv|addmm|linear|matmul|mm")
def attention_of_diffusers_with_keys_for_values(dtype: Dtype) -> Any:
    ours, theirs = of_timm(dtype, fused=True), of_diffusers(dtype, diffusers_attention.AttnProcessor())
    like_timm(theirs, ours)
    theirs.to_k, theirs.to_v = theirs.to_v, theirs.to_k
    return ours, theirs, (draw(2, 12, 32, dtype=dtype),)


@planted("attention", "bias of the output not copied", r"to_out|proj|addmm|linear|add")
def attention_of_diffusers_without_a_bias(dtype: Dtype) -> Any:
    ours, theirs = of_timm(dtype, fused=True), of_diffusers(dtype, diffusers_attention.AttnProcessor())
    like_timm(theirs, ours)
    with torch.no_grad():
        theirs.to_out[0].bias.zero_()
    return ours, theirs, (draw(2, 12, 32, dtype=dtype),)


# Positions ------------------------------------------------------------------------------------------------------------


def llama_positions(x: Any, base: float = 1e4) -> Any:
    rope = {"rope_type": "default", "rope_theta": base}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(x.shape[2])[None])
    return llama_rope(x, x, cos, sin)[0]


def diffusers_positions(x: Any, dim: int = -2) -> Any:
    tables = diffusers_embeddings.get_1d_rotary_pos_embed(
        16, x.shape[2], use_real=True, repeat_interleave_real=dim == -1
    )
    return diffusers_embeddings.apply_rotary_emb(x, tables, use_real_unbind_dim=dim)


@honest("positions", "float32", "bfloat16")
def rotary_of_transformers_and_diffusers(dtype: Dtype) -> Any:
    return llama_positions, diffusers_positions, (draw(2, 4, 20, 16, dtype=dtype),)


@planted("positions", "pairs for halves", r"unbind|stack|mul|cat|neg|repeat|clone", "bfloat16", "float32")
def rotary_of_diffusers_interleaved(dtype: Dtype) -> Any:
    return llama_positions, lambda x: diffusers_positions(x, -1), (draw(2, 4, 20, 16, dtype=dtype),)


@planted("positions", "a base of 10,050 for 10,000", r"pow|reciprocal|div|mul|arange", "bfloat16", "float32")
def rotary_of_another_base(dtype: Dtype) -> Any:
    return llama_positions, lambda x: llama_positions(x, 10050.0), (draw(2, 4, 20, 16, dtype=dtype),)


def timesteps(t: Any, shift: float) -> Any:
    frequencies = torch.exp(-math.log(1e4) * torch.arange(16) / (16 - shift))
    angles = t.float()[:, None] * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], -1)


@honest("positions", "float32")
def timesteps_of_diffusers_and_by_hand(dtype: Dtype) -> Any:
    theirs = lambda t: diffusers_embeddings.get_timestep_embedding(t, 32, True, 0)  # noqa: E731
    return lambda t: timesteps(t, 0), theirs, (draw(6, dtype=dtype).abs() * 10,)


@planted("positions", "the shift of the frequencies is 1 for 0", r"div|exp|mul", "float32")
def timesteps_of_diffusers_shifted(dtype: Dtype) -> Any:
    theirs = lambda t: diffusers_embeddings.get_timestep_embedding(t, 32, True, 1)  # noqa: E731
    return lambda t: timesteps(t, 0), theirs, (draw(6, dtype=dtype).abs() * 10,)


# Optimizers -----------------------------------------------------------------------------------------------------------


def steps(make: Callable[[list[torch.Tensor]], Any], count: int = 3) -> Callable[..., Any]:
    """Some steps of an optimizer, as a function of the weight and the gradient."""

    def run(weight: Any, gradient: Any) -> Any:
        parameter = nn.Parameter(weight.detach().clone())
        optimizer = make([parameter])
        for number in range(count):
            parameter.grad = gradient.detach() * (1 + number)
            optimizer.step()
        return parameter.detach()

    return run


def optimizers(dtype: Dtype, a: Any, b: Any) -> tuple[Any, ...]:
    data = draw(24, 16, dtype=dtype), draw(24, 16, seed=1, dtype=dtype, scale=0.1)
    return steps(a), steps(b), data, {"backward": False}


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True)


@honest("optimizer", "bfloat16", "float32")
def adamw_plain_and_fused(dtype: Dtype) -> Any:
    return optimizers(dtype, partial(ADAMW, foreach=False), partial(ADAMW, fused=True))


@honest("optimizer", "bfloat16", "float32")
def adamw_plain_and_foreach(dtype: Dtype) -> Any:
    return optimizers(dtype, partial(ADAMW, foreach=False), partial(ADAMW, foreach=True))


@honest("optimizer", "float32")
def sgd_plain_and_fused(dtype: Dtype) -> Any:
    return optimizers(dtype, partial(SGD, foreach=False), partial(SGD, fused=True))


@honest("optimizer")
def sgd_plain_and_foreach(dtype: Dtype) -> Any:
    return optimizers(dtype, partial(SGD, foreach=False), partial(SGD, foreach=True))


@planted("optimizer", "eps of 1e-8, which is 0 in float16", r"addcdiv", "float16", outcome=WRONG)
def adamw_in_float16_fused(dtype: Dtype) -> Any:
    return optimizers(dtype, partial(ADAMW, fused=True), partial(ADAMW, foreach=False))


@honest("optimizer", "float32")
def adagrad_plain_and_fused(dtype: Dtype) -> Any:
    adagrad = partial(torch.optim.Adagrad, lr=1e-2)
    return optimizers(dtype, partial(adagrad, foreach=False), partial(adagrad, fused=True))


@honest("optimizer", "bfloat16", "float32")
def adamw_of_torch_and_timm(dtype: Dtype) -> Any:
    return optimizers(dtype, partial(ADAMW, foreach=False), partial(timm.optim.AdamWLegacy, lr=1e-2, weight_decay=0.1))


@planted("optimizer", "decay as part of the gradient", r"add|mul|lerp", "bfloat16", "float32")
def adam_for_which_adamw_stands(dtype: Dtype) -> Any:
    adam = partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, foreach=False)
    return optimizers(dtype, partial(ADAMW, foreach=False), adam)


@planted("optimizer", "eps inside of the root, and averages that begin with 1", r"ones_like|zeros_like", "float32")
def rmsprop_of_timm_as_in_tensorflow(dtype: Dtype) -> Any:
    torchs = partial(torch.optim.RMSprop, lr=1e-2, alpha=0.9, foreach=False)
    return optimizers(dtype, torchs, partial(timm.optim.RMSpropTF, lr=1e-2, alpha=0.9, eps=1e-8))


@planted("optimizer", "momentum without Nesterov's step", r"add|mul", "bfloat16", "float32")
def sgd_without_nesterov(dtype: Dtype) -> Any:
    plain = partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False)
    return optimizers(dtype, partial(SGD, foreach=False), plain)


@planted("optimizer", "beta2 of 0.99 for 0.999", r"mul|addcmul|lerp|_fused", "bfloat16", "float32")
def adamw_foreach_with_another_beta(dtype: Dtype) -> Any:
    other = partial(ADAMW, foreach=True, betas=(0.9, 0.99))
    return optimizers(dtype, partial(ADAMW, foreach=False), other)


# Layers ---------------------------------------------------------------------------------------------------------------


def swiglu(dtype: Dtype) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=48)
    ours, theirs = enliven(LlamaMLP(config), dtype), timm.layers.SwiGLU(32, 48, bias=False).to(dtype)
    pairs = (("gate_proj", "fc1_g"), ("up_proj", "fc1_x"), ("down_proj", "fc2"))
    for mine, its in pairs:
        getattr(theirs, its).load_state_dict(getattr(ours, mine).state_dict())
    return ours, theirs


@honest("layer")
def gated_layer_of_transformers_and_timm(dtype: Dtype) -> Any:
    names = {"gate_proj": "fc1_g", "up_proj": "fc1_x"}
    return *swiglu(dtype), (draw(2, 10, 32, dtype=dtype),), {"modules": names}


@planted("layer", "gate and value exchanged", r"silu|mul", "bfloat16", "float32")
def gated_layer_of_timm_with_gate_for_value(dtype: Dtype) -> Any:
    ours, theirs = swiglu(dtype)
    theirs.fc1_g, theirs.fc1_x = theirs.fc1_x, theirs.fc1_g
    return ours, theirs, (draw(2, 10, 32, dtype=dtype),)


@honest("layer")
def mish_and_gelu_of_timm_and_torch(dtype: Dtype) -> Any:
    def ours(x: Any) -> Any:
        return F.gelu(x), F.mish(x), F.hardswish(x)

    def theirs(x: Any) -> Any:
        acts = (timm.layers.create_act_layer(name) for name in ("gelu", "mish", "hard_swish"))
        return tuple(act(x) for act in acts)

    return ours, theirs, (draw(8, 48, dtype=dtype),)


@planted("layer", "x * sigmoid(1.702 x) for gelu", r"gelu|sigmoid|mul")
def quick_gelu_for_which_gelu_stands(dtype: Dtype) -> Any:
    return F.gelu, lambda x: x * torch.sigmoid(1.702 * x), (draw(8, 48, dtype=dtype),)
