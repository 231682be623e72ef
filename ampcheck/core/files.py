"""Files that a user keeps: written whole or not at all, locked by the process that writes, JSON read strictly."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ampcheck.core.errors import UsageError

DEPTH = 64
"""Levels of nesting in JSON. Ours has ten; the code that walks it recurses."""

_DESCRIPTOR = re.compile(r"/(?:dev|proc/(\d+)(?:/task/\d+)?)/fd/(\d+)")
"""A path that names an open file of a process, once the links in its folder are resolved."""

_LINKS = 40
"""Links that Linux follows before it gives up."""


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8 to `path` so that a reader sees the old file or the new one, never a part.

    A symlink stays, and the file that it names is replaced; a file keeps its mode, and its owner where the system lets
    us. Devices, pipes and open files of this process (`/dev/stdout`, `/dev/fd/3`) are written to directly.

    Raises `UsageError` where the path cannot be written: a missing or read-only folder, a symlink to nothing or to
    itself, a folder in the way, a full disk.
    """
    data = text.encode("utf-8")
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
    """A handle for what is written to and never replaced; None for a regular file and for a path that is free."""
    number = _descriptor(os.fspath(path))
    if number is not None:
        for stream in (sys.stdout, sys.stderr):  # what was printed before comes first
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        return os.dup(number)  # opened by its name, a file would be written from its beginning
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        if os.path.islink(path):
            raise UsageError(
                f"cannot write {os.fspath(path)}: it is a symlink to {os.path.realpath(path)}, which does not exist; "
                "make that file, or remove the link"
            ) from None
        return None
    return None if stat.S_ISREG(kind) else os.open(path, os.O_WRONLY)


def _descriptor(path: str) -> int | None:
    """The number of the open file of this process that `path` names, itself or through symlinks."""
    for _ in range(_LINKS):
        folder, name = os.path.split(os.path.abspath(path))
        path = os.path.join(os.path.realpath(folder), name)
        found = _DESCRIPTOR.fullmatch(path)
        if found and (found[1] is None or int(found[1]) == os.getpid()):
            return int(found[2])
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except OSError:  # no link, or none that can be read
            return None
    return None


def _replace(target: str, data: bytes) -> None:
    """Put a file with `data` in the place of `target`, in one step."""
    known: os.stat_result | None = None
    with suppress(FileNotFoundError):
        known = os.stat(target)
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".ampcheck-{secrets.token_hex(8)}")
    try:
        # Never wider than the file that it replaces, from the beginning; the umask narrows a new one.
        mode = 0o666 if known is None else stat.S_IMODE(known.st_mode)
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), mode)
    except OSError as error:
        if not os.path.isdir(folder):
            raise UsageError(f"cannot write {target}: there is no folder {folder}") from error
        raise UsageError(f"cannot write {target}: no file can be made in {folder} ({_reason(error)})") from error
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        if known is not None:
            _give_back(temporary, known)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _give_back(path: str, known: os.stat_result) -> None:
    """Owner, group and mode of the file that is replaced; another owner only where the system allows it."""
    if hasattr(os, "chown"):
        now = os.stat(path)
        for owner, group in ((known.st_uid, -1), (-1, known.st_gid)):
            if (owner, group) not in ((now.st_uid, -1), (-1, now.st_gid)):
                with suppress(OSError):
                    os.chown(path, owner, group)
    os.chmod(path, stat.S_IMODE(known.st_mode))  # last, as a new owner takes bits off


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# Locks ---------------------------------------------------------------------------------------------------------------


@contextmanager
def locked(handle: int, patience: float) -> Iterator[bool | None]:
    """Hold the lock of an open file for as long as the context lasts; it ends with the process, however that ends.

    Yields True where this process alone holds it, False where another one kept it for `patience` seconds, and None
    where the system or the file system has no such lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return
    until = time.monotonic() + patience
    alone: bool | None = False
    while not alone:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:  # noqa: PERF203  # it waits here
            if time.monotonic() >= until:
                break
            time.sleep(0.005)
        except OSError:  # a network's file system without locks
            alone = None
            break
    try:
        yield alone
    finally:
        if alone:
            fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def only_writer(path: str | os.PathLike[str], patience: float) -> Iterator[None]:
    """Be the only process that reads, changes and writes the file at `path`, which need not exist.

    The lock is on a file beside it, since `write_atomically` replaces the file itself; what a killed process left of
    it holds nobody up. Raises `UsageError` where it cannot be made, or where another process writes for `patience`
    seconds.
    """
    target = Path(os.path.realpath(path))
    guard = target.with_name(f".{target.name}.writing")
    until = time.monotonic() + patience
    while True:
        try:
            handle = os.open(guard, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            reason = _reason(error) if guard.parent.is_dir() else f"there is no folder {guard.parent}"
            raise UsageError(f"cannot write {target}: {reason}") from error
        try:
            with locked(handle, until - time.monotonic()) as alone:
                if alone is False:
                    raise UsageError(
                        f"cannot write {target}: another process has been writing it for {patience:g} s; "
                        f"`fuser {guard}` names it"
                    )
                if not _is_at(handle, guard):  # the writer before us took it away when it was done
                    continue
                try:
                    yield
                finally:
                    with suppress(OSError):
                        guard.unlink()
                return
        finally:
            os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


# JSON ----------------------------------------------------------------------------------------------------------------


def parse_json(text: str | bytes) -> Any:
    """JSON as data. Raises `ValueError`, whose message is one clause, for what `json.loads` takes and we do not:

    a key that stands twice in an object, as after a merge that kept both sides; nesting beyond `DEPTH`; and where
    git's conflict markers are the reason, that is the message.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        data = json.loads(text, object_pairs_hook=_object)
        _require_flat(data)
    except RecursionError:
        raise ValueError(f"it nests deeper than {DEPTH} levels") from None
    except ValueError as error:
        if isinstance(text, str) and (marker := conflict_in(text)):
            raise ValueError(marker) from error
        raise
    return data


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON kept at `path`. Raises `OSError`, or `ValueError` as `parse_json` does."""
    return parse_json(Path(path).read_bytes())


def conflict_in(text: str) -> str:
    """Where git left a conflict in a file, as a clause; empty where it left none."""
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"(<{7}|>{7}|\|{7})( |$)", line):
            return f"line {number} is a conflict marker of git ({line.rstrip()[:40]!r}): resolve the merge"
    return ""


def tag_nonfinite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they travel as {"float": "nan"}, which no other value looks like."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}  # numpy's own repr would not be read back
    if isinstance(value, dict):
        return {key: tag_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [tag_nonfinite(item) for item in value]
    return value


def untag_nonfinite(value: Any) -> Any:
    """What `tag_nonfinite` was given; lists become tuples."""
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {key: untag_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(untag_nonfinite(item) for item in value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r:.80} stands twice in one object, as after a merge that kept both sides")
    return data


def _require_flat(data: Any) -> None:
    """Raise `RecursionError` beyond `DEPTH`; without recursion, which the reader's own limit would end."""
    level = [data]
    for _ in range(DEPTH):
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            return
    raise RecursionError


def _inside(item: Any) -> list[Any]:
    values = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return [value for value in values if isinstance(value, (dict, list))]
