"""Architectures of diffusers: by class, from the defaults of its constructor, and by a `config.json`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ampcheck.architectures.build import Architecture, Inputs
from ampcheck.core.errors import UsageError
from ampcheck.core.text import did_you_mean

_TEXT = (
    "encoder_hid_dim", "joint_attention_dim", "cross_attention_dim", "text_dim", "text_embed_dim", "caption_channels",
    "cross_attention_input_dim", "encoder_hidden_size", "caption_dim", "text_in_dim", "text_hidden_dim", "cap_feat_dim",
)  # fmt: skip
"""Fields with the width of the text that a model attends to."""

_USUAL = {"in_channels": 4, "sample_size": 16}
"""Values of arguments that some constructors leave open."""

_WORDS, _FRAMES, _SIDE = 8, 5, 16


def of_name(name: str, target: str, values: Mapping[str, Any] | None = None) -> Architecture:
    """The architecture of a class of diffusers. values: of its `config.json`, over the defaults."""
    import diffusers

    model_class = getattr(diffusers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, (diffusers.ModelMixin, torch.nn.Module))):
        near = did_you_mean(name, dir(diffusers))
        raise UsageError(
            f"{target} must name a class of models of diffusers {diffusers.__version__}; {near}".rstrip("; ")
        )
    parameters = inspect.signature(model_class.__init__).parameters
    fields = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    fields |= {name: value for name, value in _USUAL.items() if fields.get(name, 0) is None}
    fields |= {name: value for name, value in (values or {}).items() if name in parameters}
    return Architecture(target, fields, lambda reduced: model_class(**reduced), calls)


def calls(model: Any) -> Iterator[Inputs]:
    """Calls that a model may take: with all that it knows first, then with what it requires alone."""
    parameters = inspect.signature(model.forward).parameters
    required = [
        name for name, each in parameters.items() if each.default is each.empty and each.kind != each.VAR_KEYWORD
    ]
    for form, width, time in itertools.product(_latents(model.config), _widths(model.config), (True, False)):
        data = _tensors(model.config, form, width, time)
        known = {name: value for name, value in data.items() if name in parameters}
        if all(name in known for name in required):
            yield Inputs(known)
            yield Inputs(
                {
                    name: value
                    for name, value in known.items()
                    if name in (*required, "timestep", "encoder_hidden_states")
                }
            )


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _latents(config: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield what is denoised or encoded: images, videos, rows of patches or sound, as the configuration suggests."""
    generator = torch.Generator().manual_seed(0)
    channels = _number(config, "in_channels", "audio_channels", "num_channels_latents", "out_channels") or 3
    side = _number(config, "sample_size", "sample_height") or _SIDE
    side = side if side in range(4, 65) else _SIDE
    shapes = (
        (1, channels, side, side), (1, channels, 4 * _SIDE, 4 * _SIDE), (1, channels, _FRAMES, side, side),
        (1, channels, 4, side, side), (1, channels, _FRAMES, 2 * _SIDE, 2 * _SIDE),
        (1, _SIDE * _SIDE // 16, channels), (1, channels, 2 * _SIDE), (1, channels, 1024),
    )  # fmt: skip
    for shape in shapes:
        yield torch.randn(shape, generator=generator)


def _widths(config: Mapping[str, Any]) -> list[int]:
    """Widths that text may have, and that of no text."""
    widths = [_number(config, name) for name in _TEXT]
    return list(dict.fromkeys(width for width in widths if width)) or [_SIDE]


def _tensors(config: Mapping[str, Any], latent: torch.Tensor, width: int, whole: bool) -> dict[str, Any]:
    """Tensors by the names that forward methods of diffusers have. whole: the timestep is an integer."""
    generator = torch.Generator().manual_seed(1)
    time = torch.full((1,), 7) if whole else torch.full((1,), 0.5)
    masks = ("encoder_attention_mask", "encoder_hidden_states_mask", "text_embedding_mask", "encoder_mask")
    named: dict[str, Any] = dict.fromkeys(("sample", "hidden_states", "latents", "x"), latent)
    named |= dict.fromkeys(("timestep", "timesteps", "timestep_r", "r_timestep", "t", "timestep_ratio"), time)
    named |= dict.fromkeys(("encoder_hidden_states", "cap_feats"), torch.randn(1, _WORDS, width, generator=generator))
    named |= dict.fromkeys(masks, torch.ones(1, _WORDS, dtype=torch.bool))
    if pooled := _number(config, "pooled_projection_dim"):
        named["pooled_projections"] = torch.randn(1, pooled, generator=generator)
    if _number(config, "num_embeds_ada_norm", "num_class_embeds"):
        named["class_labels"] = torch.zeros(1, dtype=torch.long)
    if config.get("guidance_embeds"):
        named["guidance"] = torch.ones(1)
    if conditioned := _number(config, "conditioning_channels"):
        sides = [8 * side for side in latent.shape[-2:]]
        named["controlnet_cond"] = torch.randn(1, conditioned, *sides, generator=generator)
    if latent.dim() == 3:
        rows = latent.shape[1]
        named |= {"img_ids": torch.zeros(rows, 3), "txt_ids": torch.zeros(_WORDS, 3)}
        named |= {"num_frames": 1, "height": rows // 4, "width": 4}
    elif latent.dim() == 5:
        named["num_frames"] = latent.shape[2]
    return named
