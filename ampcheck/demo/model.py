"""The built-in subject: a causal character-level transformer on six of Shakespeare's sonnets."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcheck.core.subject import Subject


@lru_cache(maxsize=1)
def corpus() -> str:
    """The text: about 4,000 characters, in the public domain."""
    return files("ampcheck.demo").joinpath("sonnets.txt").read_text(encoding="utf-8")


def batch(size: int, length: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Characters and their successors, each int64 [size, length], from random places of the corpus."""
    text = corpus()
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([index[character] for character in text])
    starts = torch.randint(0, len(codes) - length - 1, (size,), generator=torch.Generator().manual_seed(seed))
    rows = starts[:, None] + torch.arange(length)
    return codes[rows], codes[rows + 1]


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream: Tensor = x + self.out(attended.transpose(1, 2).flatten(-2))
        thought: Tensor = self.down(F.gelu(self.up(self.norm_2(stream))))
        return stream + thought


class CharTransformer(nn.Module):
    """A small GPT. `forward(characters, targets)` gives logits [batch, length, vocabulary] and the mean loss."""

    def __init__(self, *, layers: int = 2, width: int = 128, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        vocabulary = len(set(corpus()))
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, characters: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Characters and targets are int64 [batch, length]; the loss is 0-d float32 cross-entropy in nats."""
        x = self.characters(characters) + self.positions.weight[: characters.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def subject(layers: int = 2) -> Subject:
    """The demo as a subject: 2 layers, width 128, 4 heads, a batch of 8 by 64 characters, judged by its own loss."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CharTransformer(layers=layers)
    return Subject((model, batch(8, 64)), name="demo", loss=lambda output: output[1])
