"""The fast CPU path: a small C++ kernel, compiled on first use and stored in the user's cache directory.

It bypasses Dynamo and the dispatcher: it reads memory through a pointer, without the GIL. Where there is no compiler,
``unavailable()`` gives the reason and the caller falls back to plain torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ampcheck.core.files import cache_home
from ampcheck.health.cpu_source import SOURCE
from ampcheck.health.plan import Plan

_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC", "-x", "c++", "-")
_COMPILE_SECONDS = 120


def pack(tensor: torch.Tensor, plan: Plan) -> Sequence[float]:
    """Return the packed vector of a dense tensor whose dtype is ``plan.carrier``. Its strides may be permuted."""
    function, normal, histogram, zeros = _prepared(plan)
    out = array("d", zeros)
    function(tensor.data_ptr(), tensor.numel(), normal, histogram, out.buffer_info()[0])
    return out


def unavailable() -> str | None:
    """Return why there is no fast path on this machine, ``None`` where there is one."""
    kernels = _library()
    return kernels if isinstance(kernels, str) else None


@functools.lru_cache(maxsize=256)
def _prepared(plan: Plan) -> tuple[Callable[..., None], int, int, bytes]:
    kernels = _library()
    assert not isinstance(kernels, str)  # `unavailable` is asked first
    function = kernels[f"measure_{plan.format.name}"]
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = [pointer, integer, integer, integer, pointer], None
    return function, plan.normal_code, int(plan.histogram), bytes(8 * plan.width)


@functools.cache
def _library() -> ctypes.CDLL | str:
    """Return the compiled kernels, or the reason why there are none."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        return "there is no C++ compiler (c++, g++ or clang++) on the PATH"
    real = Path(compiler).resolve()
    identity = f"{real} {real.stat().st_size} {real.stat().st_mtime_ns}"
    key = hashlib.sha256("\0".join((SOURCE, *_FLAGS, identity, _processor())).encode()).hexdigest()
    try:
        return _cached(_cache_directory() / f"health-{key[:32]}.so", compiler)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler} did not build the kernel: {error}"


def _cached(path: Path, compiler: str) -> ctypes.CDLL:
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink(missing_ok=True)  # damaged: build it again
    # Another process may build too: the whole file is moved into place at once.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        try:
            _compile([compiler, "-march=native", *_FLAGS, "-o", str(built)])
        except subprocess.CalledProcessError:  # not every compiler knows the option
            _compile([compiler, *_FLAGS, "-o", str(built)])
        built.replace(path)
    return ctypes.CDLL(str(path))


def _compile(command: list[str]) -> None:
    subprocess.run(command, input=SOURCE.encode(), check=True, capture_output=True, timeout=_COMPILE_SECONDS)


def _cache_directory() -> Path:
    chosen = cache_home()
    try:
        chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen):
            return chosen
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return Path(tempfile.mkdtemp(prefix="ampcheck-"))


def _processor() -> str:
    """Identify the instruction set: a home directory may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return " ".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )
