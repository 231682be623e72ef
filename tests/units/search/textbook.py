"""Ten functions as textbooks write them, and as an engineer writes them who has met float16; with sensible domains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from ampcheck.strategies import shapes, tensors

FORMATS = ("float16", "bfloat16")


def softmax(x: Tensor) -> Tensor:
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def stable_softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def softplus(x: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(x))


def stable_softplus(x: Tensor) -> Tensor:
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def log_sum_exp(x: Tensor) -> Tensor:
    return x.exp().sum(-1).log()


def stable_log_sum_exp(x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    return top.squeeze(-1) + (x - top).exp().sum(-1).log()


def variance(x: Tensor) -> Tensor:
    return x.square().mean(-1) - x.mean(-1).square()


def stable_variance(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide - wide.mean(-1, keepdim=True)).square().mean(-1).to(x.dtype)


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def stable_rms_norm(x: Tensor) -> Tensor:
    wide = x.float()
    top = wide.abs().amax(-1, keepdim=True).clamp_min(1.0)
    small = wide / top
    return (small * torch.rsqrt(small.square().mean(-1, keepdim=True) + 1e-6 / top / top)).to(x.dtype)


def cosine_similarity(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1) + 1e-8)


def stable_cosine_similarity(x: Tensor, y: Tensor) -> Tensor:
    def unit(v: Tensor) -> Tensor:
        top = v.abs().amax(-1, keepdim=True)
        small = v / torch.where(top > 0, top, 1.0)
        return small / small.norm(dim=-1, keepdim=True).clamp_min(1e-3)

    return (unit(x.float()) * unit(y.float())).sum(-1).to(x.dtype)


def focal_loss(x: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return -((1 - p) ** 2) * p.log()


def stable_focal_loss(x: Tensor) -> Tensor:
    return -(torch.sigmoid(-x) ** 2) * F.logsigmoid(x)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2))


def stable_linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def feature(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.clamp_max(0).exp())

    with torch.autocast(q.device.type, enabled=False):
        q, k, wide = feature(q.float()), feature(k.float()), v.float()
        k = k / k.sum(-2, keepdim=True).amax(-1, keepdim=True)
        out = q @ (k.transpose(-1, -2) @ wide) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2))
    return out.to(v.dtype)


def log1p_exp(x: Tensor) -> Tensor:
    return torch.log1p(x.exp())


def stable_log1p_exp(x: Tensor) -> Tensor:
    return F.softplus(x)


def mean(x: Tensor) -> Tensor:
    return x.sum(-1) / x.shape[-1]


def stable_mean(x: Tensor) -> Tensor:
    return x.double().mean(-1).to(x.dtype)


@dataclass(frozen=True)
class Textbook:
    """A naive function, its stable form, and what a user would declare as its inputs in a format."""

    naive: Callable[..., Any]
    stable: Callable[..., Any]
    inputs: Callable[[str], st.SearchStrategy[Any]]


def vectors(bound: float) -> Callable[[str], st.SearchStrategy[Any]]:
    """Vectors of up to eight elements within +-bound."""
    return lambda dtype: tensors(dtype, shape=shapes(max_dims=1), min_value=-bound, max_value=bound)


def any_vectors(dtype: str) -> st.SearchStrategy[Any]:
    """Vectors of any finite values: what the function gives is in range for all of them."""
    return tensors(dtype, shape=shapes(max_dims=1))


def pairs(dtype: str) -> st.SearchStrategy[Any]:
    """Two vectors of one length."""
    return st.integers(1, 8).flatmap(lambda n: st.tuples(tensors(dtype, shape=n), tensors(dtype, shape=n)))


def attention_inputs(dtype: str) -> st.SearchStrategy[Any]:
    """Queries, keys and values of the same shape within +-10."""
    shape = st.tuples(st.integers(1, 2), st.integers(1, 2))
    return shape.flatmap(lambda s: st.tuples(*[tensors(dtype, shape=s, min_value=-10, max_value=10)] * 3))


TEXTBOOK = {
    "softmax": Textbook(softmax, stable_softmax, vectors(100)),
    "softplus": Textbook(softplus, stable_softplus, vectors(100)),
    "log_sum_exp": Textbook(log_sum_exp, stable_log_sum_exp, vectors(100)),
    "variance": Textbook(variance, stable_variance, vectors(100)),
    "rms_norm": Textbook(rms_norm, stable_rms_norm, any_vectors),
    "cosine_similarity": Textbook(cosine_similarity, stable_cosine_similarity, pairs),
    "focal_loss": Textbook(focal_loss, stable_focal_loss, vectors(100)),
    "linear_attention": Textbook(linear_attention, stable_linear_attention, attention_inputs),
    "log1p_exp": Textbook(log1p_exp, stable_log1p_exp, vectors(100)),
    "mean": Textbook(mean, stable_mean, any_vectors),
}
