"""Processes of Python that start with torch imported, which takes most of a second: forked from one that waits.

The fixture `warm_processes` replaces `subprocess.Popen` in a test whose promise is not about the start of a process.
A warm process has its own arguments, folder, environment, files and session, is a child of the test, and differs from
a cold one in this alone: torch is in `sys.modules`, and hashes of strings are those of the process that waits. What
cannot be had so starts cold: other programs, options of Python, another environment of torch, systems but Linux.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import json
import linecache
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from subprocess import Popen
from typing import Any

# In the test ----------------------------------------------------------------------------------------------------------


@contextmanager
def warm() -> Iterator[None]:
    """Inside, processes of Python start with torch imported."""
    before, subprocess.Popen = subprocess.Popen, WarmPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 100_000
_AT_IMPORT = ("TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "GOMP_", "LD_", "CUDA_", "PYTHON")
"""Begin of the variables that Python and torch read when they start."""

_APPLIED = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUNBUFFERED")
"""Those of them that a warm process applies itself."""


class WarmPopen(Popen[Any]):
    """`subprocess.Popen`, warm where that makes no difference to the command."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell = more[:9]
        pipes, (_, gid, gids, uid, umask, new_session, *group) = more[9:15], more[15:]
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        special = (executable, preexec_fn, gid, gids, uid) != (None,) * 5 or umask != -1 or any(g != -1 for g in group)
        if special or shell or not _can_be_warm(args, environment):
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        files = {number: number if end == -1 else end for number, end in enumerate((pipes[0], pipes[3], pipes[5]))}
        files |= {number: number for number in pass_fds}
        request = {
            "arguments": [os.fsdecode(argument) for argument in args[1:]],
            "folder": os.fsdecode(os.getcwd() if cwd is None else cwd),
            "environment": environment,
            "new_session": bool(new_session),
            "files": list(files),
        }
        try:
            with _lock:
                self.pid = _fork(request, list(files.values()))
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _can_be_warm(arguments: Any, environment: Mapping[str, str]) -> bool:
    if sys.platform != "linux" or isinstance(arguments, (str, bytes, os.PathLike)):
        return False
    program, *rest = map(os.fsdecode, arguments)
    is_plain = program == sys.executable and rest and (rest[0][:2] in ("-c", "-m") or rest[0].endswith(".py"))
    here = _read_at_import(os.environ)
    is_short = sum(map(len, (*rest, *environment, *environment.values()))) < _MOST_BYTES
    return bool(is_plain and is_short and _read_at_import(environment) == here)


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: v for name, v in environment.items() if name.startswith(_AT_IMPORT) and name not in _APPLIED}


_lock = threading.Lock()
_waiting: dict[tuple[Any, ...], tuple[Popen[bytes], socket.socket]] = {}
"""The processes that wait, by the environment that torch was imported in."""


def _fork(request: Mapping[str, Any], files: Sequence[int]) -> int:
    """Start a warm process. Returns its id; it is a child of this process, as the one that forks it leaves it to us."""
    key = (os.getpid(), *sorted(_read_at_import(os.environ).items()))
    if key not in _waiting:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        environment = {name: value for name, value in os.environ.items() if name not in _APPLIED}
        process = Popen(command, pass_fds=(theirs.fileno(),), env=environment, cwd="/")
        theirs.close()
        _waiting[key] = process, ours
        atexit.register(_end, process, ours)
    connection = _waiting[key][1]
    with _adopting():
        socket.send_fds(connection, [json.dumps(request).encode()], files)
        return int(connection.recv(100))


def _end(process: Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.wait()


@contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among the descendants of this process become its children."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# In the process that waits --------------------------------------------------------------------------------------------


def _wait(connection: socket.socket) -> None:
    """Fork a process for each request until the other end is closed."""
    import torch

    path = sys.path[1:]
    while True:
        message, files, _, _ = socket.recv_fds(connection, 2 * _MOST_BYTES, 100)
        if not message:
            return
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            if (child := os.fork()) == 0:
                torch.seed()
                _become(json.loads(message), files, path)
            os.write(write, b"%d" % child)
            os._exit(0)
        os.waitpid(between, 0)  # now its child is one of the test's
        connection.send(os.read(read, 100))
        for file in (read, write, *files):
            os.close(file)


def _become(request: Mapping[str, Any], files: Sequence[int], path: Sequence[str]) -> None:
    """Run the command as `python` would, and end."""
    spare = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
    os.closerange(3, 1000)
    for file, number in zip(spare, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX")
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    tempfile.tempdir = None  # TMPDIR is read again
    direct = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stdout.reconfigure(write_through=direct)  # type: ignore[attr-defined]
    sys.stderr.reconfigure(line_buffering=True, write_through=direct)  # type: ignore[attr-defined]
    status = _status(request["arguments"])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    if status < 0:  # an interrupt
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _status(arguments: Sequence[str]) -> int:
    try:
        _run(*arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  # as the interpreter does
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run(first: str, *rest: str) -> None:
    kind = first[:2] if first[:2] in ("-c", "-m") else ""
    text, *others = (first[2:], *rest) if kind and first[2:] else rest if kind else (first, *rest)
    sys.argv[:] = [kind or text, *others]
    sys.path.insert(0, {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.abspath(text))))
    if kind == "-m":
        runpy.run_module(text, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    path = "<string>"
    if not kind:
        path = main.__file__ = os.path.abspath(text)
        with open(path, encoding="utf-8") as file:
            text = file.read()
    elif sys.version_info >= (3, 13):  # where a traceback shows the lines of `-c` too
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(compile(text, path, "exec"), main.__dict__)


if __name__ == "__main__":
    _wait(socket.socket(fileno=int(sys.argv[1])))
