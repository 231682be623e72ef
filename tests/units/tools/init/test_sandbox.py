"""Code of the repository runs in a copy: nothing that it does reaches the user's files or outlives the trial."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ampcheck.core.errors import UsageError
from ampcheck.tools.init import sandbox
from ampcheck.tools.init.sandbox import copied


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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_at_the_time_limit_the_processes_that_the_code_started_end_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FORKING, encoding="utf-8")
    with sandbox._started(tmp_path, "train") as worker, pytest.raises(UsageError, match="after 3 s"):
        worker.ask("main", timeout=3.0)
    process = int((tmp_path / "child").read_text(encoding="utf-8"))
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":  # nobody waits for it
            return
        time.sleep(0.1)
    pytest.fail("the process still runs")
