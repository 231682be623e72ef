"""Measuring code in a fresh Python process: requests and replies, a JSON line each, and no process left behind.

A *room* is a module with `commands() -> {name: function}`; the functions run in the child, take and give what JSON
holds (NaN and infinities included), and share what state they like through whatever `commands` closes over:

    env = {"TORCHINDUCTOR_CACHE_DIR": folder}
    with Worker("ampcheck.speed.startup.child_process", name="cold start", env=env) as worker:
        loaded = worker.ask("load", target="model.py:subject")
        seconds = worker.ask("run", calls=10, timeout=60)
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ampcheck.core.errors import UsageError, brief

PATIENCE = 900.0
"""Seconds that one command may take unless told otherwise: a cold compilation of a large model fits."""

_START = """\
import sys
sys.path.insert(0, {ours!r})
from ampcheck.speed import worker
sys.path.remove({ours!r})
worker.serve({room!r})
"""
"""`python -m` would take the `ampcheck` that stands in the folder it runs in, another one when that is a checkout of
ampcheck itself: both sides of a comparison, and both ends of the pipe, run this one."""

_POLL = 0.25
"""Seconds after which a silent child is looked at: one that died may have left its end of the pipe to a child of its
own, and then the pipe never ends."""


class Worker:
    """A Python process that runs a room's commands, one at a time. To be closed, or entered as a context.

    room: a module of this package with `commands()`. name: what messages call it. cwd: the folder it runs in. env:
    what differs from this process's environment; None takes a name away. pythonpath: folders to import from before all
    others, such as another checkout. python: the interpreter.

    It leads a session of its own, so that Ctrl-C reaches this process alone, which then ends it; it ends by itself when
    this process does, even in the middle of a command.
    """

    def __init__(
        self,
        room: str,
        *,
        name: str = "the worker",
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str | None] | None = None,
        pythonpath: Sequence[str | os.PathLike[str]] = (),
        python: str = sys.executable,
    ) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        ours = str(Path(__file__).resolve().parents[2])
        command = [python, "-c", _START.format(ours=ours, room=room)]
        try:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env=_environment(env or {}, pythonpath),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise UsageError(f"{name} could not be started: {brief(error)}") from error
        self._replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process.stdout, self._replies), daemon=True).start()
        self._end = weakref.finalize(self, _end, self._process, self._stderr)

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def closed(self) -> bool:
        """Whether it has ended, by `close` or after a failure."""
        return not self._end.alive

    def ask(self, command: str, *, timeout: float = PATIENCE, **arguments: Any) -> Any:
        """Run a command and wait for what it gives.

        Raises `UsageError` when the command raises (the worker goes on), when it takes longer than `timeout` seconds,
        or when the process dies (then it is closed).
        """
        if self.closed:
            raise UsageError(f"{self.name} was asked to {command} and has been closed")
        line = json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
        try:
            reply = self._exchange(line, command, timeout)
        except BaseException:  # also Ctrl-C: the reply that is under way would be taken for the next one
            self._end()
            raise
        if "error" in reply:
            told = self.name if reply["usage"] else f"{self.name} was to {command}"
            raise UsageError(f"{told}: {reply['error']}")
        return reply["result"]

    def close(self) -> None:
        """End the process; nothing happens where it has ended."""
        if not self.closed:
            with suppress(OSError, subprocess.TimeoutExpired):
                _write(self._process, b"\n")  # what it registered to be done at its exit is done
                self._process.wait(5)
        self._end()

    def kill(self) -> None:
        """End the process at once, where what it registered for its exit is nobody's concern."""
        self._end()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    def _exchange(self, line: bytes, command: str, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        with suppress(OSError):  # a broken pipe: why is told below
            _write(self._process, line)
        while True:
            left = deadline - time.monotonic()
            try:
                answer = self._replies.get(timeout=max(min(left, _POLL), 0))
            except queue.Empty:
                if self._process.poll() is not None:
                    answer = self._last()
                elif left <= 0:
                    told = f"{self.name} was to {command} and had not done so after {timeout:g} s"
                    raise UsageError(f"{told}: allow it more time, or give it less to do{self._tail()}") from None
                else:
                    continue
            if answer is None:
                raise UsageError(f"{self.name} {_how_it_ended(self._process)} while it was to {command}{self._tail()}")
            reply: dict[str, Any] = json.loads(answer)
            return reply

    def _last(self) -> bytes | None:
        """What a process that is dead said in its last moment."""
        try:
            return self._replies.get(timeout=_POLL)
        except queue.Empty:
            return None

    def _tail(self) -> str:
        """The end of what it printed, to follow a sentence."""
        size = os.fstat(self._stderr.fileno()).st_size
        self._stderr.seek(max(size - 4000, 0))
        lines = self._stderr.read().decode("utf-8", "replace").splitlines()
        last = list(deque((line for line in lines if line.strip()), 12))
        return "; it printed last:\n" + "\n".join(f"  {line}" for line in last) if last else ""


def _environment(changes: Mapping[str, str | None], pythonpath: Sequence[str | os.PathLike[str]]) -> dict[str, str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    if pythonpath:
        parts = [*(os.path.abspath(part) for part in pythonpath), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(part for part in parts if part)
    return environment


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _read(stream: IO[bytes], replies: queue.SimpleQueue[bytes | None]) -> None:
    """Hand on replies until the pipe ends; in a thread, since no select waits for a pipe on every platform."""
    with stream, suppress(ValueError, OSError):
        for line in stream:
            if line.endswith(b"\n"):  # else the process died in the middle of it
                replies.put(line)
    replies.put(None)


def _end(process: subprocess.Popen[bytes], stderr: IO[bytes]) -> None:
    """Kill the process and what it started, and let go of the pipes."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        elif process.poll() is None:
            process.kill()
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    stderr.close()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(5)
    except subprocess.TimeoutExpired:
        return "closed its end of the pipe"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


# In the child ------------------------------------------------------------------------------------------------------


def serve(room: str) -> None:
    """Answer requests from standard input until it ends. What is printed meanwhile goes to standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # a program that asks for input finds none, and takes no request
    os.dup2(2, 1)
    faulthandler.enable()
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, waiting), daemon=True).start()
    commands = importlib.import_module(room).commands()
    while (line := waiting.get()).strip():
        request = json.loads(line)
        try:
            answer = json.dumps({"result": commands[request["command"]](**request["arguments"])})
        except UsageError as error:
            answer = json.dumps({"error": str(error), "usage": True})
        except BaseException as error:  # the user's code: told to who asked
            if isinstance(error, KeyboardInterrupt):
                raise
            answer = json.dumps({"error": f"it raised {brief(error)}", "usage": False})
        replies.write(answer.encode() + b"\n")
        replies.flush()
    atexit._run_exitfuncs()  # what the user's code registered; tearing PyTorch down, a second, is nobody's concern
    sys.stdout.flush()
    os._exit(0)


def _listen(requests: IO[bytes], waiting: queue.SimpleQueue[bytes]) -> None:
    """Take requests while others run; without the one who asks nobody needs the answer, and this process ends."""
    for line in requests:
        waiting.put(line)
        if not line.strip():  # asked to end in peace
            return
    os._exit(1)
