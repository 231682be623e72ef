"""With empty caches, what every first compilation needs is compiled while eager code runs, and is no burden else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from ampcheck import audit
from ampcheck.torchtools import warm_up
from ampcheck.torchtools.dynamo import default_cache_folder
from ampcheck.torchtools.warm_up import compiler_warming_up


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of an Inductor cache that does not exist yet, on a machine with two cores."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warm_up, "_cores", lambda: 2)
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_process_beside_the_block_fills_empty_caches(cache: Path) -> None:
    with compiler_warming_up() as process:
        assert process is not None
        assert process.wait(300) == 0
    assert any(cache.rglob("*.so")), "the check of vector instructions, and a kernel"


def test_the_process_ends_with_the_block(cache: Path) -> None:
    with pytest.raises(KeyError), compiler_warming_up() as process:
        raise KeyError
    assert process is not None
    assert process.poll() is not None


def test_caches_with_content_start_no_process(cache: Path) -> None:
    (cache / "ab").mkdir(parents=True)
    with compiler_warming_up() as process:
        assert process is None


def test_the_default_folder_counts_where_no_other_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(warm_up, "_cores", lambda: 2)
    Path(default_cache_folder(), "ab").mkdir(parents=True)
    with compiler_warming_up() as process:
        assert process is None


def test_a_single_core_is_left_to_the_audit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "_cores", lambda: 1)
    with compiler_warming_up() as process:
        assert process is None


@pytest.mark.parametrize("compile", [False, True])
def test_an_audit_starts_it_if_it_compiles(cache: Path, monkeypatch: pytest.MonkeyPatch, compile: bool) -> None:
    started = list[object]()

    def start() -> subprocess.Popen[bytes] | None:
        started.append(None)
        return None

    monkeypatch.setattr(warm_up, "_start", start)
    audit((torch.nn.Linear(2, 2), (torch.ones(1, 2),)), dtype="bfloat16", compile=compile, checks=["overflow"])
    assert len(started) == compile
