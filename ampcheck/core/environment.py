"""The environment of a verdict: versions, device, threads, and the flags that change precision."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from ampcheck.core.run import Scalar


def environment(device: str = "cpu") -> dict[str, Scalar]:
    """The environment of this process, for `Run.environment`. Imports torch."""
    import torch

    matmul = torch.backends.cuda.matmul
    values: dict[str, Scalar] = {
        "ampcheck": installed("ampcheck"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "float32 matmul precision": _flag(torch.get_float32_matmul_precision),
        "TF32 in matmul": _flag(lambda: matmul.allow_tf32),
        "TF32 in cuDNN": _flag(lambda: torch.backends.cudnn.allow_tf32),
        "float16 reduced-precision reduction": _flag(lambda: matmul.allow_fp16_reduced_precision_reduction),
        "bfloat16 reduced-precision reduction": _flag(lambda: matmul.allow_bf16_reduced_precision_reduction),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "CUDA": torch.version.cuda or "none",
    }
    for package in ("numpy", "triton", "transformers"):
        if found := installed(package):
            values[package] = found
    return values


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment inside; afterwards they have the values of before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, such as those of code that runs for a measurement: the user's own run shows them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _flag(read: Callable[[], object]) -> Scalar:
    """A precision flag; torch refuses to read one whose successor has been set (2.9 and later)."""
    try:
        value = read()
    except RuntimeError:
        return "set through fp32_precision"
    return value if isinstance(value, (bool, str)) else str(value)


@cache
def installed(package: str) -> str:
    """The installed version of a distribution; empty without one."""
    try:
        return version(package)
    except (PackageNotFoundError, ValueError):  # of an empty name
        return ""


def _device_name(device: str) -> str:
    import torch

    kind = torch.device(device).type
    if kind == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({_processor()}, {os.cpu_count()} logical cores)" if kind == "cpu" else device


@cache
def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(names, "") or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()
