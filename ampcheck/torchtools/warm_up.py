"""The first compilation with empty caches takes 15 s more than another: Inductor tries the processor's vector
instructions and precompiles its C++ headers. A process of its own does so while eager code runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ampcheck.torchtools.dynamo import default_cache_folder

_CODE = "import torch; torch.compile(lambda x: x + 1)(torch.ones(8))"

_TRACES = ("TORCH_TRACE", "TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_COMPILE_DEBUG", "TORCHINDUCTOR_TRACE")
"""Variables that ask for a record of what is compiled: that of the user's code."""

_PATIENCE = 10.0
"""Seconds until a process that was to end is killed."""


@contextmanager
def compiler_warming_up() -> Iterator[subprocess.Popen[bytes] | None]:
    """Fill the caches of Inductor beside the block, if they are empty and this process may use several cores.

    Whatever the process does not finish, or cannot do, the first compilation does. It is ended with the block.
    """
    process = _start() if _cores() > 1 and _empty_cache() else None
    try:
        yield process
    finally:
        if process is not None:
            process.terminate()
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start() -> subprocess.Popen[bytes] | None:
    env = {name: value for name, value in os.environ.items() if name not in _TRACES}
    quiet = subprocess.DEVNULL
    with suppress(OSError):  # no process can be started
        # The folder is on the path of `python -c`: in that of the user, a file may have the name of a module.
        return subprocess.Popen(
            [sys.executable, "-c", _CODE], cwd=sys.prefix, env=env, stdin=quiet, stdout=quiet, stderr=quiet
        )
    return None


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


def _empty_cache() -> bool:
    """Whether Inductor's folder is missing or empty."""
    try:
        return not os.listdir(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_folder())
    except OSError as error:
        return isinstance(error, FileNotFoundError)
