"""The architecture of a checkpoint: of its `config.json` in a folder, or in the local cache of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampcheck.architectures.build import Architecture
from ampcheck.core.errors import UsageError


def of_name(name: str, target: str) -> Architecture:
    """The architecture of `ORG/NAME`, `ORG/NAME/SUBFOLDER` or a folder; no weights are read."""
    config = _config(name, target)
    if "_class_name" in config:
        from ampcheck.architectures import diffusion

        return diffusion.of_name(config["_class_name"], target, config)
    if "model_type" in config:
        from ampcheck.architectures import huggingface

        return huggingface.of_config(config, target)
    if "architecture" in config:
        from ampcheck.architectures import vision

        return vision.of_name(config["architecture"], f"timm:{config['architecture']}")
    raise UsageError(f"the config.json of {target} must name a model_type, _class_name or architecture; it has none")


def _config(name: str, target: str) -> Mapping[str, Any]:
    path = Path(name) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        repository, subfolder = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
        cached = try_to_load_from_cache(repository, f"{subfolder}/config.json" if subfolder else "config.json")
        if not isinstance(cached, str):
            raise UsageError(
                f"{target} needs a config.json, in the folder {name} or in the local cache of Hugging Face, and "
                f"nothing is downloaded: hf download {repository} config.json"
            )
        path = Path(cached)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} must be a JSON file: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} must have a JSON object; it has {type(config).__name__}")
    return config
