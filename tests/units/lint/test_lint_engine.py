"""What is read, what is accepted, what is mended, and how fast nothing is read twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampcheck.cli.main import main
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict
from ampcheck.lint import fix, lint

OLD = "import torch\n\nwith torch.cuda.amp.autocast(enabled=True):\n    x = 1\n"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.py").write_text(OLD)
    return tmp_path


def test_torch_is_not_imported(folder: Path) -> None:
    code = "import sys, ampcheck.lint; ampcheck.lint.lint(['.']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_folders_are_searched_but_for_hidden_and_built_ones(folder: Path) -> None:
    for name in ("a", ".b", "build", "a/__pycache__"):
        (folder / name).mkdir()
        (folder / name / "m.py").write_text(OLD)
    (folder / "a" / "text.txt").write_text(OLD)
    run = lint(["."])
    assert [finding.where.file for finding in run.findings] == ["./a/m.py", "./old.py"]
    assert run.coverage.seen["files"] == 2
    assert len(lint(["build"]).findings) == 1  # it was asked for


@pytest.mark.parametrize("text", ["with torch.cuda.amp.autocast({{ dtype }}:\n", f"torch.cuda.amp{'(' * 5000}"])
def test_a_file_that_is_no_python_is_counted(folder: Path, text: str) -> None:
    (folder / "template.py").write_text(text)
    run = lint(["."])
    assert run.coverage.unseen == {"files that cannot be parsed": 1}
    assert run.coverage.seen["files"] == 1


def test_where_no_file_is_python_nothing_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty").mkdir()
    (folder / "template.py").write_text("with torch.cuda.amp.autocast({{ dtype }}:\n")
    (folder / "binary.py").write_bytes(b"\x7fELF\x00")
    for path in ("empty", "template.py", "binary.py"):
        assert main(["lint", path]) == 2
        assert f"lint needs a file of Python; found none in {path}" in capsys.readouterr().err


def test_a_file_of_several_names_is_one_and_links_to_folders_are_not_followed(folder: Path) -> None:
    (folder / "again.py").symlink_to("old.py")
    (folder / "round").symlink_to(".")
    (folder / "gone.py").symlink_to("nowhere.py")
    assert lint([".", "old.py"]).coverage.seen["files"] == 1


@pytest.mark.parametrize(
    ("content", "fixed"),
    [
        (b"import torch\r\nc = torch.cuda.amp.autocast()\r\n", b'import torch\r\nc = torch.amp.autocast("cuda")\r\n'),
        (
            b"\xef\xbb\xbfimport torch; c = torch.cuda.amp.autocast()",
            b'\xef\xbb\xbfimport torch; c = torch.amp.autocast("cuda")',
        ),
        (
            b"# coding: latin-1\nimport torch\ns = '\xe4'; c = torch.cuda.amp.autocast()\n",
            b"# coding: latin-1\nimport torch\ns = '\xe4'; c = torch.amp.autocast(\"cuda\")\n",
        ),
        (
            b"import torch\nc = torch.cuda.amp.autocast(\n    enabled=True,\n)\n",
            b'import torch\nc = torch.amp.autocast("cuda",\n    enabled=True,\n)\n',
        ),
        (
            b"import torch\nx = 'a\x0cb'\nc = torch.cuda.amp.autocast()\n",
            b"import torch\nx = 'a\x0cb'\nc = torch.amp.autocast(\"cuda\")\n",
        ),
    ],
    ids=["CRLF", "byte order mark", "latin-1", "several lines", "form feed"],
)
def test_a_fix_leaves_the_rest_of_a_file_as_it_is(folder: Path, content: bytes, fixed: bytes) -> None:
    (folder / "old.py").write_bytes(content)
    assert fix(["."]) == 1
    assert (folder / "old.py").read_bytes() == fixed


def test_a_comment_for_another_rule_accepts_nothing(folder: Path) -> None:
    (folder / "old.py").write_text(OLD.replace(":\n", ":  # ampcheck: ignore[overflow]\n", 1))
    assert lint(["."]).findings[0].verdict is Verdict.WARN
    assert fix(["."]) == 1


def test_what_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="there is no file or folder gone"):
        lint(["gone"])
    with pytest.raises(UsageError, match="--select names 'AMP9'"):
        lint(["."], ["AMP9"])


def test_a_comment_accepts_a_report_with_its_reason(folder: Path) -> None:
    (folder / "old.py").write_text(OLD.replace(":\n", ":  # ampcheck: ignore[AMP101] until we drop 2.3\n", 1))
    (finding,) = lint(["."]).findings
    assert (finding.verdict, finding.accepted) == (Verdict.ACCEPTED, "until we drop 2.3")
    assert main(["lint", "."]) == 0


def test_an_unchanged_file_is_not_read_again_and_a_changed_one_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lint(["."])
    path = folder / "old.py"
    stat = path.stat()
    path.write_text(OLD.replace("cuda.amp", "cuda_amp"))  # of the same size
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert lint(["."]).findings == first.findings
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert lint(["."]).findings == ()
    assert lint(["."], cached=False).findings == ()


def test_a_cache_that_cannot_be_written_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "old.py"))
    assert len(lint(["."]).findings) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.cuda.amp.autocast()", 'torch.amp.autocast("cuda")'),
        ("torch.cuda.amp.autocast(enabled=True)", 'torch.amp.autocast("cuda", enabled=True)'),
        ("torch.cpu.amp.autocast(dtype=torch.bfloat16)", 'torch.amp.autocast("cpu", dtype=torch.bfloat16)'),
        ("torch.cuda.amp.GradScaler(init_scale=2.0)", 'torch.amp.GradScaler("cuda", init_scale=2.0)'),
    ],
)
def test_a_fix_keeps_the_arguments(folder: Path, old: str, new: str) -> None:
    (folder / "old.py").write_text(f"import torch\nä = 'ü', {old}, 2\n", encoding="utf-8")
    assert fix(["."]) == 1
    assert (folder / "old.py").read_text(encoding="utf-8") == f"import torch\nä = 'ü', {new}, 2\n"
    assert lint(["."], cached=False).findings == ()


def test_a_positional_argument_is_not_moved(folder: Path) -> None:
    """Of torch.cuda.amp.autocast the first is `enabled`, of torch.amp.autocast the third."""
    (folder / "old.py").write_text("import torch\nc = torch.cuda.amp.autocast(False)\n")
    assert fix(["."]) == 0


def test_fix_leaves_imported_names_and_accepted_lines(folder: Path) -> None:
    text = (
        "import torch\nfrom torch.cuda.amp import autocast\nc = autocast()\n"
        "d = torch.cuda.amp.autocast()  # ampcheck: ignore[AMP101]\n"
    )
    (folder / "old.py").write_text(text)
    assert fix(["."]) == 0
    assert (folder / "old.py").read_text() == text


def test_the_command_prints_lines_that_editors_know_and_ends_in_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", "old.py"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        'old.py:3: AMP101 torch.cuda.amp.autocast is deprecated: write torch.amp.autocast("cuda", ...)',
        "1 report in 1 file",
    ]
    assert main(["lint", "old.py", "--fix"]) == 0
    assert capsys.readouterr().out == "0 reports in 1 file, 1 fixed\n"
    (folder / "template.py").write_text("torch.cuda.amp.{{ name }}\n")
    assert main(["lint"]) == 0
    assert capsys.readouterr().out == "0 reports in 1 file, 1 file that cannot be parsed\n"


def test_the_command_writes_runs_and_sarif_with_the_pages_of_its_rules(folder: Path) -> None:
    assert main(["lint", "--json", "run.json", "--sarif", "run.sarif", "--select", "AMP1"]) == 1
    assert [finding.check for finding in Run.load("run.json").findings] == ["AMP101"]
    (rule,) = json.loads((folder / "run.sarif").read_text())["runs"][0]["tool"]["driver"]["rules"]
    assert rule["id"] == "AMP101"
    assert "deprecated since PyTorch 2.4" in json.dumps(rule)


def test_a_baseline_is_not_written_where_lint_would_not_read_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["lint", "--json", "run.json"])
    assert main(["baseline", "--from", "run.json"]) == 2
    assert "lint reads no baseline: accept what it reports on the line" in capsys.readouterr().err
    assert not (folder / "ampcheck.baseline.json").exists()


def test_a_rule_is_named_in_any_letters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for name in ("AMP103", "amp103", " Amp103 "):
        assert main(["explain", name]) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0].startswith("AMP103\n")
    assert len(set(pages)) == 1
    assert lint(["."], ["amp101"]).findings == lint(["."], ["AMP101"]).findings
    for name, meant in {"amp199": "did you mean AMP1", "overfow": "did you mean overflow?", "": "there are "}.items():
        assert main(["explain", name]) == 2
        assert meant in capsys.readouterr().err


def test_explain_prints_the_page_of_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "AMP103"]) == 0
    assert "how to fix it\n  scaler.unscale_(optimizer)" in capsys.readouterr().out
    assert main(["explain"]) == 0
    assert "AMP115" in capsys.readouterr().out
