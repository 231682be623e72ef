"""The networks of the matrix's workloads, in plain PyTorch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CachedAttention(nn.Module):
    """Self-attention of one new token per sequence over a cache of fixed length, which is written in place."""

    keys: Tensor
    values: Tensor

    def __init__(self, width: int, heads: int, batch: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        for name in ("keys", "values"):
            filled = torch.randn(batch, heads, length, width // heads)
            self.register_buffer(name, filled)

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        """x: [batch, 1, width]; place: int64 [1], where in the cache the token stands. Gives [batch, 1, width]."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        self.keys.index_copy_(2, place, key.to(self.keys.dtype))
        self.values.index_copy_(2, place, value.to(self.values.dtype))
        seen = (torch.arange(self.keys.shape[2], device=x.device) <= place)[None, None, None]
        keys, values = self.keys.to(query.dtype), self.values.to(query.dtype)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
        found: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return found


class DecoderBlock(nn.Module):
    """Cached attention and a gated feed-forward network, each behind a norm and added to the stream."""

    def __init__(self, width: int, heads: int, batch: int, length: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CachedAttention(width, heads, batch, length)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        """[batch, 1, width] to the same."""
        x = x + self.attention(self.norm_1(x), place)
        normed = self.norm_2(x)
        thought: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + thought


class Decoder(nn.Module):
    """A language model with a key-value cache: one token of each sequence in, the logits of the next out."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, batch: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, batch, length) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, place: Tensor) -> Tensor:
        """tokens: int64 [batch, 1]; place: int64 [1]. Gives [batch, vocabulary]."""
        x = self.tokens(tokens) + self.positions(place)
        for block in self.blocks:
            x = block(x, place)
        logits: Tensor = self.head(self.norm(x))[:, 0]
        return logits


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm around a shortcut."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(given, width, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(width)
        self.conv_2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)
        same = stride == 1 and given == width
        self.short = nn.Identity() if same else nn.Conv2d(given, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, given, height, width] to [batch, width, height / stride, width / stride]."""
        inside = self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x)))))
        found: Tensor = F.relu(inside + self.short(x))
        return found


class ResidualNet(nn.Module):
    """A convolutional classifier: a stem, stages that halve the picture and double the width, a linear head."""

    def __init__(self, *, width: int, stages: tuple[int, ...], classes: int, stem: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stem, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        given = width
        for stage, depth in enumerate(stages):
            wide = width * 2**stage
            for block in range(depth):
                blocks.append(Residual(given, wide, 2 if stage and not block else 1))
                given = wide
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(given, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """[batch, 3, height, width] to [batch, classes]."""
        features = self.blocks(F.relu(self.norm(self.stem(pictures))))
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


class EncoderBlock(nn.Module):
    """Attention over all tokens and a feed-forward network, each behind a norm and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same."""
        query, key, value = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        thought: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + thought


class VisionTransformer(nn.Module):
    """A classifier of patches, by the mean of its tokens."""

    def __init__(self, *, size: int, patch: int, layers: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """[batch, 3, size, size] to [batch, classes]."""
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class TimedResidual(nn.Module):
    """Two convolutions with group norm, between which the time enters."""

    def __init__(self, given: int, width: int, timed: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(8, given), nn.GroupNorm(8, width)
        self.conv_1, self.conv_2 = nn.Conv2d(given, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.time = nn.Linear(timed, width)
        self.short = nn.Identity() if given == width else nn.Conv2d(given, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """[batch, given, height, width] and time [batch, timed] to [batch, width, height, width]."""
        inside = self.conv_1(F.silu(self.norm_1(x))) + self.time(F.silu(time))[:, :, None, None]
        found: Tensor = self.conv_2(F.silu(self.norm_2(inside))) + self.short(x)
        return found


class PixelAttention(nn.Module):
    """Self-attention over the places of a picture."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width, height, width] to the same."""
        projected: Tensor = self.qkv(self.norm(x)).flatten(2)
        split = projected.reshape(len(x), 3, self.heads, -1, projected.shape[-1])
        query, key, value = split.transpose(-1, -2).unbind(1)
        attended = F.scaled_dot_product_attention(query, key, value)
        found: Tensor = self.out(attended.transpose(-1, -2).reshape(x.shape))
        return x + found


class DenoisingStep(nn.Module):
    """One step of a diffusion sampler: a U-Net with three sizes predicts the noise, and part of it is taken away."""

    def __init__(self, *, channels: int, width: int, heads: int) -> None:
        super().__init__()
        timed = 4 * width
        self.width = width
        self.time_1, self.time_2 = nn.Linear(width, timed), nn.Linear(timed, timed)
        self.first = nn.Conv2d(channels, width, 3, 1, 1)
        self.down_1, self.down_2 = TimedResidual(width, width, timed), TimedResidual(width, 2 * width, timed)
        self.half_1, self.half_2 = nn.Conv2d(width, width, 3, 2, 1), nn.Conv2d(2 * width, 2 * width, 3, 2, 1)
        self.middle_1, self.middle_2 = (TimedResidual(2 * width, 2 * width, timed) for _ in range(2))
        self.attention = PixelAttention(2 * width, heads)
        self.up_2, self.up_1 = TimedResidual(4 * width, width, timed), TimedResidual(2 * width, width, timed)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, channels, 3, 1, 1)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        """noisy: [batch, channels, height, width], both sizes divisible by 4; time: float32 [batch], from 0 to 1. Gives
        the picture a fiftieth of the way on."""
        rates = torch.exp(-math.log(1e4) * torch.arange(self.width // 2, device=time.device) / (self.width // 2))
        angles = 1000 * time[:, None] * rates
        known = self.time_2(F.silu(self.time_1(torch.cat([angles.sin(), angles.cos()], 1).to(noisy.dtype))))
        fine = self.down_1(self.first(noisy), known)
        coarse = self.down_2(self.half_1(fine), known)
        middle = self.middle_1(self.half_2(coarse), known)
        middle = self.middle_2(self.attention(middle), known)
        wide = self.up_2(torch.cat([F.interpolate(middle, scale_factor=2.0), coarse], 1), known)
        wide = self.up_1(torch.cat([F.interpolate(wide, scale_factor=2.0), fine], 1), known)
        noise: Tensor = self.last(F.silu(self.norm(wide)))
        return noisy - 0.02 * noise
