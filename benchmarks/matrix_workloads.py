"""Seven workloads of the matrix of modes and precisions, in two sizes.

small   for two cores: a step of some milliseconds
large   for a large GPU
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from matrix_models import Decoder, DenoisingStep, ResidualNet, VisionTransformer

from ampcheck.core.subject import Subject
from ampcheck.demo import CharTransformer, batch
from ampcheck.speed.matrix.stats import Workload

SIZES = ("small", "large")

RATE = 1e-6
"""Of the optimizers: so low that the weights, and with them the work, are the same after thousands of steps."""


def _of(make: Callable[[], Any], name: str, loss: Callable[[Any], Any] | None = None) -> Subject:
    """A subject whose weights and data are the same whenever it is made."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Subject(make(), name=name, loss=loss)


def _frozen(model: torch.nn.Module) -> torch.nn.Module:
    """In evaluation mode, without gradients."""
    return model.eval().requires_grad_(False)


def _decoding(size: str) -> Subject:
    layers, width, heads, sequences, length = (3, 192, 4, 2, 128) if size == "small" else (24, 1024, 16, 4, 2048)
    vocabulary = 1024 if size == "small" else 32000

    def make() -> Any:
        model = Decoder(layers=layers, width=width, heads=heads, vocabulary=vocabulary, batch=sequences, length=length)
        tokens = torch.randint(0, vocabulary, (4, sequences, 1))
        return _frozen(model), [(one, torch.tensor([length // 2 + place])) for place, one in enumerate(tokens)]

    return _of(make, "decoding")


def _batched(size: str) -> Subject:
    layers, width, heads, many, length = (2, 192, 4, 4, 64) if size == "small" else (12, 1024, 16, 32, 512)

    def make() -> Any:
        model = CharTransformer(layers=layers, width=width, heads=heads, length=length)
        return _frozen(model), batch(many, length)

    return _of(make, "batched inference")


def _convolutional(size: str) -> Subject:
    def make() -> Any:
        if size == "small":
            model, pictures = ResidualNet(width=16, stages=(2, 2, 2), classes=10, stem=1), torch.randn(4, 3, 32, 32)
        else:
            model = ResidualNet(width=64, stages=(3, 4, 6, 3), classes=1000, stem=4)
            pictures = torch.randn(64, 3, 224, 224)
        return _frozen(model), (pictures,)

    return _of(make, "convolutional net")


def _vision(size: str) -> Subject:
    def make() -> Any:
        if size == "small":
            model = VisionTransformer(size=64, patch=8, layers=3, width=128, heads=4, classes=10)
            pictures = torch.randn(4, 3, 64, 64)
        else:
            model = VisionTransformer(size=224, patch=16, layers=12, width=768, heads=12, classes=1000)
            pictures = torch.randn(64, 3, 224, 224)
        return _frozen(model), (pictures,)

    return _of(make, "vision transformer")


def _diffusion(size: str) -> Subject:
    width, heads, many, side = (32, 4, 2, 16) if size == "small" else (320, 8, 8, 64)

    def make() -> Any:
        model = DenoisingStep(channels=4, width=width, heads=heads)
        return _frozen(model), (torch.randn(many, 4, side, side), torch.linspace(0.2, 0.8, many))

    return _of(make, "diffusion step")


def _training(size: str) -> Subject:
    layers, width, heads, many, length = (2, 128, 4, 4, 32) if size == "small" else (12, 768, 12, 16, 512)

    def make() -> Any:
        return CharTransformer(layers=layers, width=width, heads=heads, length=length), batch(many, length)

    return _of(make, "training", loss=_own_loss)


def _own_loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return output[1]


def _adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def _workload(name: str, make: Callable[[str], Subject], *, scaler: bool = False) -> Mapping[str, Workload]:
    """By size."""
    trains = make is _training
    optimizer = _adamw if trains else None
    return {size: Workload(name, partial(make, size), trains, optimizer, scaler, size) for size in SIZES}


WORKLOADS: Mapping[str, Mapping[str, Workload]] = {
    "decoding": _workload("decoding", _decoding),
    "batched inference": _workload("batched inference", _batched),
    "convolutional net": _workload("convolutional net", _convolutional),
    "vision transformer": _workload("vision transformer", _vision),
    "diffusion step": _workload("diffusion step", _diffusion),
    "training": _workload("training", _training),
    "training, scaled": _workload("training, scaled", _training, scaler=True),
}
"""By name and size. `training, scaled` is `training` with a GradScaler, in every precision, to measure its cost."""
