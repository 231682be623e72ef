"""A worker does what it is asked in a process of its own, tells how it failed, and is never left behind."""

import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ampcheck
from ampcheck.core.errors import UsageError
from ampcheck.core.worker import Worker

HERE = Path(__file__).parent


def start(**settings):
    return Worker("worker_commands:commands", pythonpath=[HERE], **settings)


@pytest.fixture(scope="module")
def worker():
    with start(name="base, launch 2") as worker:
        yield worker


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 30 s"
        time.sleep(0.02)


def test_commands_share_their_state(worker):
    before = worker.ask("count", times=2)
    assert worker.ask("count", times=3) == before + 3


def test_any_json_crosses_both_ways(worker):
    value = {"a": [1, 2.5, None, True, "é\n\u2028"], "b": {"inf": math.inf}}
    assert worker.ask("echo", value=value) == value
    assert math.isnan(worker.ask("echo", value=math.nan))


def test_a_large_request_crosses(worker):
    assert worker.ask("echo", value="x" * 3_000_000) == "x" * 3_000_000


def test_what_is_printed_is_taken_for_no_reply(worker):
    assert worker.ask("chatter") == "spoken"
    assert worker.ask("echo", value=1) == 1


def test_a_command_that_reads_input_finds_none(worker):
    assert worker.ask("read") == ""


def test_a_usage_error_of_the_child_is_passed_on_with_its_name_and_the_worker_goes_on(worker):
    with pytest.raises(UsageError, match=r"^base, launch 2: a subject is required; found none$"):
        worker.ask("refuse")
    assert worker.ask("echo", value=1) == 1


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("stumble", "base, launch 2 was to stumble: it raised ValueError: no such shape"),
        ("leave", "base, launch 2 was to leave: it raised SystemExit: 3"),
        (
            "unheard of",
            "base, launch 2 was to unheard of: it raised AttributeError: 'types.SimpleNamespace' object has no "
            "attribute 'unheard of'",
        ),
    ],
)
def test_an_exception_of_a_command_is_one_sentence_and_the_worker_goes_on(worker, command, told):
    with pytest.raises(UsageError) as raised:
        worker.ask(command)
    assert str(raised.value) == told
    assert worker.ask("echo", value=1) == 1


def test_a_result_that_cannot_cross_is_told(worker):
    with pytest.raises(UsageError, match=r"was to odd: it raised .*(pickle|local object)"):
        worker.ask("odd")


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs signals")
@pytest.mark.parametrize(("number", "told"), [("SIGKILL", r"SIGKILL \(out of memory\?\)"), ("SIGSEGV", "SIGSEGV")])
def test_a_process_that_dies_is_told_with_its_last_words(number, told):
    with start(name="the cold start") as worker:
        with pytest.raises(
            UsageError, match=rf"(?s)^the cold start was ended by {told} while it was to die.*last words"
        ):
            worker.ask("die", number=number)
        assert worker.closed
        with pytest.raises(UsageError, match="the cold start was asked to echo and has been closed"):
            worker.ask("echo", value=1)


def test_a_process_that_dies_in_the_middle_of_its_reply_is_told():
    with start(name="the head") as worker:
        with pytest.raises(UsageError, match="the head ended with exit code 7 while it was to tear"):
            worker.ask("tear")
        assert worker.closed


def test_a_process_that_dies_and_leaves_its_pipe_to_a_child_is_told():
    with start() as worker, pytest.raises(UsageError, match="ended with exit code 7 while it was to die_with_a_child"):
        worker.ask("die_with_a_child")


def test_a_command_that_takes_too_long_ends_the_process():
    worker = start()
    pid = worker.pid
    worker.ask("echo", value=1)
    with pytest.raises(UsageError, match=r"was to sleep and had not done so after 0\.5 s: allow it more time"):
        worker.ask("sleep", seconds=60, timeout=0.5)
    assert worker.closed
    assert not is_alive(pid)


def test_a_module_that_cannot_be_imported_is_told():
    with (
        Worker("no_such_module", name="the worker") as worker,
        pytest.raises(
            UsageError, match=r"(?s)^the worker ended with exit code 1 while it was to do.*No module named 'no_su"
        ),
    ):
        worker.ask("do")


def test_an_interpreter_that_cannot_be_started_is_told():
    with pytest.raises(UsageError, match="the base could not be started: FileNotFoundError"):
        Worker("worker_commands:commands", name="the base", python="/no/such/python")


def test_environment_folder_and_import_path_are_as_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("AMPCHECK_TEST_GONE", "here")
    (tmp_path / "ampcheck").mkdir()
    (tmp_path / "ampcheck" / "__init__.py").write_text("raise RuntimeError('another checkout')")
    with start(cwd=tmp_path, env={"AMPCHECK_TEST_GONE": None, "AMPCHECK_TEST_SET": "there"}) as worker:
        assert worker.ask("tell", names=["AMPCHECK_TEST_GONE", "AMPCHECK_TEST_SET"]) == [None, "there"]
        folder, ours, commands = worker.ask("where")
    assert Path(folder) == tmp_path.resolve()
    assert ours == ampcheck.__file__
    assert Path(commands) == HERE / "worker_commands.py"


def test_closing_ends_the_process_and_all_that_it_started():
    worker = start()
    child = worker.ask("child")
    assert is_alive(child)
    worker.close()
    worker.close()
    wait_for(lambda: not is_alive(worker.pid) and not is_alive(child))


def test_what_is_registered_for_the_exit_is_done_when_it_is_closed(tmp_path):
    with start() as worker:
        worker.ask("register", path=str(tmp_path / "left"))
    assert (tmp_path / "left").read_text() == "done"


def test_a_worker_may_be_killed_at_once():
    worker = start()
    worker.ask("echo", value=1)
    worker.kill()
    assert worker.closed
    assert not is_alive(worker.pid)


def test_an_exception_in_the_block_ends_the_process():
    worker = start()

    def block():
        with worker:
            worker.ask("echo", value=1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        block()
    assert worker.closed
    wait_for(lambda: not is_alive(worker.pid))


def test_an_interrupt_while_waiting_ends_the_process():
    worker = start()
    worker.ask("echo", value=1)
    replies = worker._replies

    class Interrupted:
        def get(self, timeout):
            raise KeyboardInterrupt

    worker._replies = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        worker.ask("echo", value=2)
    worker._replies = replies
    assert worker.closed


def test_a_worker_that_is_forgotten_ends():
    worker = start()
    worker.ask("echo", value=1)
    pid = worker.pid
    del worker
    wait_for(lambda: not is_alive(pid))


def test_it_ends_in_the_middle_of_a_command_when_its_parent_is_killed():
    script = f"""
from ampcheck.core.worker import Worker
worker = Worker("worker_commands:commands", pythonpath=[{str(HERE)!r}])
worker.ask("echo", value=1)
print(worker.pid, flush=True)
worker.ask("sleep", seconds=60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline().split()[0])
        assert is_alive(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_for(lambda: not is_alive(pid))


def test_workers_run_beside_each_other_and_leave_no_thread():
    before = threading.active_count()
    with start(name="one") as one, start(name="two") as two:
        assert [one.ask("count", times=1), two.ask("count", times=5), one.ask("count", times=1)] == [1, 5, 2]
    wait_for(lambda: threading.active_count() <= before)
