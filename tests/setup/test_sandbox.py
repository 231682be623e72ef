"""Code of the repository runs in a copy: nothing that it does reaches the user's files or outlives the trial."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ampcheck.setup import sandbox
from ampcheck.setup.sandbox import TIMED_OUT, copied, run_quietly


def test_code_that_overwrites_a_large_file_changes_only_the_copy(tmp_path: Path) -> None:
    weights = b"weights " * 250_000
    (tmp_path / "weights.bin").write_bytes(weights)
    with copied(tmp_path) as copy:
        assert (copy / "weights.bin").read_bytes() == weights
        (copy / "weights.bin").write_bytes(b"overwritten")
    assert (tmp_path / "weights.bin").read_bytes() == weights


def test_code_that_overwrites_a_linked_file_changes_only_the_copy(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.bin").write_bytes(b"weights")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository/weights.bin").symlink_to(tmp_path / "elsewhere.bin")
    with copied(tmp_path / "repository") as copy:
        (copy / "weights.bin").write_bytes(b"overwritten")
    assert (tmp_path / "elsewhere.bin").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("limit", "value", "names"),
    [
        ("_FILE_BYTES", 100, {"a.bin", "b.bin", "net.py"}),
        ("_COPY_BYTES", 150, {"a.bin", "net.py"}),
        ("_FILES", 0, {"net.py"}),
    ],
)
def test_files_above_a_limit_are_left_out_but_never_python(
    tmp_path: Path, limit: str, value: int, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, limit, value)
    monkeypatch.setattr(sandbox.os, "walk", lambda folder: [(str(folder), [], ["a.bin", "b.bin", "c.bin", "net.py"])])
    for name, size in {"a.bin": 100, "b.bin": 100, "c.bin": 101, "net.py": 200}.items():
        (tmp_path / name).write_bytes(b"#" * size)
    with copied(tmp_path) as copy:
        assert {path.name for path in copy.iterdir()} == names


FORKING = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
pathlib.Path("child.tmp").write_text(str(child.pid))
pathlib.Path("child.tmp").rename("child")
time.sleep(120)
"""


def has_ended(process: int) -> bool:
    """Whether a process ends within ten seconds; one that nobody waits for counts as ended."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")


@needs_proc
def test_at_the_time_limit_the_processes_that_a_command_started_end_too(tmp_path: Path) -> None:
    assert run_quietly([sys.executable, "-c", FORKING], tmp_path, 3.0, tmp_path / "log.txt") == TIMED_OUT
    assert has_ended(int((tmp_path / "child").read_text(encoding="utf-8")))


@needs_proc
def test_an_interrupt_ends_the_command_and_the_processes_that_it_started(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "child").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_quietly([sys.executable, "-c", FORKING], tmp_path, 60.0, tmp_path / "log.txt")
    assert has_ended(int((tmp_path / "child").read_text(encoding="utf-8")))
