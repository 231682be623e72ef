"""A fresh Python process for a measurement: requests and replies, a line each; it never outlives its parent.

The child answers with the functions of a module, or with the methods of one instance of a class in it, which take
what JSON can represent (NaN and infinities included) and return what can be pickled:

    env = {"TORCHINDUCTOR_CACHE_DIR": folder}
    with Worker("ampcheck.speed.startup.child_process:Start", name="cold start", env=env) as worker:
        loaded = worker.ask("load", target="model.py:subject")
        seconds = worker.ask("run", calls=10, timeout=60)
"""

from __future__ import annotations

import atexit
import base64
import faulthandler
import importlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ampcheck.core.errors import UsageError, brief
from ampcheck.core.process_memory import tree_memory

PATIENCE = 900.0
"""Seconds that one command may take by default: a cold compilation of a large model fits."""

_START = """\
import sys
sys.path.insert(0, {ours!r})
from ampcheck.core import worker
sys.path.remove({ours!r})
worker.serve({commands!r})
"""
"""Both sides of a comparison, and both ends of the pipe, run this `ampcheck`; `python -m` would import the one
of the folder it runs in, where that is a checkout of ampcheck."""

_POLL = 0.25
"""Seconds between looks at a silent child: one that died may have left its end of the pipe to a child of its own, and
then the pipe never ends."""

_SPARING, _GROWN = 30, 1.2
"""Times as long as an exact sample of the memory takes, until the next, unless its bound grows by more."""

TIME, MEMORY, ENDED = "time", "memory", "ended"


class WorkerEndedError(UsageError):
    """A worker that is closed before it replied. why: it hit a limit, `TIME` or `MEMORY`, or it `ENDED` by itself."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class Worker:
    """A Python process that runs commands, one at a time. To be closed, or entered as a context.

    commands: `package.module` or `package.module:Class`. name: in messages. cwd: the folder it runs in. env: changes to
    this process's environment; None removes a name. pythonpath: folders to import from before all others, such as
    another checkout. python: the interpreter. memory: bytes that it and its descendants may use, where the system
    reports them (Linux).

    It leads a session of its own, so that Ctrl-C reaches this process alone, which then ends it; it ends by itself when
    this process does, even in the middle of a command.
    """

    def __init__(
        self,
        commands: str,
        *,
        name: str = "the worker",
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str | None] | None = None,
        pythonpath: Sequence[str | os.PathLike[str]] = (),
        python: str = sys.executable,
        memory: int | None = None,
    ) -> None:
        self.name, self._memory = name, memory
        self._next_sample, self._bound = 0.0, 0
        self.peak: int | None = None
        """The largest use of memory that was seen, in bytes; sampled where a limit is set."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        ours = str(Path(__file__).resolve().parents[2])
        try:
            self._process = subprocess.Popen(
                [python, "-c", _START.format(ours=ours, commands=commands)],
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
        """True if it has ended, by `close` or after a failure."""
        return not self._end.alive

    def ask(self, command: str, *, timeout: float = PATIENCE, **arguments: Any) -> Any:
        """Run a command and return its result.

        Raises `UsageError` when the command raises (the worker goes on); `WorkerEndedError` when it takes longer than
        `timeout` seconds or more than the worker's memory, or when the process dies (then it is closed).
        """
        if self.closed:
            raise UsageError(f"{self.name} was asked to {command} and has been closed")
        try:
            with suppress(OSError):  # a broken pipe: `_reply` reports why
                self._write(json.dumps({"command": command, "arguments": arguments}).encode() + b"\n")
            reply = pickle.loads(base64.b64decode(self._reply(command, timeout)))  # of a child that runs our own code
        except BaseException:  # also Ctrl-C: the pending reply would be taken for the next one
            self._end()
            raise
        if "error" in reply:
            name = self.name if reply["usage"] else f"{self.name} was to {command}"
            raise UsageError(f"{name}: {reply['error']}")
        return reply["result"]

    def close(self) -> None:
        """End the process after its exit handlers; a closed worker stays closed."""
        if not self.closed:
            with suppress(OSError, subprocess.TimeoutExpired):
                self._write(b"\n")
                self._process.wait(5)
        self.kill()

    def kill(self) -> None:
        """End the process at once, without its exit handlers."""
        self._end()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _reply(self, command: str, timeout: float) -> bytes:
        deadline, ended = time.monotonic() + timeout, False
        while True:
            left = deadline - time.monotonic()
            with suppress(queue.Empty):
                reply = self._replies.get(timeout=max(min(left, _POLL), 0))
                if reply is not None:
                    return reply
                ended = True
            if ended:
                message = f"{self.name} {_exit(self._process)} while it was to {command}"
                raise WorkerEndedError(f"{message}{self._last_lines()}", ENDED)
            if left <= 0:
                message = (
                    f"{self.name} was to {command} and had not done so after {timeout:g} s: allow it more time, or"
                )
                raise WorkerEndedError(f"{message} give it less to do{self._last_lines()}", TIME)
            if self._memory is not None:
                self._require_memory(command, self._memory)
            ended = self._process.poll() is not None and self._replies.empty()

    def _require_memory(self, command: str, limit: int) -> None:
        begin = time.monotonic()
        bound = tree_memory(self.pid, at_most=True) or 0
        if begin < self._next_sample and bound <= min(limit, _GROWN * self._bound):
            return
        self._bound = bound
        used = tree_memory(self.pid)
        # Of a tree of large processes it takes a tenth of a second, beside work that may be timed.
        self._next_sample = begin + _SPARING * (time.monotonic() - begin)
        if used is None:
            return
        self.peak = max(used, self.peak or 0)
        if used > limit:
            message = f"{self.name} was to {command} and used {used / 2**30:.3g} GiB of memory"
            raise WorkerEndedError(f"{message}, more than the {limit / 2**30:.3g} GiB that it may", MEMORY)

    def _last_lines(self) -> str:
        """The end of its output, to follow a sentence."""
        self._stderr.seek(max(os.fstat(self._stderr.fileno()).st_size - 4000, 0))
        lines = [line for line in self._stderr.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return "".join(("; it printed last:", *(f"\n  {line}" for line in lines[-12:]))) if lines else ""


def _environment(changes: Mapping[str, str | None], pythonpath: Sequence[str | os.PathLike[str]]) -> dict[str, str]:
    merged = {**os.environ, "PYTHONUNBUFFERED": "1", **changes}
    environment = {name: value for name, value in merged.items() if value is not None}
    if pythonpath:
        parts = [*(os.path.abspath(part) for part in pythonpath), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(part for part in parts if part)
    return environment


def _read(stream: IO[bytes], replies: queue.SimpleQueue[bytes | None]) -> None:
    """Queue replies until the pipe ends; in a thread, since no select waits for a pipe on every platform."""
    with stream, suppress(ValueError, OSError):
        for line in stream:
            if line.endswith(b"\n"):  # else the process died in the middle of it
                replies.put(line)
    replies.put(None)


def _end(process: subprocess.Popen[bytes], stderr: IO[bytes]) -> None:
    """Kill the process and all that it started, and close the pipes."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        elif process.poll() is None:  # Windows
            process.kill()
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    stderr.close()


def _exit(process: subprocess.Popen[bytes]) -> str:
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


def serve(commands: str) -> None:
    """Answer requests from standard input until it ends. Output of the commands goes to standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # a program that reads its input takes no request
    os.dup2(2, 1)
    faulthandler.enable()
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, waiting), daemon=True).start()
    module, _, name = commands.partition(":")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, name)() if name else owner
    while (line := waiting.get()).strip():
        request = json.loads(line)
        try:
            answer = pickle.dumps({"result": getattr(owner, request["command"])(**request["arguments"])})
        except UsageError as error:
            answer = pickle.dumps({"error": str(error), "usage": True})
        except BaseException as error:  # the user's code
            if isinstance(error, KeyboardInterrupt):
                raise
            answer = pickle.dumps({"error": f"it raised {brief(error)}", "usage": False})
        replies.write(base64.b64encode(answer) + b"\n")
        replies.flush()
    atexit._run_exitfuncs()  # of the user's code; PyTorch's own end, a second, is left out
    sys.stdout.flush()
    os._exit(0)


def _listen(requests: IO[bytes], waiting: queue.SimpleQueue[bytes]) -> None:
    """Queue requests while a command runs; end this process when the parent ends."""
    for line in requests:
        waiting.put(line)
        if not line.strip():  # `close`
            return
    os._exit(1)
