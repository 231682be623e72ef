"""No false alarm: functions and modules that are known to be stable in 16 bits pass over wide domains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from ampcheck import assert_property
from ampcheck.search import SearchOptions
from ampcheck.strategies import heavy_tails, shapes, tensors, token_batches, values

FORMATS = ("float16", "bfloat16")


def attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x.flip(-2), x)


def attention_by_hand(x: torch.Tensor) -> torch.Tensor:
    scores = (x / math.sqrt(x.shape[-1])) @ x.flip(-2).transpose(-1, -2)
    return scores.softmax(-1) @ x


def rotated(x: torch.Tensor) -> torch.Tensor:
    angle = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * 0.1 ** torch.arange(x.shape[-1] // 2)
    one, other = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def huber(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 1, 0.5 * x * x, x.abs() - 0.5)


def running_average(x: torch.Tensor) -> torch.Tensor:
    held = torch.zeros_like(x[..., 0])
    for step in x.unbind(-1):
        held = held + 0.25 * (step - held)
    return held


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "normalize": lambda x: F.normalize(x, dim=-1, eps=1e-3),
    "cumsum": lambda x: x.cumsum(-1),
    "std": lambda x: x.std(-1, correction=0),
    "huber": huber,
    "running average": running_average,
    "argmax": lambda x: x.argmax(-1),
    "steps": lambda x: (x * 4).round() / 4,
    "gate": lambda x: (x > 0.5).to(x.dtype) * x,
}

MATRICES: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "attention by hand": attention_by_hand,
    "rotary embedding": rotated,
    "masked softmax": lambda x: x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), -math.inf).softmax(
        -1
    ),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_stable_function_passes(name: str, fmt: str) -> None:
    inputs = tensors(fmt, shape=shapes(max_dims=2), min_value=-20, max_value=20)
    assert not assert_property(FUNCTIONS[name], inputs=inputs, compile=False, options=SearchOptions(examples=60)).failed


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", MATRICES)
def test_a_stable_function_of_matrices_passes(name: str, fmt: str) -> None:
    inputs = tensors(fmt, shape=(3, 4), min_value=-10, max_value=10)
    assert not assert_property(MATRICES[name], inputs=inputs, compile=False, options=SearchOptions(examples=60)).failed


class Block(nn.Module):
    """A transformer block of the usual kind."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.between(x))


class LanguageModel(nn.Module):
    """Two blocks over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids))) * seen[..., None]


THREE = {"min_value": -3.0, "max_value": 3.0}


def _differ(images: torch.Tensor) -> bool:
    return bool((images.std((0, 2, 3)) > 0.25).all())


def modules() -> dict[str, tuple[nn.Module, st.SearchStrategy[Any]]]:
    torch.manual_seed(0)
    tokens = (2, 4, 16)
    images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    return {
        "block": (Block(), tensors("float32", shape=tokens, min_value=-10, max_value=10)),
        "block with dropout and tails": (nn.TransformerEncoderLayer(16, 2, 32), heavy_tails(shape=tokens, limit=100)),
        "block kept in bfloat16": (Block().bfloat16(), tensors("bfloat16", shape=tokens, min_value=-10, max_value=10)),
        "language model": (LanguageModel(), token_batches(20)),
        # Not close together: what differs by less than the bias's spacing is lost before a norm magnifies it.
        "images": (
            images,
            tensors("float32", shape=(2, 3, 6, 6), elements=values("float32", **THREE), layout="any").filter(_differ),
        ),
    }


@pytest.mark.parametrize("name", modules())
def test_a_healthy_module_passes(name: str) -> None:
    model, inputs = modules()[name]
    run = assert_property(model, inputs=inputs, compile=False, options=SearchOptions(examples=25))
    assert not run.failed
    # Equal draws count once, and what Hypothesis draws depends on the constants in the modules that are loaded.
    assert run.coverage.seen["examples"] > 12
