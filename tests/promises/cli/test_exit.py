"""The command ends at once, after all that Python does for a program before its own teardown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUBJECT = """\
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch

POOL = ThreadPoolExecutor(1)

def later():
    time.sleep(1)
    Path("thread").touch()

class Kept:
    def __del__(self):
        Path("teardown").touch()

def model():
    atexit.register(Path("handler").touch)
    threading.Thread(target=later).start()
    POOL.submit(int).result()
    torch.kept = Kept()
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)

def overflow():
    return (lambda x: x * 1e6), (model()[1][0].half(),)
"""


@pytest.mark.parametrize(("target", "code"), [("model", 0), ("overflow", 1)])
def test_threads_end_and_exit_handlers_run_and_the_code_is_that_of_the_verdict(
    tmp_path: Path, target: str, code: int
) -> None:
    (tmp_path / "mine.py").write_text(SUBJECT)
    command = [sys.executable, "-m", "ampcheck", "audit", f"mine.py:{target}", "--fast"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert ended.stdout.rstrip()
    assert (tmp_path / "handler").exists()
    assert (tmp_path / "thread").exists()
    assert not (tmp_path / "teardown").exists(), "two seconds once torch is imported"
