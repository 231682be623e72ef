"""Questions of public threads, each rebuilt in a few lines on a CPU from what the thread says; no code of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as T
from _parity_models import TOKENS, language_model, logits, padded
from _parity_pair import AGREE, ANOTHER, PAIRS, Make, Pair, draw, enliven
from _parity_parts import SGD, optimizers, partial
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ampcheck.parity import Batch, Chunks
from ampcheck.records.parity import WRONG

Dtype = torch.dtype
WIDTH, EPS = 256, 1e-6


def thread(link: str, outcome: str, *dtypes: str, asked: str, names: str = "") -> Callable[[Make], Make]:
    """Register a rebuilt thread. asked: which two executions it is about."""

    def register(make: Make) -> Make:
        changed = "" if outcome == AGREE else asked
        PAIRS[asked] = Pair(asked, "thread", make, dtypes or ("bfloat16",), changed, outcome, names, link)
        return make

    return register


def rms(x: Any, weight: Any, *, wide_weight: bool = False, wide_sum: bool = True, residual: Any = None) -> Any:
    """An RMSNorm in the roundings of one of the engines."""
    given = x if residual is None else residual
    y = x.float() if wide_sum else x
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return (y.float() * weight.float()).to(given.dtype) if wide_weight else y.to(given.dtype) * weight


def norm_data(dtype: Dtype, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    return draw(16, WIDTH, dtype=dtype, scale=scale), 1 + draw(WIDTH, dtype=dtype, seed=1, scale=0.2)


@thread(
    "vllm-project/vllm#42325", AGREE, asked="RMSNorm kernel multiplies the weight in float32, its reference in bf16"
)
def _weight_dtype(dtype: Dtype) -> Any:
    return lambda x, w: rms(x, w), lambda x, w: rms(x, w, wide_weight=True), norm_data(dtype)


@thread("NVIDIA/TransformerEngine#1132", AGREE, asked="RMSNorm casts before the weight (transformers) or after it")
def _cast_before(dtype: Dtype) -> Any:
    norm = enliven(LlamaRMSNorm(WIDTH, EPS), dtype)
    return norm, lambda x: rms(x, norm.weight, wide_weight=True), norm_data(dtype)[:1]


@thread("huggingface/transformers#33133", AGREE, asked="LlamaRMSNorm and a fused RMSNorm that rounds once")
def _fused_rms(dtype: Dtype) -> Any:
    norm = enliven(LlamaRMSNorm(WIDTH, EPS), dtype)
    return norm, lambda x: F.rms_norm(x, (WIDTH,), norm.weight, EPS), norm_data(dtype)[:1]


@thread(
    "NVIDIA/apex#1652",
    AGREE,
    "bfloat16",
    "float16",
    asked="fused and manual RMSNorm: large differences in the weight's gradient",
)
def _weight_gradient(dtype: Dtype) -> Any:
    data = draw(512, WIDTH, dtype=dtype), torch.ones(WIDTH)
    return (
        lambda x, w: rms(x, w, wide_weight=True),
        lambda x, w: F.rms_norm(x.float(), (WIDTH,), w, EPS).to(dtype),
        data,
    )


@thread(
    "sgl-project/sglang#27540", WRONG, asked="RMSNorm whose sum of squares is kept in bfloat16, with large outliers",
    names="b is beyond",
)  # fmt: skip
def _narrow_variance(dtype: Dtype) -> Any:
    def narrow(x: Any, w: Any) -> Any:
        total = torch.zeros_like(x[:, :1])
        for column in x.square().split(1, -1):
            total = total + column
        return (x.float() * torch.rsqrt(total.float() / x.shape[-1] + EPS)).to(x.dtype) * w

    x, weight = norm_data(dtype)
    x[:, 0] *= 20
    return lambda x, w: rms(x, w), narrow, (x.repeat(1, 4), weight.repeat(4)), {"backward": False}


@thread(
    "vllm-project/vllm#52104",
    AGREE,
    asked="fused add and RMSNorm: the residual sum is rounded before the variance, or not",
)
def _rounded_residual(dtype: Dtype) -> Any:
    def fused(x: Any, r: Any, w: Any, *, round_first: bool) -> Any:
        total = x + r if round_first else x.float() + r.float()
        return rms(total, w, residual=x), total.to(x.dtype)

    x, weight = norm_data(dtype)
    data = x, draw(16, WIDTH, dtype=dtype, seed=2), weight
    return (lambda *t: fused(*t, round_first=False)), (lambda *t: fused(*t, round_first=True)), data


@thread("vllm-project/vllm#48271", AGREE, asked="RMSNorm sums a row in blocks of another size for more tokens")
def _blocks_of_the_batch(dtype: Dtype) -> Any:
    def blocked(x: Any, w: Any) -> Any:
        size = 64 if len(x) < 8 else 16
        squares = x.float().square().unflatten(-1, (-1, size))
        mean = sum(squares.unbind(-1)).sum(-1, keepdim=True) / x.shape[-1]
        return (x.float() * torch.rsqrt(mean + EPS)).to(x.dtype) * w

    return blocked, Batch(), norm_data(dtype)


@thread("pytorch/pytorch#158699", AGREE, asked="a compiled RMSNorm keeps in float32 what eager mode rounds in between")
def _compiled_rms(dtype: Dtype) -> Any:
    def kept(x: Any, r: Any, w: Any) -> Any:
        y = x.float() + r.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * w.float()).to(x.dtype)

    def eager(x: Any, r: Any, w: Any) -> Any:
        return rms((x + r).float(), w, residual=x)

    x, weight = norm_data(dtype)
    return eager, kept, (x, draw(16, WIDTH, dtype=dtype, seed=2), weight)


@thread(
    "huggingface/transformers#25420", AGREE, "bfloat16", "float16", asked="logits of Llama with a cache and without"
)
def _cache(dtype: Dtype) -> Any:
    return language_model("llama", dtype, "sdpa"), Chunks(1), (TOKENS[:2, :8],)


@thread(
    "huggingface/transformers#26869",
    AGREE,
    "bfloat16",
    "float16",
    asked="logits of Llama for a row alone and in a batch",
)
def _batch(dtype: Dtype) -> Any:
    return logits("llama", dtype, "sdpa"), Batch(), (TOKENS,)


@thread("huggingface/transformers#29029", AGREE, asked="logits of Llama behind padding, with mask and positions")
def _padding(dtype: Dtype) -> Any:
    model = logits("llama", dtype, "sdpa")
    return model, padded(model), (TOKENS[:2],)


def delta_model(dtype: Dtype) -> Any:
    """A small Qwen3-Next, whose linear attention has a chunked form and a recurrent one."""
    config = T.Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=0, mlp_only_layers=[0, 1], initializer_range=0.15, pad_token_id=0,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return enliven(T.Qwen3NextForCausalLM(config), dtype)


@thread(
    "huggingface/transformers#46190",
    AGREE,
    "bfloat16",
    "float32",
    asked="gated delta rule: chunks over the sequence, or a step with a cache",
)
def _delta(dtype: Dtype) -> Any:
    return delta_model(dtype), Chunks(1), (TOKENS[:2, :8],), {"backward": False}


def fp8_attention(dtype: Dtype, first: int, second: int) -> Any:
    """Attention over keys and values in fp8, whose weights go to fp8 block by block of keys, of two sizes."""

    def attend(q: Any, k: Any, v: Any, size: int) -> Any:
        k, v = (t.to(torch.float8_e4m3fn).to(torch.float32) for t in (k, v))
        scores = q.float() @ k.mT * q.shape[-1] ** -0.5
        total, out, peak = 0.0, 0.0, torch.full_like(scores[..., :1], -1e30)
        for part, values in zip(scores.split(size, -1), v.split(size, -2), strict=True):
            largest = torch.maximum(peak, part.amax(-1, keepdim=True))
            weights, shrink = (part - largest).exp(), (peak - largest).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            out = out * shrink + weights.to(torch.float8_e4m3fn).float() @ values
            peak = largest
        return (out / total).to(q.dtype)

    data = tuple(draw(1, 2, 128, 16, seed=seed, dtype=dtype) for seed in range(3))
    return (lambda *t: attend(*t, first)), (lambda *t: attend(*t, second)), data, {"backward": False}


@thread(
    "sgl-project/sglang#25790",
    AGREE,
    asked="attention with an fp8 cache, in blocks of 96 keys (decode) or 128 (prefill)",
)
def _fp8_cache(dtype: Dtype) -> Any:
    return fp8_attention(dtype, 128, 96)


@thread(
    "vllm-project/vllm#49616",
    AGREE,
    asked="an RMSNorm whose weight is multiplied in another dtype, in every norm of a model",
)
def _every_norm(dtype: Dtype) -> Any:
    other = logits("qwen3", dtype)
    for module in [m for m in other.modules() if type(m).__name__.endswith("RMSNorm")]:
        weight = module.weight
        module.forward = lambda x, w=weight, e=module.variance_epsilon: F.rms_norm(x, w.shape, w, e)
    return logits("qwen3", dtype), other, (TOKENS[:2],)


@thread("meta-llama/llama#1048", WRONG, "float16", asked="RMSNorm in float16 throughout", names="inf or NaN")
def _narrow_norm(dtype: Dtype) -> Any:
    return lambda x, w: rms(x, w), lambda x, w: rms(x, w, wide_sum=False), norm_data(dtype, 300.0)


@thread(
    "linkedin/Liger-Kernel#74",
    ANOTHER,
    asked="Gemma's norm multiplies by the weight for one plus the weight",
    names=r"aten::(add|mul)",
)
def _gemma(dtype: Dtype) -> Any:
    return lambda x, w: rms(x, 1 + w), lambda x, w: rms(x, w), norm_data(dtype)


@thread(
    "pytorch/pytorch#191763",
    WRONG,
    "bfloat16",
    "float16",
    asked="SGD with fused=True on a CPU skips updates in 16 bits",
    names="_fused_sgd_",
)
def _fused_sgd(dtype: Dtype) -> Any:
    return optimizers(dtype, partial(SGD, foreach=False), partial(SGD, fused=True))


@thread(
    "huggingface/transformers#26344",
    AGREE,
    "float16",
    asked="Llama with past key values and the whole sequence at once",
)
def _past(dtype: Dtype) -> Any:
    return language_model("llama", dtype), Chunks(7), (TOKENS[:2, :8],)
