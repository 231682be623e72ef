"""An audit says what it finds as it goes: eager verdicts before it compiles, what was judged when it is interrupted,
how long a stage took the last time, and the command that finds one finding again."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ampcheck.cli.following import Following, second_interrupt_ends
from ampcheck.cli.main import main
from ampcheck.cli.stage_times import StageTimes, about
from ampcheck.cli.targets import command_of
from ampcheck.core.arm import Arm
from ampcheck.core.heartbeat import Heartbeat
from ampcheck.core.run import Coverage, Finding, Run, Verdict
from ampcheck.core.settings import Target
from ampcheck.report.progress import ProgressBar

TARGETS = """
import os, sys, time
import torch

def rest():
    print("READY", file=sys.stderr, flush=True)
    time.sleep(120)

class Model(torch.nn.Module):
    def __init__(self, scale, slow=None):
        super().__init__()
        self.inner, self.scale, self.slow = torch.nn.Linear(4, 4), scale, slow
        torch.nn.init.ones_(self.inner.weight)
    def forward(self, x):
        if self.slow is not None and torch.get_autocast_dtype("cpu") == self.slow and torch.is_autocast_enabled("cpu"):
            rest()
        return self.inner(x) * self.scale

x = torch.ones(2, 4)
def sound(): return Model(1.0), (x,)
def overflow(): return Model(30000.0), (x,)
def first(): return Model(30000.0, torch.float16), (x,)
def second(): return Model(30000.0, torch.bfloat16), (x,)

def loop():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(i):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()
    return {"model": model, "optimizer": optimizer, "step": step, "save": rest, "load": lambda state: None}
"""

TWO = ("--dtype", "float16,bfloat16")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "targets.py").write_text(TARGETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("targets", None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def started(*arguments: str) -> subprocess.Popen[str]:
    """An audit in a session of its own, whose whole group gets Ctrl-C as from a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "ampcheck", "audit", *arguments, "--json", "run.json", "--html", "page.html"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "100"},
    )


def wait_for(stream: object, text: str) -> str:
    """Read a stream up to the line with a text."""
    seen = ""
    for line in stream:  # type: ignore[attr-defined]
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text} was not printed: {seen}")


def interrupt(audit: subprocess.Popen[str]) -> None:
    os.killpg(audit.pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("target", "judged", "number"),
    [
        ("first", 0, signal.SIGINT),
        ("second", 1, signal.SIGINT),
        ("second", 1, signal.SIGTERM),
        ("loop", 1, signal.SIGINT),
    ],
)
def test_an_interrupt_leaves_a_report_of_what_was_judged_marked_as_incomplete(
    folder: Path, target: str, judged: int, number: signal.Signals
) -> None:
    audit = started(f"targets.py:{target}", "--no-compile", *(TWO if target != "loop" else ()))
    wait_for(audit.stderr, "READY")
    os.killpg(audit.pid, number)
    out, err = audit.communicate(timeout=60)
    assert audit.returncode == 128 + number, err
    how = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
    assert f"ampcheck: {how}; the report says what was judged until then" in err
    assert "Traceback" not in err
    assert out.startswith(f"audit of targets.py:{target}, interrupted: ")
    run = Run.load(folder / "run.json")
    (mark,) = run.of(Verdict.INCOMPLETE)
    assert (mark.check, mark.subject) == ("coverage", f"targets.py:{target}")
    assert f"interrupted during the stage targets.py:{target}: " in mark.message
    assert "interrupted" in (folder / "page.html").read_text(encoding="utf-8")
    assert bool(judged) == bool(run.coverage.total)
    if target == "second":
        assert {f.subject for f in run.of(Verdict.FAIL)} == {"targets.py:second [float16, eager]"}
        assert "FAIL overflow: targets.py:second [float16, eager]" in out


def test_eager_verdicts_are_printed_before_anything_is_compiled_and_a_second_interrupt_ends_at_once(
    folder: Path,
) -> None:
    audit = started("targets.py:overflow", "--dtype", "float16")
    early = wait_for(audit.stdout, "now compiling")
    early += wait_for(audit.stdout, "FAIL overflow: targets.py:overflow [float16, eager]")
    assert early.startswith("eager: 2 failed, ")
    assert audit.poll() is None
    interrupt(audit)
    wait_for(audit.stderr, "ampcheck: interrupted")
    interrupt(audit)
    audit.communicate(timeout=10)
    assert audit.returncode == -signal.SIGINT
    assert not (folder / "run.json").exists() or Run.load(folder / "run.json").findings, "nothing is half-written"


def test_a_handler_that_python_did_not_install_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr("ampcheck.cli.following.signal.getsignal", lambda number: None)
        with second_interrupt_ends():
            patch.undo()
            assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("target", ["overflow", "sound"])
@pytest.mark.usefixtures("warm_processes")
def test_the_command_of_a_finding_finds_it_again_and_no_other(
    folder: Path, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    main(["audit", f"targets.py:{target}", "--no-compile", *TWO, "--json", "run.json"])
    problems = [f for f in Run.load("run.json").findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]
    assert len(problems) == {"overflow": 2, "sound": 0}[target]
    assert all(f"reproduce: {problem.reproduce}" in capsys.readouterr().out for problem in problems[:1])
    for problem in problems:
        words = shlex.split(problem.reproduce)
        assert words[:2] == ["ampcheck", "audit"]
        assert main([*words[1:], "--json", "again.json"]) == 1
        again = [f for f in Run.load("again.json").findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]
        assert [f.key for f in again] == [problem.key]


@pytest.mark.parametrize(
    ("arm", "target", "command"),
    [
        (Arm("bfloat16", "compiled"), Target("m.py:f"), "ampcheck audit m.py:f --select flush --dtype bfloat16"),
        (Arm("float16", "eager", native=True), Target("m.py:f"), "ampcheck audit m.py:f --select flush --no-compile"),
        (Arm(), Target("m.py:f", steps=9), "ampcheck audit m.py:f --select flush --steps 9"),
        (Arm(), Target("m.py:f", full=True), "ampcheck audit m.py:f --select flush --full"),
        (Arm(), Target("m.py:f", "cuda"), "ampcheck audit m.py:f --select flush --device cuda"),
        (Arm(), Target("m.py:f", compile=False), "ampcheck audit m.py:f --select flush --no-compile"),
        (Arm("float16", "policy", "cpu"), Target("a b.py:f"), "ampcheck audit 'a b.py:f' --select flush"),
        (Arm("float16", "eager"), Target(""), "ampcheck audit --select flush --dtype float16 --no-compile"),
    ],
)  # fmt: skip
def test_the_command_of_a_finding_has_its_check_dtype_and_mode(arm: Arm, target: Target, command: str) -> None:
    assert command_of(target, Finding("flush", Verdict.FAIL, "m.py:f", "m", arm=arm)) == command


# Expected times.


def test_times_are_those_of_the_last_audit_of_this_target_with_these_options(cache: Path) -> None:
    target = Target("m.py:f")
    StageTimes.of(target).save({"eager": 12.3456})
    assert StageTimes.of(target).seconds == {"eager": 12.346}
    assert StageTimes.of(replace(target, severity={"flush": "warn"}, fail_on="warn")).seconds == {"eager": 12.346}
    for other in (Target("m.py:g"), replace(target, compile=False), replace(target, dtype=("float16",))):
        assert StageTimes.of(other).seconds == {}
    assert all(path.is_relative_to(cache) for path in cache.rglob("*"))


def test_times_of_another_machine_are_not_shown(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StageTimes.of(Target("m.py:f")).save({"eager": 12.0})
    monkeypatch.setattr("ampcheck.cli.stage_times.platform.node", lambda: "another")
    assert StageTimes.of(Target("m.py:f")).seconds == {}


def test_what_this_run_measured_scales_the_times_of_the_last(cache: Path) -> None:
    times = StageTimes(cache, {"eager": 10.0, "compiled": 60.0})
    assert times.expected(["compiled"], {}) == 60.0
    assert times.expected(["compiled"], {"eager": 30.0}) == 180.0, "a machine that is busier now"
    assert times.expected(["compiled"], {"another stage": 30.0}) == 60.0
    assert times.expected(["unknown"], {"eager": 30.0}) == 0.0


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[1]", b'{"eager": "long"}', b'{"eager": -1, "x": {"float": "nan"}}', b"{"]
)
def test_a_damaged_file_of_times_is_ignored(cache: Path, content: bytes) -> None:
    times = StageTimes.of(Target("m.py:f"))
    times.file.parent.mkdir(parents=True)
    times.file.write_bytes(content)
    assert StageTimes.of(Target("m.py:f")).seconds == {}


def test_a_cache_that_cannot_be_written_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        StageTimes.of(Target("m.py:f")).save({"eager": 1.0})
        assert StageTimes.of(Target("m.py:f")).seconds == {}


def test_a_stage_is_shown_with_the_time_it_took_the_last_time(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    passed = Finding("flush", Verdict.PASS, "m", "well", seen=1)

    class Bar(ProgressBar):
        def __call__(self, stage: str, done: int, total: int) -> None:
            shown.append(stage)

    clock = iter([0.0, 1.0, 31.0, 271.0, 272.0] * 2)
    monkeypatch.setattr("ampcheck.cli.following.time", SimpleNamespace(monotonic=lambda: next(clock)))
    for _ in range(2):
        following = Following(
            Bar(Heartbeat(shown.append)), StageTimes.of(Target("m.py:f")), lambda run: run, early=True
        )
        listener = following.listener
        listener.progress("float16, eager", 0, 2)
        listener.judged(Run(findings=(passed,), coverage=Coverage({"ops": 1})))
        listener.compiling()
        listener.progress("float16, compiled", 1, 2)
        listener.progress("done", 2, 2)
        following.finish()
    assert shown[:4] == ["loading torch and the subject", "float16, eager", "float16, compiled", "done"]
    assert shown[4:] == [
        "loading torch and the subject, about 1 s",
        "float16, eager, about 30 s",
        "float16, compiled, about 4 min",
        "done",
    ]
    assert capsys.readouterr().out == "eager: 1 passed; now compiling\neager: 1 passed; now compiling, about 4 min\n"


def test_a_duration_is_rough() -> None:
    assert [about(t) for t in (0.2, 1.4, 99.4, 100, 3600)] == [
        "less than 1 s", "about 1 s", "about 99 s", "about 2 min", "about 60 min",
    ]  # fmt: skip


def test_a_training_loop_says_how_many_steps_and_how_long_before_it_starts(
    folder: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = TARGETS.replace(', "save": rest, "load": lambda state: None', "")
    (folder / "targets.py").write_text(
        text.replace("    def step(i):", "    def step(i):\n        print('step', flush=True)")
    )
    assert main(["audit", "targets.py:loop", "--steps", "3"]) == 0
    said = "ampcheck: up to 3 training steps are observed; each takes several times as long as alone; --steps N"
    assert said in capfd.readouterr().err
    (file,) = (cache / "ampcheck" / "stages").iterdir()
    times = StageTimes.of(Target("targets.py:loop", steps=3))
    assert times.file == file
    times.save({"plain steps": 42.0})
    main(["audit", "targets.py:loop", "--steps", "3"])
    assert "3 training steps are observed; about 42 s, as the last time" in capfd.readouterr().err
    main(["audit", "targets.py:loop", "--steps", "3"])
    assert "ampcheck: up to" not in capfd.readouterr().err
