"""Architectures of timm and torchvision: by the name under which the library builds them, without weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from ampcheck.architectures.build import Architecture, Inputs
from ampcheck.core.errors import UsageError
from ampcheck.core.text import did_you_mean

_SIDES = (64, 96, 128, 224)


def of_name(name: str, target: str) -> Architecture:
    """The architecture that timm or torchvision builds by a name."""
    builder = _timm(name, target) if target.startswith("timm:") else _torchvision(name, target)
    return of_builder(builder, target)


def of_builder(builder: Callable[[], nn.Module], target: str) -> Architecture:
    """The architecture that a builder makes: its class with what the builder hands to the constructor.

    A class that is handed modules is built as it is.
    """
    model_class, fields = _constructor(builder)

    def construct(reduced: dict[str, Any]) -> nn.Module:
        return builder() if reduced == fields else model_class(**copy.deepcopy(reduced))

    return Architecture(target, fields, construct, _calls)


def _constructor(builder: Callable[[], nn.Module]) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of the model, and what its constructor takes, with the defaults; nothing if it is handed modules."""
    model_class = type(builder())
    original, recorded = model_class.__init__, dict[str, Any]()
    signature = inspect.signature(original)

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is model_class and not recorded:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            recorded.update(copy.deepcopy(dict(list(bound.arguments.items())[1:])))  # constructors change their own
        original(self, *args, **kwargs)

    with mock.patch.object(model_class, "__init__", record):
        builder()
    for name, parameter in list(signature.parameters.items())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            recorded |= recorded.pop(name)
        elif parameter.kind is parameter.VAR_POSITIONAL and recorded.pop(name):
            return model_class, {}
    return model_class, {} if any(isinstance(value, nn.Module) for value in recorded.values()) else recorded


def _timm(name: str, target: str) -> Callable[[], nn.Module]:
    import timm

    if not timm.is_model(name):
        near = did_you_mean(name, timm.list_models())
        raise UsageError(f"{target} must name a model of timm {timm.__version__}; {near}".rstrip("; "))
    return partial(timm.create_model, name, pretrained=False)


def _torchvision(name: str, target: str) -> Callable[[], nn.Module]:
    import torchvision

    if name not in torchvision.models.list_models():
        near = did_you_mean(name, torchvision.models.list_models())
        raise UsageError(f"{target} must name a model of torchvision {torchvision.__version__}; {near}".rstrip("; "))
    if name.startswith("quantized_"):
        raise UsageError(f"{target} computes in integers: it has no float weights that mixed precision could touch")
    builder = torchvision.models.get_model_builder(name)
    taken = inspect.signature(builder).parameters
    return partial(builder, **{key: None for key in ("weights", "weights_backbone") if key in taken})


def _calls(model: nn.Module) -> Iterator[Inputs]:
    """Images that a model may take: small ones first."""
    generator = torch.Generator().manual_seed(0)
    default = getattr(model, "default_cfg", None) or getattr(model, "pretrained_cfg", None) or {}
    sides = [*_own_sides(model), *_SIDES, *(default.get("input_size") or ())[1:2]]
    channels = getattr(model, "in_chans", None) or 3
    for side in dict.fromkeys(sides):
        image = torch.randn(2, channels, side, side, generator=generator)
        yield Inputs({}, args=(image,))
    for side in (64, 128, 224):
        frames = torch.randn(1, 3, 16, side, side, generator=generator)
        image = torch.rand(1, 3, side, side, generator=generator)
        yield Inputs({}, args=(frames,))
        yield Inputs({}, args=([image[0]],))
        yield Inputs({}, args=(image, image.flip(-1)))


def _own_sides(model: nn.Module) -> list[int]:
    """The sides of images that the model was built for."""
    found = [
        getattr(part, name, None)
        for part in (model, getattr(model, "patch_embed", None))
        for name in ("image_size", "img_size")
    ]
    return [n[0] if isinstance(n, (tuple, list)) else n for n in found if n]
