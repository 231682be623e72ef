"""Locks on files, released by the system when their process ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ampcheck.core.errors import UsageError


@contextmanager
def locked(handle: int, patience: float) -> Iterator[bool | None]:
    """Lock an open file for the duration of the context.

    Yields True if this process has the lock, False if another process kept it for `patience` seconds, and None where
    the system or the file system has no such lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return
    deadline = time.monotonic() + patience
    acquired: bool | None = False
    while not acquired:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            acquired = True
        except BlockingIOError:  # noqa: PERF203  # it waits here
            if time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        except OSError:  # a network file system without locks
            acquired = None
            break
    try:
        yield acquired
    finally:
        if acquired:
            fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def only_writer(path: str | os.PathLike[str], patience: float) -> Iterator[None]:
    """Be the only process that reads, changes and writes the file at `path`, which need not exist.

    The lock is on a second file, `.<name>.writing`, since `write_atomically` replaces the file itself; one that a
    killed process left behind is not locked. Raises `UsageError` where it cannot be created, or where another process
    writes for `patience` seconds.
    """
    target = Path(os.path.realpath(path))
    lock_file = target.with_name(f".{target.name}.writing")
    deadline = time.monotonic() + patience
    while True:
        try:
            handle = os.open(lock_file, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            exists = lock_file.parent.is_dir()
            reason = (error.strerror or error) if exists else f"there is no folder {lock_file.parent}"
            raise UsageError(f"cannot write {target}: {reason}") from error
        try:
            with locked(handle, deadline - time.monotonic()) as acquired:
                if acquired is False:
                    raise UsageError(
                        f"cannot write {target}: another process has been writing it for {patience:g} s; "
                        f"`fuser {lock_file}` names it"
                    )
                if not _is_at(handle, lock_file):  # the previous writer has removed it
                    continue
                try:
                    yield
                finally:
                    with suppress(OSError):
                        lock_file.unlink()
                return
        finally:
            os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False
