"""The exit code is that of a verdict: whatever ends the process that judges, the parent reports it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

SUBJECTS = """
import atexit, ctypes, os, signal, sys
import torch
from torch import nn


class Large(nn.Module):
    scale = 1e3

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def odd(self):
        pass

    def forward(self, x):
        self.odd()
        return (self.inner(x) + 1) * self.scale * self.scale


def model(odd=lambda self: None, scale=1e3):
    torch.manual_seed(0)
    return type("Odd", (Large,), {"odd": odd, "scale": scale})(), (torch.randn(4, 8),)


def at_exit():
    atexit.register(lambda: os._exit(0))
    return model()


def at_exit_and_sound():
    atexit.register(lambda: os._exit(7))
    return model(scale=1.0)


def native_exit():
    return model(lambda self: ctypes.CDLL(None).exit(0))


def exits_now():
    return model(lambda self: os._exit(0))


def becomes_another():
    return model(lambda self: os.execv("/bin/sh", ["sh", "-c", "exit 0"]))


def crashes():
    return model(lambda self: ctypes.string_at(1))


def is_killed():
    return model(lambda self: os.kill(os.getpid(), signal.SIGKILL))


def closes_stdout():
    return model(lambda self: sys.stdout.close())


def closes_both_and_is_sound():
    return model(lambda self: (sys.stdout.close(), sys.stderr.close()), scale=1.0)


def forks():
    def run():
        if not os.fork():
            os._exit(0)
        os.wait()
        torch.ones(3).sum()

    return run
"""


def audit(folder: Path, target: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(SUBJECTS, encoding="utf-8")
    command = [sys.executable, "-m", "ampcheck", "audit", f"mine.py:{target}", "--fast", "--dtype", "float16"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    ("target", "how"),
    [
        ("native_exit", "with exit code 0"),
        ("exits_now", "with exit code 0"),
        ("becomes_another", "with exit code 0"),
        ("crashes", "by SIGSEGV"),
        ("is_killed", "by SIGKILL"),
    ],
)
def test_a_subject_that_ends_its_process_is_incomplete(tmp_path: Path, target: str, how: str) -> None:
    ended = audit(tmp_path, target)
    assert ended.returncode == 2, ended.stderr
    assert f"ampcheck: incomplete: the process that judged ended {how} before it had a verdict" in ended.stderr


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    ("target", "code"),
    [("at_exit", 1), ("at_exit_and_sound", 0), ("closes_stdout", 1), ("closes_both_and_is_sound", 0), ("forks", 0)],
)
def test_the_exit_code_of_a_verdict_stays(tmp_path: Path, target: str, code: int) -> None:
    ended = audit(tmp_path, target)
    assert ended.returncode == code, ended.stderr
    assert f"audit of mine.py:{target}: " in ended.stdout
    assert "Traceback" not in ended.stderr
    assert ("FAIL overflow" in ended.stdout) == (code == 1)


WORK = """
import signal, sys, time
from ampcheck.core.supervised import supervised

def work(hand_over):
    got = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: got.append(number))
    print("READY", flush=True)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        time.sleep(0.02)
    print(*got, flush=True)
    hand_over(5)
    sys.exit(0)

sys.exit(supervised(work))
"""


def working() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WORK], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "READY\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_a_signal_to_the_parent_or_to_its_group_reaches_the_child_once(send, number: signal.Signals) -> None:
    process = working()
    send(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert out.split() == [str(int(number))]
    assert process.returncode == 5


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the child")
def test_the_child_ends_with_its_parent() -> None:
    process = working()
    begin = time.monotonic()
    process.kill()
    out, _ = process.communicate(timeout=60)  # the pipe ends with the child
    assert not out
    assert time.monotonic() - begin < 1.0


def test_a_child_that_a_signal_ends_on_purpose_ends_the_parent_by_it() -> None:
    code = "import os, signal; from ampcheck.core.supervised import supervised; "
    code += "supervised(lambda hand_over: os.kill(os.getpid(), signal.SIGTERM))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGTERM


def test_the_parser_ends_in_its_own_codes(tmp_path: Path) -> None:
    codes = [
        subprocess.run([sys.executable, "-m", "ampcheck", *words], capture_output=True, check=False).returncode
        for words in (["--version"], ["no-such-command"], [])
    ]
    assert codes == [0, 2, 2]
