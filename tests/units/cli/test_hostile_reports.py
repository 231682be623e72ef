"""Reports of hostile names and files: no line of a report, no source of another file, no lost entry."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest

from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.cli.main import main
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Coverage, Run, Where, describe
from ampcheck.outcome.baseline import Baseline
from ampcheck.report.terminal import summary_lines
from ampcheck.tools.init.files import require_writable
from ampcheck.tools.init.sandbox import copied

SECRET = "password = 'a secret line'"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def save(name: str, *findings, title: str = "audit of m") -> str:
    Run({}, findings, Coverage({"ops": 2}), title=title).save(name)
    return name


def at(file: Path, line: int = 1):
    return replace(OVERFLOW.fail("m [float16]", "too large"), where=Where("forward", "", "aten::exp", str(file), line))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ["report", "--sarif", "out"],
        ["report", "--html", "out"],
        ["report", "--markdown", "out"],
        ["report", "-v", "--json", "out"],
        ["report", "--sarif", "out", "--compare", "run.json"],
    ],
)
def test_a_report_of_a_file_reads_no_source(folder: Path, command: list[str], inside: bool, capfd) -> None:
    secret = (folder if inside else folder.parent) / "secret.py"
    secret.write_text(f"{SECRET}\n", encoding="utf-8")
    name = save("run.json", at(secret))
    assert main([*command, name]) in (0, 1)
    assert "secret line" not in Path("out").read_text(encoding="utf-8")
    assert "secret line" not in capfd.readouterr().out


def test_a_baseline_from_a_file_reads_no_source(folder: Path, capfd) -> None:
    secret = folder.parent / "secret.py"
    secret.write_text(f"{SECRET}  # ampcheck: ignore[overflow] another secret\n", encoding="utf-8")
    assert main(["baseline", "--from", save("run.json", at(secret))]) == 0
    assert "secret line" not in (folder / "ampcheck.baseline.json").read_text(encoding="utf-8")


def test_the_code_that_a_run_holds_is_reported(folder: Path, capfd) -> None:
    name = save("run.json", replace(at(folder / "model.py"), code="y = x.exp()"))
    assert main(["report", name, "--sarif", "out"]) == 1
    assert "y = x.exp()" in Path("out").read_text(encoding="utf-8")


HOSTILE = "a\n::error file=README.md,line=1::pwned\n0 failed"


@pytest.mark.parametrize("width", [20, 48, 100])
def test_no_name_begins_a_line_of_a_report(width: int) -> None:
    finding = OVERFLOW.fail(
        f"m {HOSTILE}", f"message ::warning::of {HOSTILE}", where=Where("forward", HOSTILE, "aten::exp"), hint=HOSTILE
    )
    for verbose in (False, True):
        run = Run({}, (finding,), Coverage({"ops": 1}), title=f"audit of {HOSTILE}")
        lines = list(summary_lines(run, width=width, verbose=verbose, limit=None))
        assert not [line for line in lines if line.lstrip().startswith("::")], lines
        assert all(len(line) <= width for line in lines)
    text = describe(finding).splitlines()
    assert not [line for line in text if line.lstrip().startswith("::")], text
    assert not [line for line in text if line.startswith("0 failed")], text


def test_ops_keep_their_colons() -> None:
    assert "where: forward, aten::exp" in describe(
        OVERFLOW.fail("m", "too large", where=Where("forward", "", "aten::exp"))
    )


def test_no_target_begins_a_line_of_an_error(folder: Path, capfd) -> None:
    assert main(["audit", f"no\n::error::such.py:{HOSTILE}"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert not [line for line in lines if line.lstrip().startswith("::")]
    assert not [line for line in lines if line.startswith("0 failed")]


def test_baselines_that_are_written_at_once_lose_no_entry(folder: Path) -> None:
    names = [save(f"{n}.json", replace(at(folder / "m.py"), subject=f"m{n}")) for n in range(4)]
    code = "import sys; from ampcheck.cli.main import main; sys.stdin.readline(); "
    code += "sys.exit(main(['baseline', '--from', sys.argv[1]]))"
    processes = [subprocess.Popen([sys.executable, "-c", code, name], stdin=subprocess.PIPE) for name in names]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(120) for process in processes] == [0] * 4
    written = Baseline.load(folder / "ampcheck.baseline.json")
    assert {entry.subject for entry in written.findings} == {"m0", "m1", "m2", "m3"}
    assert not list(folder.glob(".*writing"))


def test_the_baseline_is_read_and_written_under_one_lock(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    held: list[bool] = []
    load = Baseline.load.__func__  # type: ignore[attr-defined]

    def watched(cls: type[Baseline], path: Path) -> Baseline:
        held.append((path.parent / f".{path.name}.writing").exists())
        return load(cls, path)

    monkeypatch.setattr(Baseline, "load", classmethod(watched))
    assert main(["baseline", "--from", save("run.json", at(folder / "m.py"))]) == 0
    assert held[-1]


def test_a_date_that_is_past_accepts_nothing_and_is_refused(folder: Path, capfd) -> None:
    name, today = save("run.json", at(folder / "m.py")), date.today()
    assert main(["baseline", "--from", name, "--expires", str(today - timedelta(1))]) == 2
    assert "--expires must be today or later" in capfd.readouterr().err
    assert not (folder / "ampcheck.baseline.json").exists()
    assert main(["baseline", "--from", name, "--expires", str(today)]) == 0
    entries = json.loads((folder / "ampcheck.baseline.json").read_text(encoding="utf-8"))["findings"]
    assert [entry["expires"] for entry in entries] == [str(today)]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a device")
def test_init_reads_and_writes_no_device(folder: Path) -> None:
    for name in ("model.py", "README.md", "data.bin", "pyproject.toml"):
        (folder / name).symlink_to("/dev/zero")
    (folder / "real.py").write_text("x = 1\n", encoding="utf-8")
    (folder / "linked.py").symlink_to(folder / "real.py")
    with copied(folder) as copy:
        assert sorted(path.name for path in copy.iterdir()) == ["linked.py", "real.py"]
    with pytest.raises(UsageError, match="it is no file but /dev/zero"):
        require_writable(folder / "pyproject.toml")
    require_writable(folder / "linked.py")
    assert main(["init", "--yes", str(folder)]) == 2
