"""What the suites on the cost of compilation run, each by a name that a fresh process can load."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck import Subject
from ampcheck.demo import CharTransformer, batch

LENGTHS = (24, 32, 40, 48)
"""Of the calls whose shapes vary, in characters."""


SIZES = {"small": (8, 128, 4, 4, 48), "medium": (12, 768, 12, 1, 128), "large": (24, 1024, 16, 16, 512)}
"""Equal blocks, their width and heads, sequences and their length. On a CPU calls dominate the first and kernels the
second; the third is for a large GPU."""


def _frozen(model: torch.nn.Module) -> torch.nn.Module:
    return model.eval().requires_grad_(False)


def _deep(size: str, *, trains: bool) -> Subject:
    torch.manual_seed(0)
    layers, width, heads, many, length = SIZES[size]
    model = CharTransformer(layers=layers, width=width, heads=heads, length=length)
    name = f"{layers} blocks, {'training' if trains else 'inference'}"
    loss: Any = _own_loss if trains else None
    return Subject((model if trains else _frozen(model), batch(many, length)), name=name, loss=loss)


def _own_loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output[1]
    return loss


def deep() -> Subject:
    """Equal blocks."""
    return _deep("small", trains=False)


def deep_training() -> Subject:
    return _deep("small", trains=True)


def deep_medium() -> Subject:
    return _deep("medium", trains=False)


def deep_training_medium() -> Subject:
    return _deep("medium", trains=True)


def deep_large() -> Subject:
    return _deep("large", trains=False)


def deep_training_large() -> Subject:
    return _deep("large", trains=True)


def varying() -> Subject:
    """Calls of four lengths."""
    torch.manual_seed(0)
    model = _frozen(CharTransformer(layers=2, width=128, length=max(LENGTHS)))
    return Subject((model, [batch(4, length) for length in LENGTHS]), name="varying lengths")


def varying_large() -> Subject:
    torch.manual_seed(0)
    model = _frozen(CharTransformer(layers=12, width=1024, heads=16, length=16 * max(LENGTHS)))
    return Subject((model, [batch(16, 16 * length) for length in LENGTHS]), name="varying lengths")


def fixed() -> Subject:
    """As many calls of one length, with as many characters in all."""
    torch.manual_seed(0)
    model = _frozen(CharTransformer(layers=2, width=128, length=max(LENGTHS)))
    length = sum(LENGTHS) // len(LENGTHS)
    return Subject((model, [batch(4, length, seed=n) for n in range(len(LENGTHS))]), name="one length")


def fixed_large() -> Subject:
    torch.manual_seed(0)
    model = _frozen(CharTransformer(layers=12, width=1024, heads=16, length=16 * max(LENGTHS)))
    length = 16 * sum(LENGTHS) // len(LENGTHS)
    return Subject((model, [batch(16, length, seed=n) for n in range(len(LENGTHS))]), name="one length")


def sized(name: str, size: str) -> Subject:
    """One of the above by its name and size."""
    subject: Subject = globals()[name if size == "small" else f"{name}_{size}"]()
    return subject
