"""Fused attention. The kernels of CUDA have no float64: attention is computed by its definition."""

from __future__ import annotations

import math
from typing import Any

import torch

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import rule


@rule("_scaled_dot_product_flash_attention_for_cpu")
def _flash_for_cpu(call: Call, side: Side) -> Any:
    """Attention and the logarithms of its sums."""
    if call.argument("dropout_p"):
        return [None, None]
    return side.run(call)


@rule(
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
def _fused(call: Call, side: Side) -> Any:
    """Attention and the logarithms of its sums; the state of the generator and the rest restart."""
    rest = [None] * (len(call.out) - 2)
    if call.argument("dropout_p"):
        return [None, None, *rest]
    query, key, value, _ = _heads(call, side)
    scores = _scores(call, side, query, key)
    return [scores.softmax(-1) @ value, scores.logsumexp(-1), *rest]


@rule(
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
)  # fmt: skip
def _fused_backward(call: Call, side: Side) -> Any:
    """The gradients of query, key, value and, where the op has it, the bias."""
    rest: list[torch.Tensor | None] = [None] * (len(call.out) - 3)
    if call.argument("dropout_p"):
        return [None, None, None, *rest]
    gradient = side.of(call.args[0])
    query, key, value, groups = _heads(call, side)
    weights = _scores(call, side, query, key).softmax(-1)
    of_weights = gradient @ value.transpose(-2, -1)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_query = of_scores @ key * _scale(call, query)
    of_key = of_scores.transpose(-2, -1) @ query * _scale(call, query)
    of_value = weights.transpose(-2, -1) @ gradient
    if groups > 1:
        of_key, of_value = (t.view(len(t), -1, groups, *t.shape[2:]).sum(2) for t in (of_key, of_value))
    if rest and isinstance(call.out[3], torch.Tensor) and call.out[3].shape == of_scores.shape:
        rest[0] = of_scores
    return [of_query, of_key, of_value, *rest]


def _heads(call: Call, side: Side) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Query, key and value with as many heads each, and how many queries share a key."""
    query, key, value = (side.of(call.argument(name)) for name in ("query", "key", "value"))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    return query, key, value, groups


def _scale(call: Call, query: torch.Tensor) -> float:
    scale = call.argument("scale")
    return 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)


def _scores(call: Call, side: Side, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    scores = query @ key.transpose(-2, -1) * _scale(call, query)
    bias = call.argument("attn_bias")
    if isinstance(bias, torch.Tensor):
        scores = scores + side.of(bias)
    if call.argument("is_causal"):
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores
