"""`ampcheck lab`: which experiments run, what is printed and written, and what happens to one that breaks."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ampcheck.autocast.device import place
from ampcheck.cli.main import main
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import FORMATS, format_of
from ampcheck.core.run import Coverage, Finding, Run, Verdict
from ampcheck.report.charts import draw_chart
from ampcheck.tools.lab import exp, lab, loops, ulp, underflow
from ampcheck.tools.lab.exp import last_finite
from ampcheck.tools.lab.lab import power
from ampcheck.tools.lab.registry import EXPERIMENTS, experiments_of


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """The command sets variables that later tests must not inherit."""
    with mock.patch.dict(os.environ):
        yield


def test_there_are_ten_experiments_each_with_a_title_and_a_few_sentences() -> None:
    assert len(EXPERIMENTS) == len({experiment.name for experiment in EXPERIMENTS}) == 10
    for experiment in EXPERIMENTS:
        assert experiment.title
        assert experiment.about.endswith(".")
        assert experiment.about.count(". ") >= 1
        assert callable(experiment.function)


def test_the_numbers_in_the_sentences_are_those_of_the_formats() -> None:
    told = " ".join(experiment.about for experiment in EXPERIMENTS)
    half, brain = FORMATS["float16"], format_of("bfloat16")
    for number in (f"ends at {half.max:,.0f}", f"{half.largest_exact_integer:,}", f"{brain.largest_exact_integer}"):
        assert number in told
    assert f"{last_finite(half):.2f}" == "11.09"
    assert f"{last_finite(FORMATS['float32']):.1f}" == "88.7"
    assert "11.09" in told
    assert "88.7" in told
    assert half.flushes_at == 2.0**-25
    assert f"{half.flushes_at:.0e}" == "3e-08"
    assert brain.smallest_subnormal == 2.0**-133
    assert brain.decimal_digits == 2
    for number in ("2^-25 (3e-8)", "2^-133", f"loss scale of {power(underflow.SCALE)}", "1e-8"):
        assert number in told
    assert loops.EPS == 1e-8
    assert half.round(loops.EPS) == 0.0


def test_experiments_run_in_the_order_of_the_lab_each_once() -> None:
    assert [one.name for one in experiments_of(["ulp", "anatomy", "ulp"])] == ["anatomy", "ulp"]
    assert experiments_of() == EXPERIMENTS


def test_an_unknown_name_gets_one_sentence_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "nope"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'nope'" in line
    assert all(experiment.name in line for experiment in EXPERIMENTS)


def test_the_list_names_every_experiment_and_needs_no_torch() -> None:
    program = (
        "import sys; from ampcheck.cli.main import main; main(['lab', '--list']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [one.name for one in EXPERIMENTS]


@pytest.mark.parametrize("arguments", [["--list", "--html", "x.html"], ["ulp", "--html", "no/where.html"]])
def test_what_cannot_be_written_is_told_before_anything_runs(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab, "run_lab", lambda *_, **__: pytest.fail("it ran"))
    assert main(["lab", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_text_fits_into_eighty_columns_and_page_and_json_hold_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page, data = tmp_path / "lab.html", tmp_path / "lab.json"
    names = ["anatomy", "ulp", "exp", "stagnation"]
    assert main(["lab", *names, "--html", str(page), "--json", str(data)]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line)
    assert "The spacing of numbers (ulp)" in out
    assert "expected: " in out
    run = Run.load(data)
    assert not run.failed
    assert {finding.check for finding in run.findings} == {f"lab-{name}" for name in names}
    text = page.read_text(encoding="utf-8")
    assert all(chart.title in text for chart in run.charts)


def test_a_page_says_what_one_sees() -> None:
    run = lab.run_lab(["ulp"])
    assert run.tables[0].note.startswith(experiments_of(["ulp"])[0].about)
    assert run.environment["torch"]
    assert run.coverage.total


def test_an_experiment_that_breaks_is_a_failure_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> Run:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(ulp, "run", broken)
    run = lab.run_lab(["ulp", "exp"])
    (found,) = [finding for finding in run.findings if finding.check == "lab-ulp"]
    assert found.verdict is Verdict.FAIL
    assert "planted" in found.message
    assert any(finding.check == "lab-exp" for finding in run.findings)


def test_what_this_machine_lacks_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(**_: Any) -> Run:
        raise UsageError("this machine has no numbers")

    monkeypatch.setattr(ulp, "run", lacking)
    run = lab.run_lab(["ulp"])
    assert [finding.verdict for finding in run.findings] == [Verdict.SKIP]
    assert "no numbers" in run.findings[0].message


def test_a_device_that_is_not_there_is_told_for_what_needs_it() -> None:
    if not place("cuda").emulated:
        pytest.skip("this machine has CUDA")
    run = lab.run_lab(["ulp"], device="cuda")
    assert [finding.verdict for finding in run.findings] == [Verdict.SKIP]
    assert run.findings[0].message == "ulp needs the device itself, and cuda is not there"


@pytest.mark.parametrize(
    "name",
    [
        *("anatomy", "exp", "policy", "flow", "underflow", "stagnation"),
        "confounders",
    ],
)
def test_an_experiment_runs_to_its_end_here_and_its_charts_can_be_drawn(name: str) -> None:
    run = lab.run_lab([name])
    assert not run.failed, [finding.message for finding in run.of(Verdict.FAIL)]
    assert run.of(Verdict.PASS)
    assert run.coverage.total
    assert all(draw_chart(chart) for chart in run.charts)


def test_an_experiment_that_looks_at_nothing_or_judges_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = Run(findings=(Finding("lab-ulp", Verdict.PASS, "cpu", "all is well"),))
    idle = Run(coverage=Coverage({"values": 3}))
    for empty in (Run(), blind, idle):
        monkeypatch.setattr(ulp, "run", lambda empty=empty, **_: empty)
        assert lab.run_lab(["ulp"]).failed
        assert main(["lab", "ulp"]) == 1


def test_where_every_experiment_was_skipped_the_exit_code_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(**_: Any) -> Run:
        raise UsageError("this machine has no numbers")

    monkeypatch.setattr(ulp, "run", lacking)
    assert main(["lab", "ulp"]) == 1
    assert "every requested experiment was skipped" in " ".join(capsys.readouterr().out.split())


def test_what_an_interrupted_lab_has_seen_by_then_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: Any) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(exp, "run", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        main(["lab", "ulp", "exp"])
    assert "The spacing of numbers (ulp)" in capsys.readouterr().out


def test_progress_rises_over_all_experiments() -> None:
    seen: list[tuple[int, int]] = []
    lab.run_lab(["ulp", "exp"], progress=lambda stage, done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {200}


def test_any_number_can_be_taken_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "anatomy", "--value", "-0.1", "--value", "0"]) == 0
    out = capsys.readouterr().out
    assert f"{FORMATS['float16'].round(-0.1):.10g}" in out
    assert "pass: " in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["ulp", "--value", "1"],
        ["anatomy", "--value", "x"],
        ["anatomy", "--value", "1", "--full"],
        ["anatomy", "--value", "1", "--list"],
    ],
)
def test_what_is_no_number_or_has_no_place_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", *arguments]) == 2
    assert "--value" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cuda", "nosuch"])
def test_the_bits_on_a_device_that_is_not_there_are_a_usage_error(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cuda" and not place("cuda").emulated:
        pytest.skip("this machine has CUDA")
    assert main(["lab", "anatomy", "--value", "1", "--device", device]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert device in line


def test_a_negative_power_of_ten_needs_no_equals_sign_and_may_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--value=-1e-5"], ["--value", "-1e-5"]):
        assert main(["lab", "anatomy", *arguments]) == 0
        assert f"{FORMATS['bfloat16'].round(-1e-5):.10g}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--list", "foo"], "'foo'"),
        (["foo", "ulp"], "'foo'"),
        (["ulp", "--device", "nonsense"], "'nonsense'"),
        (["ulp", "--device", ""], "''"),
        (["ulp", "--device", "meta"], "'meta'"),
    ],
)
def test_a_usage_error_is_one_sentence_and_nothing_is_written(
    arguments: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = [] if "--list" in arguments else ["--html", str(tmp_path / "x.html"), "--json", str(tmp_path / "x.json")]
    assert main(["lab", *arguments, *output]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert word in line
    assert list(tmp_path.iterdir()) == []


def test_a_name_given_twice_is_run_and_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "ulp", "ulp"]) == 0
    assert capsys.readouterr().out.count("The spacing of numbers (ulp)") == 1
    assert main(["lab", "--list", "ulp", "anatomy", "ulp"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["anatomy", "ulp"]


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment whose libraries log, warn and log an error."""
    sound = ulp.run

    def run(**arguments: Any) -> Run:
        logging.getLogger("torch._inductor").warning("a line of inductor")
        logging.getLogger("a library without handlers").info("a line of nobody")
        warnings.warn("a warning of torch", UserWarning, stacklevel=1)
        logging.getLogger("transformers").error("an error of transformers")
        return sound(**arguments)

    monkeypatch.setattr(ulp, "run", run)


def test_libraries_log_errors_alone_and_are_afterwards_as_they_were(
    talkative: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("TORCH_LOGS", "TORCH_LOGS_OUT", "TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.DEBUG)
    before, filters = logging.root.manager.disable, list(warnings.filters)
    assert main(["lab", "ulp"]) == 0, capsys.readouterr().out  # here a warning is an error, and would fail
    assert [record.getMessage() for record in caplog.records] == ["an error of transformers"]
    assert logging.root.manager.disable == before
    assert warnings.filters == filters


_NOISY = """
import sys
from ampcheck.cli.main import main
if "lab" in sys.argv:
    assert main(["lab", "ulp"]) == 0
import torch
held = torch.empty(4096)
with torch.profiler.profile(profile_memory=True):
    del held
"""


@pytest.mark.parametrize("arguments", [["lab"], []])
def test_pytorchs_cpp_is_quiet_during_the_lab(arguments: list[str]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    env["KINETO_LOG_LEVEL"] = "99"
    command = [sys.executable, "-c", _NOISY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    # Without the lab it is not, or this would show nothing.
    assert ("CPUAllocator.cpp" in done.stderr) == (not arguments), done.stderr


def test_log_lines_and_warnings_that_were_asked_for_are_shown(
    talkative: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+inductor")
    monkeypatch.setattr(sys, "warnoptions", ["error"])
    assert main(["lab", "ulp"]) == 1  # the warning, an error here, reaches the experiment
    assert "a line of inductor" in caplog.messages
