"""Targets without code, wherever a target is named; nothing is downloaded."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from ampcheck.cli.main import main
from ampcheck.core.errors import UsageError
from ampcheck.core.subject import is_architecture, load_subject

LLAMA = "transformers:LlamaForCausalLM"


def requires(*names: str) -> pytest.MarkDecorator:
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"needs {', '.join(lacking)}")


def test_architectures_are_told_from_code() -> None:
    assert all(map(is_architecture, (LLAMA, "timm:resnet50", "hf:org/name", "torchvision:resnet18")))
    assert not any(map(is_architecture, ("my.models:factory", "timm.py:factory", "transformers", "zoo.py:ZOO[hf:x]")))


@pytest.mark.parametrize("package", ["transformers", "diffusers", "timm", "torchvision"])
def test_a_library_that_is_missing_is_named_with_its_cure(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=f"needs the package {package}, which is not installed: pip install {package}$"
    ):
        load_subject(f"{package}:Anything")


@requires("transformers")
@pytest.mark.parametrize(("target", "name"), [(LLAMA, "LlamaForCausalLM"), ("transformers:qwen3", "Qwen3ForCausalLM")])
def test_a_class_and_a_model_type_are_built_small(target: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    subject = load_subject(target)
    config = subject.model.config
    assert (type(subject.model).__name__, subject.name) == (name, target)
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert sum(weight.numel() for weight in subject.model.parameters()) < 1_000_000
    output = subject.model(**subject.calls[0].kwargs)
    assert subject.loss is not None
    assert subject.loss(output).isfinite()
    assert f"{target} is built small" in capsys.readouterr().err


@requires("transformers", "huggingface_hub")
@pytest.mark.parametrize("before", [None, "0", "1"])
def test_nothing_is_downloaded_while_a_model_is_built_and_after_it_all_is_as_before(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", before == "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if before is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", before)
    seen = []

    def build(architecture: object) -> object:
        seen.append((os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE))
        raise UsageError("enough")

    monkeypatch.setattr("ampcheck.architectures.build.build", build)
    with pytest.raises(UsageError, match="enough"):
        load_subject(LLAMA)
    assert seen == [("1", True)]
    assert (os.environ.get("HF_HUB_OFFLINE"), constants.HF_HUB_OFFLINE) == (before, before == "1")


@requires("transformers")
def test_an_unknown_name_says_what_is_near() -> None:
    with pytest.raises(UsageError, match=r"transformers:LlamaForCausal must name .* did you mean LlamaForCausalLM"):
        load_subject("transformers:LlamaForCausal")


@requires("transformers")
def test_the_audit_of_an_architecture_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", LLAMA, "--fast", "--dtype", "bfloat16"]) == 0
    assert f"audit of {LLAMA}" in capsys.readouterr().out


@requires("transformers")
def test_a_lock_of_an_architecture_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["policy", "lock", LLAMA]) == 0
    [lock] = tmp_path.iterdir()
    assert LLAMA in lock.read_text(encoding="utf-8")


@requires("transformers", "huggingface_hub")
def test_the_config_of_a_folder_is_enough(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 64,
        "hidden_size": 8192,
    }
    config |= {"num_key_value_heads": 8, "num_hidden_layers": 80, "intermediate_size": 28672, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    subject = load_subject(f"hf:{tmp_path}")
    small = subject.model.config
    assert small.num_attention_heads == 8 * small.num_key_value_heads
    assert small.hidden_size // small.num_attention_heads == small.head_dim
    assert {weight.dtype for weight in subject.model.parameters()} == {torch.float32}


@requires("huggingface_hub")
def test_a_repository_that_is_not_in_the_cache_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"nothing is downloaded: hf download org/name config.json"):
        load_subject("hf:org/name")


@requires("torchvision")
@pytest.mark.parametrize("name", ["resnet18", "vit_b_16"])
def test_models_of_torchvision_run(name: str) -> None:
    subject = load_subject(f"torchvision:{name}")
    assert subject.model(*subject.calls[0].args).shape == (2, 1000)


@requires("timm")
def test_models_of_timm_run() -> None:
    subject = load_subject("timm:resnet50")
    assert subject.model(*subject.calls[0].args).shape[0] == 2


@requires("diffusers")
def test_models_of_diffusers_run() -> None:
    subject = load_subject("diffusers:UNet2DConditionModel")
    assert set(subject.calls[0].kwargs) >= {"sample", "timestep", "encoder_hidden_states"}
    assert sum(weight.numel() for weight in subject.model.parameters()) < 20_000_000
