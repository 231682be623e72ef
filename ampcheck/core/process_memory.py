"""The memory that a process and its descendants use, as Linux reports it."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def tree_memory(pid: int, *, at_most: bool = False) -> int | None:
    """Bytes in memory of a process and all its descendants, pages that they share counted once.

    at_most: counted in each, which takes a fifth of the time. None where the system does not report it, or the
    process has ended.
    """
    children = defaultdict[int, list[int]](list)
    for entry in os.listdir(_PROC) if _PROC.is_dir() else ():
        if entry.isdigit():
            with suppress(OSError, IndexError, ValueError):  # it has ended
                # The name of the program comes before the parent, in parentheses, and may contain anything.
                fields = (_PROC / entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children[int(fields[1])].append(int(entry))
    tree = [pid]
    for member in tree:
        tree += children[member]
    memory = _resident if at_most else _memory
    known = [used for member in tree if (used := memory(member)) is not None]
    return sum(known) if known else None


def resident_memory() -> int | None:
    """Bytes of this process in memory; None where the system does not report them."""
    return _resident("self")


def total_memory() -> int | None:
    """Bytes of memory of this machine; None where the system does not report them."""
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _memory(pid: int) -> int | None:
    """Proportional set size: a page that n processes share counts 1/n in each."""
    with suppress(OSError, ValueError, IndexError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return _resident(pid)  # Linux before 4.14, and some containers


def _resident(pid: int | str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * int((_PROC / str(pid) / "statm").read_text().split()[1])
    return None
