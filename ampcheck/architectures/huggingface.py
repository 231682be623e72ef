"""Architectures of transformers: by class, by model type, and by a `config.json`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ampcheck.architectures.build import Architecture
from ampcheck.architectures.inputs import calls
from ampcheck.architectures.law import VOCABULARY
from ampcheck.core.errors import UsageError, brief

_TASKS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "MODEL_FOR_CTC_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "MODEL_MAPPING",
)  # fmt: skip
"""Which of the classes of a model type stands for it: the first that it has."""

_DERIVED = (
    "transformers_version", "architectures", "_name_or_path", "dtype", "torch_dtype", "model_type", "stage_names",
    "out_features", "quantization_config", "id2label", "label2id", "_attn_implementation", "attn_implementation",
    "return_dict", "per_layer_config",
)  # fmt: skip
"""Fields that a configuration derives from others, or that name files."""


def of_name(name: str, target: str) -> Architecture:
    """The architecture of a class of transformers, or of a model type."""
    import transformers

    if name in transformers.CONFIG_MAPPING:
        config_class = transformers.CONFIG_MAPPING[name]
        return of_class(_class_for(config_class, target), config_class, {}, target)
    model_class: Any = getattr(transformers, name, None)
    config_class = getattr(model_class, "config_class", None)
    if not (isinstance(model_class, type) and config_class):
        near = difflib.get_close_matches(name, [*transformers.CONFIG_MAPPING, *dir(transformers)], 3)
        raise UsageError(
            f"{target} must name a class of models or a model type of transformers {transformers.__version__}"
            + (f"; did you mean {', '.join(near)}?" if near else "")
        )
    return of_class(model_class, config_class, {}, target)


def of_config(config: Mapping[str, Any], target: str) -> Architecture:
    """The architecture of a `config.json`."""
    import transformers

    kind = config.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise UsageError(f"{target} has the model type {kind!r}, which transformers {transformers.__version__} lacks")
    config_class = transformers.CONFIG_MAPPING[kind]
    named = [getattr(transformers, name, None) for name in config.get("architectures") or ()]
    model_class = next((each for each in named if each is not None), None) or _class_for(config_class, target)
    return of_class(model_class, config_class, config, target)


def of_class(model_class: Any, config_class: Any, values: Mapping[str, Any], target: str) -> Architecture:
    """The architecture of a class with a configuration, by default its own."""
    try:
        fields = config_class(**_plain(values)).to_dict()
    except Exception as error:
        raise UsageError(
            f"{target} has no configuration of its own: {config_class.__name__}() raised {brief(error)}; "
            "name a folder with its config.json, hf:FOLDER"
        ) from error

    def construct(reduced: dict[str, Any]) -> Any:
        config = config_class(**_plain(reduced))
        _without_cache(config)
        return model_class(config)

    return Architecture(target, _completed(_plain(fields)), construct, calls)


def _class_for(config_class: Any, target: str) -> Any:
    """The class that stands for a configuration."""
    from transformers.models.auto import modeling_auto

    for task in _TASKS:
        mapping = getattr(modeling_auto, task, {})
        if config_class in mapping:
            found = mapping[config_class]
            return found[0] if isinstance(found, tuple) else found
    raise UsageError(f"{target} names a configuration without a model: name a class, as transformers:BertModel")


def _completed(fields: dict[str, Any], of_images: bool = False) -> dict[str, Any]:
    """The fields without weights of others, and with the numbers that some configurations leave to code.

    of_images: positions in the text are those of images too, of which rotary embeddings take sections 16:24:24.
    """
    of_images = of_images or {"vision_config", "text_config"} <= fields.keys()
    result = {
        name: _completed(v, of_images) if isinstance(v, dict) and "model_type" in v else v for name, v in fields.items()
    }
    result |= {name: False for name, value in fields.items() if value is True and "pretrained" in name}
    if fields.get("vocab_size", 0) is None:
        result |= {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2}
    vision, text = result.get("vision_config"), result.get("text_config")
    if isinstance(vision, dict) and isinstance(text, dict) and isinstance(text.get("hidden_size"), int):
        handed = "hidden_size" if "embed_dim" in vision else "out_hidden_size"
        vision |= {handed: text["hidden_size"]} if handed in vision else {}
    return result | _of_heads(fields, of_images)


def _of_heads(fields: Mapping[str, Any], of_images: bool) -> dict[str, Any]:
    """The size of heads, where it is left open, and its sections."""
    heads, width, rope = (fields.get(name) for name in ("num_attention_heads", "hidden_size", "rope_parameters"))
    if not isinstance(heads, int) or not isinstance(width, int):
        return {}
    size = fields.get("head_dim") or width // heads
    result = {"head_dim": size} if "head_dim" in fields else {}
    if of_images and isinstance(rope, dict) and "rope_theta" in rope:
        part = int(size * rope.get("partial_rotary_factor", 1)) // 16
        result["rope_parameters"] = {"mrope_section": [2 * part, 3 * part, 3 * part], **rope}
    return result


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a configuration takes; the types of nested ones stay."""
    kept = {name: value for name, value in fields.items() if name not in _DERIVED}
    return {
        name: {**({"model_type": value["model_type"]} if "model_type" in value else {}), **_plain(value)}
        if isinstance(value, Mapping) and ("model_type" in value or name.endswith("config"))
        else value
        for name, value in kept.items()
    }


def _without_cache(config: Any) -> None:
    """A forward that is judged has no use for keys and values of earlier ones."""
    for each in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())):
        if getattr(each, "use_cache", None):
            each.use_cache = False
