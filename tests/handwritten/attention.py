"""Attention and what surrounds it."""

import math

import torch
from torch import nn

from handwritten.case import FLOAT16, LOW, case, enter, enter_module


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores + ((1 - mask) * -1e9)[:, None, :]  # lost here
        return scores.softmax(-1) @ v * mask[..., None]  # lost here


@case("overflow", FLOAT16, parts=(Attention,))
def mask_of_minus_1e9(dtype):
    """(1 - mask) * -1e9 is -inf, and the padding text has no visible key; its rows are NaN though they are masked."""
    torch.manual_seed(0)
    attention = enter_module(Attention(16), dtype)
    mask = (torch.arange(8) < torch.tensor([[8], [3], [0]])).to(dtype)
    return attention(enter(torch.randn(3, 8, 16), dtype), mask)


@case("overflow", FLOAT16)
def softmax_by_exp_and_sum(dtype):
    """exp(scores) / sum without subtracting the maximum, scores of 12."""
    torch.manual_seed(0)
    scores = enter(4 * torch.randn(8, 32).clamp(-3, 3), dtype)
    exponential = scores.exp()  # lost here
    return exponential / exponential.sum(-1, keepdim=True)  # lost here


@case("overflow", FLOAT16)
def scores_scaled_after_the_product(dtype):
    """Queries and keys with outliers: the product is inf before it is scaled."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 64), torch.randn(2, 6, 64)
    q[..., 3], k[..., 3] = 300.0, 300.0
    scores = enter(q, dtype) @ enter(k, dtype).mT * 64**-0.5  # lost here
    return scores / 1000


@case("collision", LOW)
def alibi_bias(dtype):
    """slope * position of 3000 keys: neighbouring keys get the same bias."""
    torch.manual_seed(0)
    position = torch.arange(3000, dtype=dtype)  # lost here
    bias = torch.tensor([0.84, 0.59], dtype=dtype)[:, None] * position  # lost here
    scores = enter(torch.randn(2, 3000), dtype) + bias  # lost here
    return scores.softmax(-1)[:, -16:]  # lost here


@case("decision", LOW)
def relative_position_buckets(dtype):
    """T5's logarithmic buckets of distances up to 4000."""
    distance = torch.arange(8, 4000).to(dtype)  # lost here
    fraction = torch.log(distance / 8) / math.log(4000 / 8)  # lost here
    return 8 + (fraction * 56).long()  # lost here


@case("collision", LOW)
def position_ids_by_cumsum(dtype):
    """Position ids as cumulative sum of the attention mask in the format of the mask."""
    mask = torch.ones(2, 3000).to(dtype)
    mask[1, :100] = 0
    return (mask.cumsum(1) * mask).long()  # lost here


class LinearAttention(nn.Module):
    """State and normaliser of linear attention, updated token by token."""

    def forward(self, q, k, v):
        state, normaliser = torch.zeros(q.shape[1], v.shape[1], dtype=q.dtype), torch.zeros_like(q[0])
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        for key, value in zip(k, v, strict=True):
            state = state + torch.outer(key, value)  # lost here
            normaliser = normaliser + key  # lost here
        return (q[-1] @ state) / (q[-1] @ normaliser)


@case("drift", LOW, parts=(LinearAttention,))
def linear_attention_state(dtype):
    """The running normaliser of linear attention over 4000 tokens stays at 1024, or at 128."""
    torch.manual_seed(0)
    q, k = enter(torch.randn(4000, 8), dtype), enter(0.2 * torch.randn(4000, 8) - 1, dtype)
    values = torch.rand(4000, 8)
    values[:2700] *= 0.1
    return LinearAttention()(q, k, enter(values, dtype))


@case("overflow", FLOAT16)
def greedy_by_tiny_temperature(dtype):
    """Temperature 1e-6 stands for greedy decoding: logits become inf and softmax NaN."""
    torch.manual_seed(0)
    logits = enter(torch.randn(4, 32), dtype)
    return (logits / 1e-6).softmax(-1)  # lost here


@case("silent-zero", FLOAT16)
def attention_entropy(dtype):
    """-sum p * log(p + 1e-9) of attention maps with masked keys: 0 * log(0)."""
    torch.manual_seed(0)
    scores = torch.randn(4, 8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -60000.0)
    p = enter(scores, dtype).softmax(-1)
    return -(p * (p + 1e-9).log()).sum(-1).mean(-1)  # lost here


@case("overflow", FLOAT16)
def merged_chunks_by_exp(dtype):
    """Two chunks of keys are merged with weights exp(logsumexp) of 12."""
    torch.manual_seed(0)
    first, second = enter(torch.randn(4, 16), dtype), enter(torch.randn(4, 16), dtype)
    weights = enter(12 + torch.rand(2, 4, 1), dtype).exp()  # lost here
    return (first * weights[0] + second * weights[1]) / weights.sum(0)  # lost here


@case("collision", LOW)
def mask_of_packed_documents(dtype):
    """Document ids travel as floats beside the features; above 2048 neighbours are one document."""
    documents = torch.arange(3000, 3020).repeat_interleave(8)
    ids = documents.to(dtype)  # lost here
    return ids[:, None] == ids[None, :]  # lost here


@case("drift", LOW)
def decay_of_retention(dtype):
    """Retention multiplies its decay of 0.9995 up over 600 tokens; in bfloat16 it is 1."""
    torch.manual_seed(0)
    weight, output = torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype)
    for value in enter(1 + 0.1 * torch.randn(600), dtype).flip(0) / 600:
        output = output + weight * value  # lost here
        weight = weight * 0.9995  # lost here
    return weight, output
