"""Files are written as a whole or not at all, by one process at a time."""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ampcheck.core.errors import UsageError

_DESCRIPTOR = re.compile(r"/(?:dev|proc/(\d+)(?:/task/\d+)?)/fd/(\d+)")
"""A path that names an open file of a process, once the links in its folder are resolved."""

_LINKS = 40
"""Links that Linux follows before it gives up."""


def cache_home() -> Path:
    """The folder of ampcheck among the user's caches, which need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~"), ".cache")
    return folder / "ampcheck"


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write bytes, or text as UTF-8, to `path` so that a reader sees the old file or the new one, never a part.

    A symlink stays, and its target is replaced; a file keeps its mode, and its owner where the system permits. Devices,
    pipes and open files of this process (`/dev/stdout`, `/dev/fd/3`) are written to directly.

    Raises `UsageError` where the path cannot be written: a missing or read-only folder, a symlink to nothing or to
    itself, a folder of that name, a full disk.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        if (handle := _open_directly(path)) is not None:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
        else:
            _replace(os.path.realpath(path), data)
    except UsageError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UsageError(f"cannot write {os.fspath(path)}: {_reason(error)}") from error


def _open_directly(path: str | os.PathLike[str]) -> int | None:
    """A handle for a device, a pipe or an open file; None for a regular file and for a path that is free."""
    number = _descriptor(os.fspath(path))
    if number is not None:
        for stream in (sys.stdout, sys.stderr):  # earlier output comes first
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        return os.dup(number)  # opened by its name, a file would be written from its beginning
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        if os.path.islink(path):
            raise UsageError(
                f"cannot write {os.fspath(path)}: it is a symlink to {os.path.realpath(path)}, which does not exist; "
                "create that file, or remove the link"
            ) from None
        return None
    return None if stat.S_ISREG(kind) else os.open(path, os.O_WRONLY)


def _descriptor(path: str) -> int | None:
    """The number of the open file of this process that `path` names, itself or through symlinks."""
    for _ in range(_LINKS):
        folder, name = os.path.split(os.path.abspath(path))
        path = os.path.join(os.path.realpath(folder), name)
        named = _DESCRIPTOR.fullmatch(path)
        if named and (named[1] is None or int(named[1]) == os.getpid()):
            return int(named[2])
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except OSError:  # no link, or one that cannot be read
            return None
    return None


def _replace(target: str, data: bytes) -> None:
    """Put a file with `data` in the place of `target`, in one step."""
    replaced: os.stat_result | None = None
    with suppress(FileNotFoundError):
        replaced = os.stat(target)
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".ampcheck-{secrets.token_hex(8)}")
    try:
        # Never wider than the file that it replaces, from the beginning; the umask narrows a new one.
        mode = 0o666 if replaced is None else stat.S_IMODE(replaced.st_mode)
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), mode)
    except OSError as error:
        if not os.path.isdir(folder):
            raise UsageError(f"cannot write {target}: there is no folder {folder}") from error
        raise UsageError(f"cannot write {target}: no file can be created in {folder} ({_reason(error)})") from error
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        if replaced is not None:
            _copy_owner_and_mode(replaced, temporary)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _copy_owner_and_mode(source: os.stat_result, path: str) -> None:
    if hasattr(os, "chown"):
        now = os.stat(path)
        for owner, group in ((source.st_uid, -1), (-1, source.st_gid)):
            if (owner, group) not in ((now.st_uid, -1), (-1, now.st_gid)):
                with suppress(OSError):
                    os.chown(path, owner, group)
    os.chmod(path, stat.S_IMODE(source.st_mode))  # last, as a new owner clears bits


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


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
