"""`[tool.ampcheck]`: the nearest file, known names, positive numbers; everything else is one sentence."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits
from ampcheck.core.settings import load_settings

NAMES = [f.name for f in dataclasses.fields(Limits)]


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def complaint(folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_settings(folder).limits
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Which file.


def test_defaults_without_a_file(tmp_path: Path) -> None:
    assert not any((folder / "pyproject.toml").exists() for folder in tmp_path.resolve().parents)
    assert load_settings(tmp_path).limits == Limits() == Limits(2.0, 4.0, 1.0)


@pytest.mark.parametrize("text", ["", "[project]\nname = 'x'\n", "[tool.ruff]\n", "[tool.ampcheck]\n"])
def test_defaults_where_the_file_says_nothing(tmp_path: Path, text: str) -> None:
    assert load_settings(write(tmp_path, text)).limits == Limits()


def test_the_nearest_file_at_or_above_counts_alone(tmp_path: Path) -> None:
    write(tmp_path, "[tool.ampcheck.limits]\nprecision = 3\nflush = 7\n")
    near = write(tmp_path / "a" / "b", "[tool.ampcheck.limits]\nprecision = 5\n")
    (near / "c" / "d").mkdir(parents=True)
    assert load_settings(tmp_path / "a").limits == Limits(precision=3, flush=7)
    for start in (near, near / "c", near / "c" / "d"):
        assert load_settings(start).limits == Limits(precision=5)


def test_a_nearest_file_that_says_nothing_hides_the_one_above(tmp_path: Path) -> None:
    write(tmp_path, "[tool.ampcheck.limits]\nprecision = 3\n")
    assert load_settings(write(tmp_path / "a", "[project]\nname = 'x'\n")).limits == Limits()


def test_a_folder_of_that_name_is_no_file(tmp_path: Path) -> None:
    write(tmp_path, "[tool.ampcheck.limits]\nheadroom = 9\n")
    (tmp_path / "a" / "pyproject.toml").mkdir(parents=True)
    assert load_settings(tmp_path / "a").limits == Limits(headroom=9)


def test_the_working_directory_is_where_the_search_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "[tool.ampcheck.limits]\nflush = 2.5\n")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert load_settings().limits == Limits(flush=2.5)


# What it may say.


@given(values=st.dictionaries(st.sampled_from(NAMES), st.floats(min_value=0, exclude_min=True, allow_infinity=False)))
def test_every_limit_can_be_set_and_the_others_keep_their_defaults(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, float]
) -> None:
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    folder = write(tmp_path_factory.getbasetemp() / "limits", "\n".join(["[tool.ampcheck.limits]", *lines]))
    assert load_settings(folder).limits == dataclasses.replace(Limits(), **values)


def test_an_integer_is_a_number(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, "[tool.ampcheck.limits]\nprecision = 3\n")).limits.precision == 3.0


def test_an_unknown_key_is_named_with_what_there_is(tmp_path: Path) -> None:
    said = complaint(write(tmp_path, "[tool.ampcheck]\nlimit = 3\n"))
    assert "'limit'" in said
    assert "there are limits, targets" in said


def test_an_unknown_limit_is_named_with_what_there_is(tmp_path: Path) -> None:
    said = complaint(write(tmp_path, "[tool.ampcheck.limits]\nprecison = 3\n"))
    assert "'precison'" in said
    assert all(name in said for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value",
    [
        "true",
        "false",
        "'2'",
        "''",
        "-1",
        "-0.5",
        "0",
        "0.0",
        "-0.0",
        "inf",
        "-inf",
        "nan",
        "[1]",
        "{a = 1}",
        "1979-05-27",
        "1" + "0" * 400,
    ],
    ids=lambda value: value[:12],
)
def test_what_is_no_positive_number_is_no_limit(tmp_path: Path, name: str, value: str) -> None:
    said = complaint(write(tmp_path, f"[tool.ampcheck.limits]\n{name} = {value}\n"))
    assert name in said
    assert "positive number" in said


@pytest.mark.parametrize(
    "text",
    [
        "tool = 5",
        "tool = []",
        "[tool]\nampcheck = 5",
        "[tool]\nampcheck = 'limits'",
        "[tool]\nampcheck = ['limits']",
        "[[tool.ampcheck]]\nlimits = 1",
        "[tool.ampcheck]\nlimits = 5",
        "[tool.ampcheck]\nlimits = 'precision'",
        "[tool.ampcheck]\nlimits = ['precision']",
        "[[tool.ampcheck.limits]]\nprecision = 1",
    ],
)
def test_what_is_no_table_is_a_usage_error(tmp_path: Path, text: str) -> None:
    assert "pyproject.toml" in complaint(write(tmp_path, text))


@pytest.mark.parametrize("content", [b"[tool.ampcheck", b"a = ", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pyproject.toml").write_bytes(content)
    assert "pyproject.toml cannot be read" in complaint(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = " + "[" * 5000 + "]" * 5000, "nest too deep"),
        ("a = " + "{a = " * 5000 + "1" + "}" * 5000, "nest too deep"),
        ("[tool.ampcheck.limits]\nprecision = " + "[" * 60 + "]" * 60, "a list; a positive number is required"),
        ("[tool.ampcheck.limits]\nprecision = 0x" + "f" * 4000, "thousands of digits"),
        ("[tool.ampcheck.limits]\nprecision = '" + "x" * 4000 + "'", "a positive number is required"),
        ("[a]\n<<<<<<< HEAD\nb = 1\n=======\nb = 2\n>>>>>>> main\n", "line 2 is a conflict marker of git"),
    ],
    ids=lambda value: value[:60],
)
def test_a_file_that_nests_deep_or_holds_half_a_merge_is_one_short_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    message = complaint(write(tmp_path, text))
    assert said in message
    assert len(message) < 300


# The limits of one subject.


@given(st.dictionaries(st.sampled_from(NAMES), st.floats(min_value=1e-300, max_value=1e300) | st.integers(1, 10**300)))
def test_a_subject_replaces_the_limits_it_names(values: dict[str, float]) -> None:
    repository = Limits(11.0, 12.0, 13.0)
    limits = repository.with_(values, "the subject")
    for name in NAMES:
        assert getattr(limits, name) == float(values.get(name, getattr(repository, name)))
        assert type(getattr(limits, name)) is float
    assert repository == Limits(11.0, 12.0, 13.0)


@pytest.mark.parametrize(
    "value", [True, "2", None, -1, 0, math.inf, math.nan, 10**400, [1], 1j], ids=lambda v: repr(v)[:9]
)
def test_a_limit_of_a_subject_is_judged_alike(value: Any) -> None:
    with pytest.raises(UsageError, match=r"the subject bert sets flush .* a positive number is required"):
        Limits().with_({"flush": value}, "the subject bert")


def test_an_unknown_limit_of_a_subject_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="the subject bert sets an unknown limit 'speed'"):
        Limits().with_({"speed": 1}, "the subject bert")


@pytest.mark.parametrize(
    ("own", "fails"), [({}, True), ({"precision": 1e6}, False)], ids=["of the repository", "of the subject"]
)
def test_an_audit_follows_the_file_and_the_subject_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, float], fails: bool
) -> None:
    import torch

    import ampcheck

    monkeypatch.chdir(write(tmp_path, "[tool.ampcheck.limits]\nprecision = 1e-6\n"))
    torch.manual_seed(0)
    subject = ampcheck.Subject((torch.nn.Linear(16, 16), torch.randn(4, 16)), limits=own)
    run = ampcheck.audit(subject, dtype="bfloat16", compile=False, checks=["precision-loss"])
    assert run.failed is fails
