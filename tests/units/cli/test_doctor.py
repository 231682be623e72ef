"""`ampcheck doctor`: each part of the machine with yes or no, and with what follows from a no."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ampcheck.cli.main import main
from ampcheck.tools import doctor
from ampcheck.tools.doctor import Fact, examine


def facts() -> dict[str, Fact]:
    return {fact.name: fact for fact in examine(quick=True)}


def test_every_part_is_named_with_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick"]) == 0
    out = capsys.readouterr().out
    for name in ("Python", "PyTorch", "device cpu", "torch.compile", "CPU kernels in bfloat16", "pytest plugin", "git"):
        assert f"  {name}: " in out
    assert torch.__version__ in out


def test_a_part_that_is_missing_says_what_follows_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["doctor", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("no   torch.compile: no C++ compiler on the PATH")
    assert lines[place + 1].startswith("       without it: compiled runs are skipped")
    assert lines[place + 2].startswith("       to get it: install a C++ compiler")


def test_each_no_has_a_consequence_and_a_cure() -> None:
    assert [fact.name for fact in facts().values() if fact.present is False and not (fact.without and fact.cure)] == []


def test_what_quick_does_not_try_is_neither_yes_nor_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("CXX", "c++")
    assert main(["doctor", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "?    torch.compile: not tried (--quick) with /bin/c++" in lines
    assert lines[-1].endswith("; 1 not tried")


def test_without_git_neither_bisect_nor_a_base_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert facts()["git"].without.endswith(": bisect, speed --base")


def test_only_packages_that_ampcheck_imports_are_looked_for() -> None:
    sources = [path.read_text(encoding="utf-8") for path in Path(doctor.__file__).parents[1].rglob("*.py")]
    lazy = {"xdist"}  # pytest's, which the plugin asks for its workers
    for package in doctor._OPTIONAL.keys() - lazy:
        pattern = re.compile(rf"^\s*(from|import) (torch\.utils\.)?{package}\b", re.MULTILINE)
        assert any(pattern.search(text) for text in sources), package
    assert {"tensorboard", "wandb"} <= facts().keys()


def test_a_folder_of_logs_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert (facts()["wandb"].present, facts()["wandb"].found) == (False, "not installed")


def test_torch_compile_is_tried_and_not_only_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "no_compiler", lambda device: "torch.compile does not work here: no header")
    found = {fact.name: fact for fact in examine()}["torch.compile"]
    assert (found.present, found.found) == (False, "torch.compile does not work here: no header")


def test_a_device_that_is_missing_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_present", lambda kind: False)
    absent = next(fact for name, fact in facts().items() if name.startswith("devices ") and "cuda" in name)
    assert not absent.present
    assert "autocast policies on the CPU" in absent.without


def test_a_release_without_a_policy_names_the_one_that_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    fact = facts()["autocast policies"]
    assert not fact.present
    assert "compares PyTorch 2.99 with the policy of 2.15" in fact.without


def test_kernels_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise RuntimeError("\"softmax\" not implemented for 'Half'")

    calls: dict[str, Callable[[], object]] = {"matmul": lambda: None, "softmax": refused}
    monkeypatch.setattr(doctor, "_kernel_calls", lambda dtype: calls)
    fact = facts()["CPU kernels in float16"]
    assert (fact.present, fact.found) == (False, "1 of 2 tried; none for softmax")


def test_a_plugin_that_pytest_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    fact = facts()["pytest plugin"]
    assert not fact.present
    assert fact.cure == "run pytest -p ampcheck.plugin.plugin"


def test_the_defaults_of_torch_are_as_before() -> None:
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_autocast_enabled("cpu"), torch.get_rng_state()
    facts()
    after = torch.get_default_dtype(), torch.get_num_threads(), torch.is_autocast_enabled("cpu"), torch.get_rng_state()
    assert before[:3] == after[:3]
    assert torch.equal(before[3], after[3])


def test_a_torch_that_cannot_be_imported_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')")
    root = str(Path(doctor.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "ampcheck", "doctor"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "ampcheck: nothing can be judged, since torch cannot be imported: "
        "ImportError: libtorch_cpu.so: cannot open shared object file\n"
    )
