"""Positions, angles and time."""

import math

import torch
from torch import nn

from handwritten.case import FLOAT16, LOW, autocast, case, enter, wide


@case("collision", LOW)
def rotary_angles(dtype):
    """Rotary tables from positions, frequencies and angles in the format of the queries."""
    position = torch.arange(4096, dtype=dtype)  # lost here
    frequency = 1.0 / 10000 ** (torch.arange(0, 64, 2, dtype=dtype) / 64)  # lost here
    angle = position[-32:, None] * frequency  # lost here
    return torch.cat([angle.cos(), angle.sin()], -1)  # lost here


class RotaryEmbedding(nn.Module):
    """Rotary angles as a matrix product, which autocast runs in 16 bits."""

    def __init__(self, width, dtype):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=dtype) / width))

    def forward(self, position):
        angle = position[:, None].to(self.inv_freq.dtype) @ self.inv_freq[None, :]  # lost here
        return torch.cat([angle.cos(), angle.sin()], -1)  # lost here


@case("collision", LOW, parts=(RotaryEmbedding,))
def rotary_under_autocast(dtype):
    """The float32 table of frequencies meets the positions in a product under autocast."""
    rotary = RotaryEmbedding(64, wide(dtype))
    with autocast(dtype):
        return rotary(torch.arange(3000, 3064))


@case("cancellation", LOW)
def sinusoidal_frequencies(dtype):
    """Sine positions whose frequencies come from exp in half."""
    position = torch.arange(800, 1000, dtype=dtype)[:, None]  # lost here
    frequency = torch.exp(torch.arange(0, 64, 2, dtype=dtype) * (-math.log(10000.0) / 64))  # lost here
    return torch.sin(position * frequency)  # lost here


class TimestepEmbedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.half = width // 2

    def forward(self, timestep):
        exponent = -math.log(10000) * torch.arange(self.half, dtype=timestep.dtype) / self.half
        argument = timestep[:, None] * exponent.exp()  # lost here
        return torch.cat([argument.cos(), argument.sin()], -1)  # lost here


@case("cancellation", LOW, parts=(TimestepEmbedding,))
def timestep_embedding(dtype):
    """Diffusion timesteps cast to the format of the latents before the sines."""
    timestep = torch.tensor([997, 981, 741, 503]).to(dtype)  # lost here
    return TimestepEmbedding(32)(timestep)


@case("overflow", LOW)
def seconds_since_1970(dtype):
    """Time of the week from seconds since 1970: inf in float16, steps of three months in bfloat16."""
    seconds = 1_700_000_000 + 7919 * torch.arange(64)
    angle = seconds.to(dtype) * (2 * math.pi / 604_800)  # lost here
    return torch.stack([angle.sin(), angle.cos()], -1)  # lost here


@case("cancellation", LOW)
def bilinear_weights(dtype):
    """Weights of a resize as the fraction of source coordinates up to 900."""
    source = (torch.arange(1600, 2432, dtype=dtype) + 0.5) * 0.37 - 0.5  # lost here
    return source - source.floor()  # lost here


@case("cancellation", LOW)
def fourier_features_of_pixels(dtype):
    """sin(2^k * pi * i / width) up to k = 9: the quotient is rounded before it is multiplied."""
    position = torch.arange(333, dtype=dtype) / 333  # lost here
    scale = 2.0 ** torch.arange(10, dtype=dtype) * math.pi  # lost here
    return torch.sin(position * scale[:, None])  # lost here


@case("overflow", FLOAT16)
def wavelengths_of_long_context(dtype):
    """Wavelengths of rotary frequencies with base 500,000, as scaling for long contexts computes them."""
    inv_freq = 1.0 / 500_000.0 ** (torch.arange(0, 128, 2, dtype=dtype) / 128)  # lost here
    return (2 * math.pi / inv_freq).log2()  # lost here


@case("collision", LOW)
def window_offsets(dtype):
    """Relative offsets i - j from absolute positions in a long text, in half."""
    position = torch.arange(6000, 6032).to(dtype)  # lost here
    return (position[:, None] - position[None, :]).long()  # lost here


@case("absorption", LOW)
def rope_offset_while_decoding(dtype):
    """Decoding adds one to the position of the cache; it stays at 2048, or at 256."""
    position = torch.tensor(200.0, dtype=dtype)
    angles = []
    for _ in range(2100):
        position = position + 1  # lost here
        angles.append(position * 0.01)
    return torch.stack(angles[-50:]).sin()


@case("cancellation", LOW)
def minutes_between_events(dtype):
    """The gap of two visits from minutes of the month, both cast before they are subtracted."""
    torch.manual_seed(0)
    start = torch.randint(20_000, 40_000, (64,))
    gap = torch.randint(1, 15, (64,))
    return (start + gap).to(dtype) - start.to(dtype)  # lost here


@case("cancellation", LOW)
def learned_frequencies_of_time(dtype):
    """Time2Vec: the phase of day 1500 times a frequency that is a learned weight is reduced by floor."""
    day = torch.arange(1500, 1530, dtype=dtype)  # lost here
    cycles = day * (1 / 7)  # lost here
    return (2 * math.pi * (cycles - cycles.floor())).cos()  # lost here


@case("absorption", LOW)
def jittered_coordinates(dtype):
    """Sub-pixel jitter of 0.1 added to pixel coordinates of a 4K image, then subtracted from their centre."""
    torch.manual_seed(0)
    jitter = enter(0.1 * torch.randn(64), dtype)
    pixel = torch.arange(3000, 3064).to(dtype) + jitter  # lost here
    return pixel - torch.arange(3000, 3064).to(dtype)  # lost here
