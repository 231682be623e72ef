"""The command line: 0 for nothing found, 1 for findings, 2 with one line on stderr and nothing written."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest
import torch

from ampcheck.checks import REGISTRY
from ampcheck.cli.main import main
from ampcheck.core import formats
from ampcheck.core.run import Run, Verdict
from ampcheck.lint import rules

TARGETS = """
import torch
from ampcheck.core.subject import Subject

X = torch.ones(2, 4)

class Big(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 4)
        with torch.no_grad():
            self.up.weight.fill_(1.0)
            self.up.bias.fill_(0.0)
    def forward(self, x):
        return self.up(x) * 30000.0

def sound(): return torch.nn.Linear(4, 4), X
def overflow(): return Big(), X
def number(): return 3
def raises(): raise RuntimeError("first\\nsecond")
def leaves(): raise SystemExit(0)
def needs(size): return size
def float32(): return torch.nn.Linear(4, 4), torch.ones(2, 5)
def training(): return {"step": lambda i: 0.0}
def call(): return lambda: None
def limit(): return Subject((torch.nn.Linear(4, 4), X), limits={"precision": -1})
def unknown_limit(): return Subject((torch.nn.Linear(4, 4), X), limits={"speed": 1})
def declared(): return Subject((torch.nn.Linear(4, 4), X), dtypes={"": "float12"})
"""

QUICK = ("--no-compile", "--dtype", "float16")


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with `targets.py`; the import is undone afterwards."""
    (tmp_path / "targets.py").write_text(TARGETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def command(capfd: pytest.CaptureFixture[str], *arguments: str) -> Done:
    capfd.readouterr()
    code = main(arguments)
    out, err = capfd.readouterr()
    return Done(code, out, err)


def process(*arguments: str, folder: Path, **environment: str) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "ampcheck", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def is_usage_error(done: Done) -> bool:
    lines = [line for line in done.err.splitlines() if " done, now: " not in line]
    return done.code == 2 and len(lines) == 1 and lines[0].startswith("ampcheck: ") and done.out == ""


# 0: the demo, as a process of its own. One run serves several tests, for it takes its time.


class Audited(NamedTuple):
    done: Done
    folder: Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    folder = tmp_path_factory.mktemp("demo")
    arguments = ("audit", "--no-compile", "--dtype", "bfloat16", "--html", "page.html", "--json", "run.json")
    return Audited(process(*arguments, folder=folder), folder)


@pytest.mark.usefixtures("warm_processes")
def test_the_demo_passes(demo: Audited) -> None:
    assert demo.done.code == 0, demo.done.err
    first, *others = demo.done.err.splitlines()
    assert "none of your code" in first
    assert all(re.match(r"ampcheck: \d+ of \d+ done", line) for line in others)
    assert "coverage" in demo.done.out


def test_the_demo_writes_what_was_asked_for_and_says_where(demo: Audited) -> None:
    assert written(demo.folder) == {"page.html", "run.json"}
    assert "page: page.html" in demo.done.out
    assert "JSON: run.json" in demo.done.out


def test_the_kept_run_is_the_run_that_was_judged(demo: Audited) -> None:
    run = Run.load(demo.folder / "run.json")
    assert run.title == "audit of demo"
    assert not run.failed
    assert run.coverage.seen["ops"] > 50  # one layer, for one dtype
    assert {finding.check for finding in run.findings} >= {"overflow", "precision-loss", "coverage"}
    assert run.environment["torch"] == torch.__version__


def test_the_kept_run_is_valid_by_the_published_schema(demo: Audited) -> None:
    schema = json.loads(process("report", "--schema", folder=demo.folder).out)
    jsonschema.validate(json.loads((demo.folder / "run.json").read_text(encoding="utf-8")), schema)


def test_the_page_is_about_the_kept_run(demo: Audited) -> None:
    from ampcheck.report import render_html

    page = (demo.folder / "page.html").read_text(encoding="utf-8")
    assert page == render_html(Run.load(demo.folder / "run.json"))
    assert page.startswith("<!")


# 1: findings.


def test_a_planted_overflow_is_found_where_it_is(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("audit", "targets.py:overflow", *QUICK, "--html", "page.html", "--json", "run.json")
    done = command(capfd, *arguments)
    assert (done.code, done.err) == (1, "")
    assert "overflow" in done.out
    run = Run.load("run.json")
    found = [finding for finding in run.of(Verdict.FAIL) if finding.check == "overflow"]
    assert found
    assert found[0].where.op.startswith("aten::mul")
    assert found[0].where.file.endswith("targets.py")
    assert found[0].where.line == 1 + TARGETS.splitlines().index("        return self.up(x) * 30000.0")
    assert "overflow" in (folder / "page.html").read_text(encoding="utf-8")


def test_without_the_planted_defect_nothing_fails(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(capfd, "audit", "targets.py:sound", *QUICK).code == 0
    assert command(capfd, "audit", "targets.py:overflow", "--no-compile", "--dtype", "bfloat16").code == 0
    assert written(folder) == {"targets.py"}


@pytest.mark.parametrize("target", ["targets.py:sound", "targets:sound", "{folder}/targets.py:sound"])
def test_a_target_is_a_file_or_a_module(folder: Path, capfd: pytest.CaptureFixture[str], target: str) -> None:
    assert command(capfd, "audit", target.format(folder=folder), *QUICK).code == 0


def test_verbose_prints_the_passes_too(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    brief = command(capfd, "audit", "targets.py:sound", *QUICK).out
    assert len(command(capfd, "audit", "targets.py:sound", *QUICK, "--verbose").out) > len(brief)


# 2: usage errors.

AUDITS = {
    "unknown dtype": ("targets.py:sound --dtype float12", "float12"),
    "one unknown dtype of two": ("targets.py:sound --dtype float16,float12", "float12"),
    "dtype autocast cannot cast to": ("targets.py:sound --dtype float8_e4m3fn", "float16, bfloat16"),
    "dtype that is not low": ("targets.py:sound --dtype float32", "float16, bfloat16"),
    "no dtype": ("targets.py:sound --dtype ,", "--dtype"),
    "unknown device": ("targets.py:sound --device nonsense", "'nonsense' is no device"),
    "device below zero": ("targets.py:sound --device cpu:-1", "is no device"),
    "device that is not built in": ("targets.py:sound --device hpu", "'hpu' is not there"),
    "unknown device for the demo": ("--device nonsense", "'nonsense' is no device"),
    "missing file": ("absent.py:f", "there is no file absent.py"),
    "missing module": ("no_such_module:f", "cannot import no_such_module"),
    "missing attribute": ("targets.py:absent", "has no 'absent'"),
    "no factory": ("targets.py", "package.module:function"),
    "wrong shape": ("targets.py:number", "found int"),
    "factory that raises": ("targets.py:raises", "raised RuntimeError: first"),
    "factory that exits": ("targets.py:leaves", "raised SystemExit"),
    "factory that needs arguments": ("targets.py:needs", "missing 1 required"),
    "raises in float32 too": ("targets.py:float32", "raises in float32 too"),
    "limit of the subject": ("targets.py:limit", "positive number"),
    "unknown limit of the subject": ("targets.py:unknown_limit", "unknown limit 'speed'"),
    "unknown dtype declared": ("targets.py:declared", "float12"),
}


@pytest.mark.parametrize("name", AUDITS)
def test_a_usage_error_is_one_line_and_nothing_is_written(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    arguments, wanted = AUDITS[name]
    done = command(capfd, "audit", "--no-compile", *arguments.split(), "--html", "page.html", "--json", "run.json")
    assert is_usage_error(done), done
    assert wanted in done.err
    assert written(folder) == {"targets.py"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_emulated(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for device in ("cuda", "cuda:0", "mps"):
        done = command(capfd, "audit", "targets.py:sound", *QUICK, "--device", device)
        assert done.code == 0
        assert {device.partition(":")[0], "emulated"} <= set(done.out.replace(",", " ").split())


def test_the_use_of_autocast_is_judged(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = command(capfd, "audit", "targets.py:call", "-v")
    assert done.code == 0
    assert "autocast-state" in done.out
    assert "coverage" in done.out


def test_a_training_loop_that_computes_nothing_fails(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = command(capfd, "audit", "targets.py:training")
    assert done.code == 1
    assert "FAIL coverage" in done.out


def test_a_device_without_values_is_a_usage_error(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert is_usage_error(command(capfd, "audit", "targets.py:sound", *QUICK, "--device", "meta"))


@pytest.mark.parametrize("option", ["--html", "--json"])
@pytest.mark.parametrize("path", ["absent/file", "absent/deep/file", ".", "taken", "targets.py/file", ""])
def test_a_path_that_cannot_be_written_is_told_before_the_work(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str, path: str
) -> None:
    import ampcheck.core.subject

    def never(target: str) -> None:
        raise AssertionError("the target was loaded first")

    monkeypatch.setattr(ampcheck.core.subject, "load_subject", never)
    (folder / "taken").mkdir()
    done = command(capfd, "audit", "targets.py:sound", *QUICK, option, path)
    assert is_usage_error(done), done
    assert "cannot write" in done.err
    assert written(folder) == {"targets.py", "taken"}


def test_settings_that_mean_nothing_are_a_usage_error(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "pyproject.toml").write_text("[tool.ampcheck.limits]\nprecison = 3\n", encoding="utf-8")
    done = command(capfd, "audit", "targets.py:sound", *QUICK)
    assert is_usage_error(done), done
    assert "precison" in done.err


BROKEN = {
    "syntax error": "def f(:\n",
    "raises": "raise ValueError('first\\nsecond')\n",
    "exits": "raise SystemExit(0)\n",
    "imports what is not there": "import no_such_module\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_does_not_import_is_a_usage_error(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    (folder / "broken.py").write_text(BROKEN[name], encoding="utf-8")
    done = command(capfd, "audit", "broken.py:f", *QUICK)
    assert is_usage_error(done), done
    assert "cannot import broken.py" in done.err


def test_a_usage_error_of_a_process_is_one_line_without_a_traceback(folder: Path) -> None:
    done = process("audit", "targets.py:float32", *QUICK, "--json", "run.json", folder=folder)
    assert is_usage_error(done), done
    assert "Traceback" not in done.err
    assert written(folder) == {"targets.py"}


def test_an_interrupt_is_told_in_one_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "stopped.py").write_text("def f(): raise KeyboardInterrupt\n", encoding="utf-8")
    done = command(capfd, "audit", "stopped.py:f", *QUICK, "--json", "run.json")
    assert done == Done(130, "", "ampcheck: interrupted; nothing was written\n")
    assert not (folder / "run.json").exists()


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["audit", "--nonsense"], ["audit", "--fail-on", "pass"], ["audit", "--dtype"]]
)
def test_what_cannot_be_parsed_ends_with_2(capfd: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("usage: ampcheck")


def test_without_a_command_help_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    done = command(capfd)
    assert done.code == 2
    for name in ("audit", "explain", "formats"):
        assert name in done.out


# explain and formats.


def test_explain_lists_every_check_and_rule_in_one_line_each(capfd: pytest.CaptureFixture[str]) -> None:
    done = command(capfd, "explain")
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()] == [*REGISTRY, *rules()]
    assert all(len(line.split()) > 4 and line.endswith(".") for line in done.out.splitlines())


@pytest.mark.parametrize("slug", REGISTRY)
def test_explain_prints_the_whole_page(capfd: pytest.CaptureFixture[str], slug: str) -> None:
    done = command(capfd, "explain", slug)
    assert (done.code, done.err) == (0, "")
    page, words = REGISTRY[slug], " ".join(done.out.split())
    for text in (page.slug, page.requires, page.measured, page.causes, page.fix):
        assert text in words
    assert max(map(len, done.out.splitlines())) <= 100


@pytest.mark.parametrize("slug", ["nope", "", "-"])
def test_explain_of_an_unknown_check_lists_the_checks(capfd: pytest.CaptureFixture[str], slug: str) -> None:
    done = command(capfd, "explain", slug)
    assert is_usage_error(done), done
    assert all(known in done.err for known in REGISTRY)


@pytest.mark.parametrize("width", ["20", "80", "300"])
def test_formats_prints_every_fact_of_every_format_whole(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    done = command(capfd, "formats")
    assert (done.code, done.err) == (0, "")
    assert "…" not in done.out
    heading, *lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == list(formats.FORMATS)
    rows = formats.table()
    assert " ".join(heading.split()) == " ".join(rows[0])
    for line, row in zip(lines, rows, strict=True):
        for cell, value in zip(line.split(), row.values(), strict=True):
            if isinstance(value, bool):
                assert cell == ("yes" if value else "no")
            elif isinstance(value, float):
                assert float(cell) == pytest.approx(value, rel=1e-5)
            else:
                assert cell == str(value)


def test_explain_and_formats_import_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from ampcheck.cli.main import main; codes = [main(['explain', 'overflow']), main(['formats'])]; "
        "sys.exit(codes != [0, 0] or 'torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=False).returncode == 0
    )


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    done = process("explain", "overflow", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("overflow\n")
    assert process("explain", "nope", folder=tmp_path).code == 2


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("explain silentzero", "silent-zero"),
        ("explain undecidd", "undecided"),
        ("audit targets.py:overflow --select overflo", "overflow"),
        ("audit targets.py:overflow --ignore headrom", "headroom"),
        ("audit targets.py:overflw", "overflow"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest_one(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: str, name: str
) -> None:
    done = command(capfd, *arguments.split())
    assert is_usage_error(done)
    assert f"did you mean {name}?" in done.err
    assert len(done.err) < 200


def test_a_file_alone_is_no_target_and_the_advice_says_what_is_missing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = command(capfd, "audit", "targets.py")
    assert is_usage_error(done)
    assert "name what to judge in it, as targets.py:main" in done.err


def test_a_mistyped_check_is_reported_before_the_audit(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings(folder, 'severity = { "overflo" = "warn" }')
    (folder / "targets.py").write_text("raise RuntimeError('the target was loaded')")
    done = command(capfd, "audit", "targets.py:overflow")
    assert "did you mean overflow?" in done.err


# Targets of the repository, selection, the baseline ------------------------------------------------------------------


def settings(folder: Path, *lines: str) -> None:
    (folder / "pyproject.toml").write_text("\n".join(("[tool.ampcheck]", *lines)), encoding="utf-8")


def test_without_a_target_those_of_the_repository_are_audited(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings(folder, 'targets = ["targets.py:sound", { target = "targets.py:overflow", dtype = "bfloat16" }]')
    done = command(capfd, "audit", "--fast", "-q", "--json", "run.json")
    assert done.code == 0, done.out
    assert "audit of 2 targets" in done.out
    subjects = {finding.subject.partition(" ")[0] for finding in Run.load("run.json").findings}
    assert {"targets.py:sound", "targets.py:overflow"} <= subjects


def test_a_target_that_cannot_be_judged_leaves_the_others_judged(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = command(capfd, "audit", "targets.py:raises", "targets.py:overflow", *QUICK)
    assert done.code == 1
    assert "incomplete coverage: not judged: targets.py:raises raised" in done.out
    assert "FAIL overflow" in done.out


def test_the_severity_of_a_target_is_its_own(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings(folder, 'targets = [{ target = "targets.py:overflow", severity = { "*" = "warn" } }]')
    assert command(capfd, "audit", *QUICK).code == 0
    assert command(capfd, "audit", *QUICK, "--fail-on", "warn").code == 1


def test_what_is_ignored_or_not_selected_fails_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    audit = ("audit", "targets.py:overflow", *QUICK)
    assert command(capfd, *audit).code == 1
    assert command(capfd, *audit, "--select", "flush").code == 0
    assert command(capfd, *audit, "--ignore", "overflow,nonfinite-*").code == 0
    assert command(capfd, *audit, "--fail-on", "never").code == 0


def test_a_baseline_accepts_what_is_known_and_says_what_is_gone(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings(folder)
    audit = ("targets.py:overflow", *QUICK)
    written = command(capfd, "baseline", *audit, "--reason", "see issue 12", "--author", "Ada", "--expires", "never")
    assert written.code == 0
    assert "accepted, " in written.out
    accepted = command(capfd, "audit", *audit)
    assert accepted.code == 0
    assert "accepted overflow: by the baseline: see issue 12 (Ada)" in accepted.out
    assert command(capfd, "audit", *audit, "--no-baseline").code == 1
    (folder / "targets.py").write_text(
        TARGETS.replace("def overflow(): return Big()", "def overflow(): return torch.nn.Linear(4, 4)")
    )
    mended = command(capfd, "audit", *audit)
    assert mended.code == 0
    assert "1 accepted finding no longer found: overflow in " in " ".join(mended.out.split())
    (reproduce,) = re.findall(r"reproduce: (ampcheck audit .*)", mended.out)
    assert "WARN baseline" in command(capfd, *shlex.split(reproduce)[1:]).out
    assert "`ampcheck baseline --prune`" in " ".join(mended.out.split())


def test_pruning_a_baseline_removes_what_is_gone_and_accepts_nothing_new(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings(folder)
    assert command(capfd, "baseline", "targets.py:overflow", *QUICK, "--expires", "never").code == 0
    mended = TARGETS.replace("def overflow(): return Big()", "def overflow(): return torch.nn.Linear(4, 4)")
    broken = mended.replace("def sound(): return torch.nn.Linear(4, 4)", "def sound(): return Big()")
    (folder / "targets.py").write_text(broken + "\n")  # bytecode of a file of the same second and size is used again
    pruned = command(capfd, "baseline", "--prune", "targets.py:overflow", "targets.py:sound", *QUICK)
    assert "0 places accepted, 0 new" in pruned.out
    assert is_usage_error(command(capfd, "baseline", "--prune", "--reason", "known", "targets.py:overflow"))


def test_a_baseline_is_written_from_a_kept_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings(folder)
    assert command(capfd, "audit", "targets.py:overflow", *QUICK, "--json", "run.json").code == 1
    assert command(capfd, "baseline", "--from", "run.json").code == 0
    assert command(capfd, "audit", "targets.py:overflow", *QUICK).code == 0


@pytest.mark.parametrize(
    "arguments",
    ["baseline", "baseline --expires tomorrow targets.py:sound", "baseline --from run.json targets.py:sound"],
)
def test_a_baseline_of_nothing_is_a_usage_error(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: str
) -> None:
    assert is_usage_error(command(capfd, *arguments.split()))
    assert not (folder / "ampcheck.baseline.json").exists()


def test_a_run_is_fast_or_full_and_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", "--fast", "--full"])
    assert ended.value.code == 2
    assert "--full: not allowed with" in capsys.readouterr().err
