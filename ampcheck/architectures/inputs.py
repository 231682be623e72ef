"""Inputs of a model of transformers, from the names of its signature and the numbers of its configuration."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ampcheck.architectures.build import Inputs

_COLUMNS, _ROWS = 16, 2
_TOKENS = ("image_token_id", "image_token_index")


def look_up(config: Any, *names: str) -> Any:
    """The first of these fields that a configuration has, or one in it."""
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    parts += [inner for part in parts[1:] for inner in vars(part).values() if hasattr(inner, "to_dict")]
    found = (getattr(part, name, None) for name in names for part in parts)
    return next((value for value in found if value is not None), None)


def _number(value: Any, default: int) -> int:
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def _pair(size: Any) -> tuple[int, int]:
    """Height and width."""
    sides = list(size.values()) if isinstance(size, Mapping) else size if isinstance(size, (list, tuple)) else [size]
    return sides[0], sides[-1]


def calls(model: Any) -> Iterator[Inputs]:
    """Calls that a model may take: with all kinds of data that it knows and a loss first, then with less.

    Raises what the model raised where it can make no features of any image, once there is nothing else to try.
    """
    data = _Data(model)
    refused: Exception | None = None
    for chosen in itertools.product(*data.alternatives()):
        try:
            tensors = data.completed({name: value for part in chosen for name, value in part.items()})
        except Exception as error:  # noqa: BLE001  # the library's code may raise anything
            refused = refused or error
            continue
        if tensors:
            yield Inputs(tensors)
            for labels in data.labels(tensors):
                yield Inputs({**tensors, "labels": labels}, loss=True)
    if refused is not None:
        raise refused


class _Data:
    """Tensors by the names of a forward."""

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.names = model, model.config, inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(0)
        sizes = [
            _number(look_up(self.config, name), 0) for name in ("vocab_size", "text_vocab_size", "input_vocab_size")
        ]
        self.vocabulary = min([n for n in sizes if n] or [64])
        size = look_up(self.config, "image_size", "img_size", "max_img_size")
        self.sides = [size] if size else [64, 128, 224]
        self.channels = _number(
            look_up(self.config, "num_channels", "in_channels", "in_chans", "num_input_channels"), 3
        )

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def ids(self, *shape: int) -> torch.Tensor:
        low = min(5, self.vocabulary // 4)
        return torch.randint(low, max(low + 1, self.vocabulary // 2), shape, generator=self.generator)

    def alternatives(self) -> list[list[dict[str, Any]]]:
        """For each kind of data that the signature knows, its forms and at the end none."""
        kinds = []
        if "pixel_values" in self.names:
            kinds.append([*self.images(), {}])
        elif "pixel_values_videos" in self.names:
            kinds.append([*self.videos("pixel_values_videos"), {}])
        for name, forms in (
            ("input_features", self.spectra),
            ("input_values", self.waves),
            ("past_values", self.series),
        ):
            if name in self.names:
                kinds.append([*({name: form} for form in forms()), {}])
        if "input_ids" in self.names:
            books = _number(look_up(self.config, "num_codebooks"), 0)
            several = [{"input_ids": self.ids(books, _COLUMNS)}] if books else []
            kinds.append([{"input_ids": self.ids(_ROWS, _COLUMNS)}, *several, {}])
        return kinds

    def images(self) -> Iterator[dict[str, Any]]:
        channels = self.channels
        if "image_grid_thw" in self.names or "grid_thw" in self.names:
            patch = _number(look_up(self.config, "patch_size"), 8)
            depth = channels * patch * patch * _number(look_up(self.config, "temporal_patch_size"), 1)
            yield {"pixel_values": self.noise(16, depth), "image_grid_thw": torch.tensor([[1, 4, 4]])}
        for size in self.sides:
            yield {"pixel_values": self.noise(_ROWS, channels, *_pair(size))}
        yield from self.videos("pixel_values")
        patch = _number(look_up(self.config, "patch_size"), 8)
        yield {"pixel_values": self.noise(1, 16, channels * patch * patch)}

    def videos(self, name: str) -> Iterator[dict[str, Any]]:
        frames = _number(look_up(self.config, "num_frames", "frames_per_clip"), 2)
        for count in dict.fromkeys((frames, 1, 3)):
            yield {name: self.noise(1, count, self.channels, *_pair(self.sides[0]))}

    def spectra(self) -> Iterator[torch.Tensor]:
        names = ("num_mel_bins", "feature_projection_input_dim", "feature_size", "input_feat_per_channel", "mel_dim")
        bands = _number(look_up(self.config, *names, "input_feat_size"), 80)
        frames = 2 * _number(look_up(self.config, "max_source_positions"), 32)
        yield self.noise(_ROWS, 64, bands)
        yield self.noise(_ROWS, bands, frames)

    def waves(self) -> Iterator[torch.Tensor]:
        yield self.noise(_ROWS, 4000)
        yield self.noise(_ROWS, 1, 4000)
        frames = _number(getattr(self.config, "max_length", None), 64)
        yield self.noise(_ROWS, frames, _number(look_up(self.config, "num_mel_bins"), 80))

    def series(self) -> Iterator[torch.Tensor]:
        length = _number(look_up(self.config, "context_length"), 32)
        yield self.noise(_ROWS, length, _number(look_up(self.config, "num_input_channels"), 1))
        yield self.noise(_ROWS, length)

    def completed(self, data: dict[str, Any]) -> dict[str, Any]:
        """The data with what follows from it: tokens that stand for an image, ids of a decoder, boxes of words."""
        token = look_up(self.config, *_TOKENS)
        if "pixel_values" in data and "input_ids" in data and isinstance(token, int):
            data = self.with_image_tokens(data, token)
        if "decoder_input_ids" in self.names and getattr(self.config, "is_encoder_decoder", False):
            rows = len(next(iter(data.values())))
            data["decoder_input_ids"] = self.ids(rows, _COLUMNS // 2)
        for name, each in self.names.items():
            if each.default is each.empty and name.endswith("_inputs") and name not in data and data:
                words = _number(look_up(self.config, name.replace("_inputs", "_seq_len")), _COLUMNS)
                data[name] = self.ids(len(next(iter(data.values()))), words)
        if "bbox" in self.names and "input_ids" in data:
            corner = torch.randint(0, 50, (*data["input_ids"].shape, 2), generator=self.generator)
            data["bbox"] = torch.cat([corner, corner + 10], -1)
        return data

    def with_image_tokens(self, data: dict[str, Any], token: int) -> dict[str, Any]:
        """One image, and as many of its tokens as it has features."""
        if "image_grid_thw" not in data:
            data = {**data, "pixel_values": data["pixel_values"][:1]}
        if "image_sizes" in self.names:
            data["image_sizes"] = torch.tensor([_pair(self.sides[0])])
        count = self.image_features(data)
        text = self.ids(1, _COLUMNS - 4)
        data["input_ids"] = torch.cat([text[:, :4], torch.full((1, count), token), text[:, 4:]], 1)
        if "mm_token_type_ids" in self.names:
            data["mm_token_type_ids"] = (data["input_ids"] == token).long()
        return data

    def image_features(self, data: Mapping[str, Any]) -> int:
        """Return how many rows the model makes of the image."""
        owners = (self.model, self.model.base_model)
        method = next((m for each in owners if (m := getattr(each, "get_image_features", None)) is not None), None)
        if method is None:
            return 0
        taken = inspect.signature(inspect.unwrap(method)).parameters
        with torch.no_grad():
            features = method(**{name: value for name, value in data.items() if name in taken and name != "input_ids"})
        features = getattr(features, "pooler_output", features)
        rows = features if isinstance(features, (list, tuple)) else [features]
        return sum(row.numel() // row.shape[-1] for row in rows)

    def labels(self, data: Mapping[str, Any]) -> Iterator[Any]:
        """Yield what the model may take as labels, if it takes any."""
        if "labels" not in self.names:
            return
        words = data.get("decoder_input_ids", data.get("input_ids"))
        if words is not None:
            yield words.clone()
        rows = len(next(iter(data.values())))
        yield torch.arange(rows) % 2
        yield torch.zeros(rows, *_pair(self.sides[0]), dtype=torch.long)
        yield self.ids(rows, 4)
