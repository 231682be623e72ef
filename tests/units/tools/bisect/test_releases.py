"""`ampcheck bisect --torch` and `--package`: the release that changed a verdict, each in an environment of its own."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ampcheck.checks.policy.policy_banned import CHECK as POLICY_BANNED
from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.cli.main import main
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Coverage, Run, Verdict, Where
from ampcheck.speed.base import checkout
from ampcheck.tools.bisect import environments, releases
from ampcheck.tools.bisect.environments import Environment, Environments

TORCH = ["2.10.0", "2.9.1", "2.9.0", "2.8.0", "2.7.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0a1"]
"""As a package index gives them: in no order, with one that is not final."""


class Reader:
    """In place of a process: a verdict that follows from the release of its interpreter."""

    changed = "2.12.0"
    unknown: tuple[str, ...] = ()
    counted: dict[str, int] = {"ops under autocast": 2}  # noqa: RUF012  # of a model
    asked: list[str] = []  # noqa: RUF012  # emptied by each test
    peak = None

    def __init__(self, module: str, *, python: str, **settings: Any) -> None:
        self.release = python.partition("of ")[2] or version("torch").partition("+")[0]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def kill(self) -> None: ...

    def ask(self, command: str, **arguments: Any) -> Any:
        if command == "ops":
            assert self.counted, "a training loop would train again"
            return ["aten::linear", "aten::rms_norm"]
        self.asked.append(self.release)
        if self.release in self.unknown:
            return Run(findings=(OVERFLOW.undecided("Model", "too noisy"),), coverage=Coverage({"ops": 8})), ""
        number = [int(part) for part in self.release.split(".")]
        if number >= [int(part) for part in self.changed.split(".")]:
            found = OVERFLOW.fail("Model", "8 of 8 elements overflow", where=Where(op="aten::mul.Tensor"))
        else:
            found = OVERFLOW.passed("Model", "nothing overflows", 8)
        findings = (found, POLICY_BANNED.passed("Model", "none", 2))
        return Run(findings=findings, coverage=Coverage({"ops": 8, **self.counted})), ""


@pytest.fixture
def bisect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command with releases that need no environment; the exit code, the run and what was printed."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Reader, "asked", [])
    monkeypatch.setattr(checkout, "Worker", Reader)
    monkeypatch.setattr(releases, "published", lambda package: TORCH if package == "torch" else [])
    monkeypatch.setattr(Environments, "python", lambda self, release: f"python of {release}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").touch()

    def run(*arguments: str) -> tuple[int, Run | None, str]:
        path = tmp_path / "run.json"
        path.unlink(missing_ok=True)
        options = ["--device", "cuda", "--dtype", "float16", "--json", str(path)]
        code = main(["bisect", "model.py:subject", *arguments, *options])
        printed = capsys.readouterr()
        return code, Run.load(path) if path.exists() else None, printed.out + printed.err

    return run


def test_the_first_release_with_another_verdict_is_named_with_the_change_of_policy_that_explains_it(
    bisect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, run, out = bisect("--torch", "2.8..2.13")
    assert code == 1
    (finding,) = run.findings
    assert finding.check == "overflow"
    assert "first changed from pass to fail in torch 2.12.0; the release before it is torch 2.11.0" in finding.message
    assert "aten::rms_norm was left alone, and is fp32" in finding.message  # as `ampcheck policy diff 2.11 2.12` says
    assert "8 of 8 elements overflow" in finding.message
    assert any("PyTorch 2.11" in table.title and ("rms_norm", "–", "fp32") in table.rows for table in run.tables)
    assert Reader.asked == ["2.8.0", "2.13.0", "2.10.0", "2.12.0", "2.11.0"]
    assert "9 releases" not in out
    assert "8 releases of torch, at most 5 to judge" in out


def test_a_change_that_no_policy_explains_says_so(bisect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "changed", "2.10.0")
    _, run, _ = bisect("--torch", "2.8..2.13", "--check", "overflow")
    assert "Autocast's policy on cuda is the same in 2.9 and 2.10" in run.findings[0].message
    monkeypatch.setattr(Reader, "changed", "2.13.0")
    _, run, _ = bisect("--torch", "2.8..2.13", "--check", "overflow", "--out", "again")
    assert "differs in 7 ops, none of which the target calls" in run.findings[0].message


def test_a_training_loop_is_not_run_once_more_for_its_ops(bisect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "counted", {})
    code, run, _ = bisect("--torch", "2.8..2.13", "--check", "overflow")
    assert code == 1
    assert "and which of them the target calls was not recorded" in run.findings[0].message


def test_releases_without_a_verdict_are_never_read_as_good_or_bad(bisect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "unknown", ("2.11.0", "2.12.0"))
    code, run, _ = bisect("--torch", "2.8..2.13", "--check", "overflow")
    assert code == 2
    (finding,) = run.findings
    assert finding.verdict is Verdict.UNDECIDED
    assert "in torch 2.12.1 or before it: no verdict about torch 2.11.0, torch 2.12.0" in finding.message


def test_a_range_whose_ends_agree_names_no_release(bisect: Any) -> None:
    code, run, _ = bisect("--torch", "2.8..2.10")
    assert code == 0
    assert "no release between them changed it" in run.findings[0].message
    assert Reader.asked == ["2.8.0", "2.10.0"]


def test_results_are_kept_and_used_by_the_next_search(bisect: Any) -> None:
    bisect("--torch", "2.8..2.13")
    Reader.asked.clear()
    code, run, _ = bisect("--torch", "2.9..2.13", "--check", "overflow")
    assert code == 1
    assert "in torch 2.12.0" in run.findings[0].message
    assert not {"2.13.0", "2.12.0", "2.11.0"} & set(Reader.asked)


def test_an_end_without_a_last_release_is_the_newest_and_final(bisect: Any) -> None:
    bisect("--torch", "2.12..")
    newest = max("2.13.0", version("torch").partition("+")[0], key=Version)
    assert Reader.asked[:2] == ["2.12.0", newest]


def test_without_an_index_what_is_on_this_machine_is_searched(bisect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "published", lambda package: [])
    kept = {number: Environment("torch", number, "", 10**9, 60.0) for number in ("2.8.0", "2.11.0", "2.12.0")}
    monkeypatch.setattr(Environments, "kept", lambda self: kept)
    monkeypatch.setattr(Environments, "installed", lambda self: "2.13.0")
    code, run, out = bisect("--torch", "2.8..2.13")
    assert code == 1
    assert "in torch 2.12.0; the release before it is torch 2.11.0" in run.findings[0].message
    assert "those that are on this machine were searched" in run.tables[0].note
    assert "their environments are in" in out


def test_what_a_search_needs_is_said_before_it_starts(bisect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environments, "estimate", lambda self: (2 * 10**9, 120.0))
    monkeypatch.setattr(Environments, "free", lambda self: 20 * 10**9)
    *_, out = bisect("--torch", "2.8..2.12")
    assert "environments to make of about 2.0 GB and 2 min each, 20 GB free in" in out
    monkeypatch.setattr(Environments, "free", lambda self: 3 * 10**9)
    Reader.asked.clear()
    code, run, out = bisect("--torch", "2.8..2.12", "--out", "again")
    assert (code, run, Reader.asked) == (2, None, [])
    assert "--prune keeps one at a time" in out
    code, *_ = bisect("--torch", "2.8..2.12", "--out", "again", "--prune")
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--torch", "2.8"], "--torch takes a range of two releases, such as 2.6..2.13; found '2.8'"),
        (["--torch", "new..old"], "--torch takes a range of two releases"),
        (["--torch", "2.9.1..2.9.1"], "needs two releases of torch from 2.9.1 to 2.9.1, and there is 2.9.1; pip has"),
        (["--torch", "2.13..2.8"], "and there are none"),
        (["--package", "transformers"], "--package takes a name and a range, such as transformers==4.50..4.57"),
        (["--package", "==1..2"], "--package takes a name and a range"),
        (["--package", "nothing-of-that-name==1..2"], "and there are none; pip found none"),
        (["--torch", "2.8..2.13", "--budget", "3"], "--budget is of a measurement of speed: add --speed"),
        (["--commits", "a..b", "--prune"], "--prune is about environments of releases"),
        (["--torch", "2.8..2.13", "--check", "overflows"], "did you mean overflow?"),
    ],
)
def test_bad_input_is_one_sentence(bisect: Any, arguments: list[str], text: str) -> None:
    code, run, out = bisect(*arguments)
    assert (code, run) == (2, None)
    assert text in out
    assert not Reader.asked


def test_a_release_that_cannot_be_installed_has_no_verdict(bisect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def python(self: Environments, release: str) -> str:
        if release in ("2.10.0", "2.9.1"):
            raise UsageError(f"torch {release} cannot be installed: no wheel for this Python")
        return f"python of {release}"

    monkeypatch.setattr(Environments, "python", python)
    code, run, _ = bisect("--torch", "2.8..2.13", "--check", "overflow")
    assert code == 1
    assert "in torch 2.12.0" in run.findings[0].message
    assert any("no wheel for this Python" in str(row) for row in run.tables[0].rows)


# Real environments -------------------------------------------------------------------------------------------------


def wheels(folder: Path, numbers: Sequence[str], package: str = "ampcheck_probe") -> None:
    """Wheels of a package that has its version as a number, `SCALE`: 1e6 from 1.2 on."""
    folder.mkdir()
    for number in numbers:
        info = f"{package}-{number}.dist-info"
        files = {
            f"{package}.py": f"SCALE = {1.0 if number < '1.2' else 1e6}\n",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
        with zipfile.ZipFile(folder / f"{package}-{number}-py3-none-any.whl", "w") as wheel:
            for name, text in {**files, f"{info}/RECORD": record}.items():
                wheel.writestr(name, text)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package index of four releases, and nothing else."""
    # Only its metadata: importing pip, or looking for its spec, hides the distutils of setuptools from this process for
    # good, and Inductor's first compilation then imports the deprecated one of the standard library.
    if not any(distributions(name="pip")):
        pytest.skip("could not import 'pip'")
    wheels(tmp_path / "wheels", ["1.0", "1.1", "1.2", "1.3"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("index")
def test_an_environment_has_one_release_over_the_packages_of_this_one_and_is_made_once() -> None:
    assert environments.published("ampcheck-probe") == ["1.3", "1.2", "1.1", "1.0"]
    shared = Environments("ampcheck-probe")
    assert (shared.installed(), shared.kept()) == ("", {})
    python = shared.python("1.1")
    code = "import ampcheck_probe, torch; print(ampcheck_probe.SCALE, torch.__file__)"
    scale, file = environments._output([python, "-c", code], "it").split()
    assert scale == "1.0"
    assert Path(file) == Path(sys.modules["torch"].__file__ or "")
    (made,) = shared.kept().values()
    assert (made.release, made.python) == ("1.1", python)
    assert made.size > 1000
    assert Environments("ampcheck-probe").python("1.1") == python  # of another search
    with pytest.raises(UsageError, match=r"ampcheck-probe 9 cannot be installed: .*No matching distribution"):
        shared.python("9")
    assert list(shared.kept()) == ["1.1"]
    shared.remove("1.1")
    assert shared.kept() == {}
    assert not list(shared.folder.iterdir())


@pytest.mark.usefixtures("index")
def test_the_release_of_a_package_that_makes_a_model_overflow_is_found_by_real_audits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        "import torch\nfrom ampcheck_probe import SCALE\n\n"
        "class Model(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x) * SCALE\n\n"
        "def subject():\n    return Model(4, 4), torch.ones(2, 4)\n"
    )
    options = ["--no-compile", "--dtype", "float16", "--check", "overflow", "--json", "run.json"]
    assert main(["bisect", "model.py:subject", "--package", "ampcheck-probe==1..", *options, "--prune"]) == 1
    message = Run.load("run.json").findings[0].message
    assert "in ampcheck-probe 1.2; the release before it is ampcheck-probe 1.1" in message
    assert "environments to make" in capsys.readouterr().err
    assert Environments("ampcheck-probe").kept() == {}
