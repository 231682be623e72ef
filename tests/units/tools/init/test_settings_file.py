"""Targets are added to pyproject.toml, and every other byte stays."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ampcheck.core.errors import UsageError
from ampcheck.core.settings import load_settings
from ampcheck.tools.init.pyproject import read_pyproject, with_targets

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TARGETS = ["tests/test_amp.py:gpt", "train.py:main"]
TEXTS = {
    "nothing": "",
    "a project": '[project]\nname = "a"  # mine\n\n\n[tool.ruff]\nline-length=120\n',
    "no last line end": "[tool.ruff]\nline-length = 120",
    "windows": '[project]\r\nname = "a"\r\n',
    "an own table": "[tool.ampcheck]  # ours\nfail-on = 'warn'\n\n[tool.ruff]\n",
    "the last table": "[tool.ruff]\n\n[tool.ampcheck]",
    "a table below": "[tool.ampcheck.limits]\nflush = 2.0\n",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_line_that_was_there_stays(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_bytes(text.encode())
    added = with_targets(read_pyproject(tmp_path), dict.fromkeys(TARGETS, ""))
    (tmp_path / "pyproject.toml").write_bytes(added.encode())
    assert [target.target for target in load_settings(tmp_path).targets] == TARGETS
    lines = added.splitlines(keepends=True)
    for line in text.splitlines(keepends=True)[:-1]:
        assert lines.pop(lines.index(line)) == line
    before = tomllib.loads(text)
    after = tomllib.loads(added)
    after["tool"]["ampcheck"].pop("targets")
    assert after["project"] == before["project"] if "project" in before else True
    assert after["tool"].get("ruff") == before.get("tool", {}).get("ruff")
    assert after["tool"]["ampcheck"] == before.get("tool", {}).get("ampcheck", {})


def test_a_file_of_windows_keeps_its_line_ends() -> None:
    assert "\n" not in with_targets(TEXTS["windows"], dict.fromkeys(TARGETS, "")).replace("\r\n", "")


@pytest.mark.parametrize(
    "text", ["tool = {ruff = {}}\n", "tool.ampcheck = {fail-on = 'warn'}\n", "[tool]\nampcheck = {}\n"]
)
def test_a_table_that_is_written_inline_is_left_with_the_lines_to_add(text: str) -> None:
    with pytest.raises(UsageError, match=r"inline.*by hand"):
        with_targets(text, dict.fromkeys(TARGETS, ""))
