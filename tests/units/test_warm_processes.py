"""A warm process does what a cold one does: the same status, output and errors; torch is imported when it begins."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from warm_processes import WarmPopen, warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are all cold")

SCRIPT = "import sys\nprint(sys.argv, sys.path[0], __file__, __name__)\nsys.exit(5)\n"
COMMANDS = {
    "arguments": ("-c", "import sys; print(sys.argv, __name__, sys.path)", "a", "-b"),
    "script": ("script.py", "a", "-b"),
    "module": ("-m", "script", "a"),
    "module without a space": ("-mjson.tool", "data.json"),
    "input": ("-c", "import sys; print(sys.stdin.read().upper()); print('e', file=sys.stderr)"),
    "folder and environment": ("-c", "import os; print(os.getcwd(), sorted(os.environ.items()))"),
    "folder of temporary files": ("-c", "import tempfile; print(tempfile.gettempdir())"),
    "an uncaught error": ("-c", "import os\nraise ValueError(3)"),
    "a sentence": ("-c", "import sys; sys.exit('it does not work')"),
    "an interrupt": ("-c", "import os, time; os.kill(os.getpid(), 2); time.sleep(9)"),
    "killed": ("-c", "import os; os.kill(os.getpid(), 9)"),
    "exit handlers": ("-c", "import atexit; atexit.register(print, 'at the end'); print('first')"),
    "a thread that goes on": ("-c", "import threading, time; threading.Timer(0.1, print, ['late']).start()"),
    "a session of its own": ("-c", "import os; print(os.getsid(0) == os.getpid(), os.getppid() > 1)"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_it_ends_and_prints_as_a_cold_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "data.json").write_text("[1]")
    done = []
    for popen in (subprocess.Popen, WarmPopen):
        process = popen(
            [sys.executable, *COMMANDS[name]],
            cwd=tmp_path,
            env={**os.environ, "MINE": "é", "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        done.append((*process.communicate("of the test", timeout=100), process.returncode))
    assert done[0] == done[1]


def has_torch(*options: str) -> bool:
    code = "import sys; sys.exit('torch' in sys.modules)"
    return bool(subprocess.run([sys.executable, *options, "-c", code], check=False).returncode)


def test_torch_is_imported_when_it_begins_and_only_where_it_was_asked_for() -> None:
    with warm():
        assert has_torch()
        assert not has_torch("-I")  # options of Python start it cold
    assert not has_torch()


def test_threads_may_start_them_at_once() -> None:
    ended: list[int] = []
    with warm():
        run = [sys.executable, "-c", "import sys; sys.exit(3)"]
        threads = [
            threading.Thread(target=lambda: ended.append(subprocess.run(run, check=False).returncode)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ended == [3] * 8


def test_one_that_is_killed_is_gone_at_once() -> None:
    process = WarmPopen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert process.poll() is None
    process.kill()
    assert process.wait(timeout=100) == -9
