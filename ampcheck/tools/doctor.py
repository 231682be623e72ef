"""Abilities of this machine: each part is probed, with what follows where it is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F

from ampcheck.autocast.device import is_present
from ampcheck.autocast.missing import lacks_kernel
from ampcheck.autocast.observe import no_compiler
from ampcheck.autocast.policy import nearest, releases
from ampcheck.autocast.state import devices
from ampcheck.checks import extended as added_checks
from ampcheck.core.environment import installed
from ampcheck.core.extensions import Extension
from ampcheck.core.text import counted, listed
from ampcheck.ops.added import added_ops
from ampcheck.records.policy import release_of
from ampcheck.torchtools.dynamo import cache_folder, reset
from ampcheck.torchtools.subnormals import measure_subnormal_support


@dataclass(frozen=True, slots=True)
class Fact:
    """One part of the machine. present: None where it was not tried. found: version, name or reason. without, cure:
    what follows where `present` is false, and what to do about it."""

    name: str
    present: bool | None
    found: str
    without: str = ""
    cure: str = ""


_OPTIONAL = {
    "triton": ("on CUDA the tensors of health checks are measured by PyTorch's own ops, slower", "triton"),
    "tensorboard": ("the callback of TensorBoard cannot write; nothing else needs it", "tensorboard"),
    "wandb": ("the callback of Weights & Biases cannot write; nothing else needs it", "wandb"),
    "transformers": ("the callback of its Trainer cannot be imported; nothing else needs it", "transformers"),
    "lightning": ("the callback of Lightning cannot be imported; nothing else needs it", "lightning"),
    "xdist": ("pytest runs in one process; nothing else needs it", "pytest-xdist"),
}
"""Packages by the name that is imported: what follows without one, and the name that pip knows."""


def examine(*, quick: bool = False) -> Iterator[Fact]:
    """Each fact when it is found. quick: nothing is compiled."""
    yield Fact("Python", True, platform.python_version())
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield Fact("PyTorch", True, f"{torch.__version__}, {build}")
    yield _policies()
    yield from _devices()
    yield _compiler(quick)
    yield _inductor_cache()
    yield from map(_kernels, (torch.float16, torch.bfloat16))
    yield _subnormals()
    yield _speed()
    yield _plugin()
    yield _git()
    for package, (without, name) in _OPTIONAL.items():
        yield _package(package, name, without)
    yield from map(_extension, (*added_checks(), *added_ops()))


def _policies() -> Fact:
    release, shipped = release_of(torch.__version__), f"shipped for PyTorch {releases()[0]} to {releases()[-1]}"
    without = f"assert_policy() compares PyTorch {release} with the policy of {nearest(torch.__version__).release}"
    cure = "update ampcheck, or install a release that it has a policy of"
    return Fact("autocast policies", release in releases(), shipped, without, cure)


def _devices() -> Iterator[Fact]:
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    yield Fact("device cpu", True, f"{counted(threads, 'threads')} of PyTorch on {counted(cores, 'cores')}")
    kinds = [kind for kind in devices() if kind not in ("cpu", "meta") and hasattr(torch, kind)]
    yield from (Fact(f"device {kind}", True, _device_name(kind)) for kind in kinds if is_present(kind))
    if absent := [kind for kind in kinds if not is_present(kind)]:
        without = (
            "--device follows their autocast policies on the CPU; their kernels, speed and cudagraph are not judged"
        )
        yield Fact(
            f"devices {', '.join(absent)}", False, "none", without, "run where there is one, with a PyTorch for it"
        )


def _device_name(kind: str) -> str:
    module: Any = getattr(torch, kind)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else "present"


def _compiler(quick: bool) -> Fact:
    names = (os.environ.get("CXX") or "c++", "g++", "clang++")
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    without = (
        "compiled runs are skipped: graph-break, recompile, the compiled-* checks, speedup, compile-time, start-up"
    )
    cure = "install a C++ compiler (g++ and Python's headers) or set CXX, then run ampcheck doctor again"
    if quick:
        found = f"not tried (--quick) with {compiler}" if compiler else "no C++ compiler on the PATH"
        return Fact("torch.compile", None if compiler else False, found, without, cure)
    reason = no_compiler("cpu")
    reset()
    return Fact("torch.compile", not reason, reason or f"compiled a function with {compiler}", without, cure)


def _inductor_cache() -> Fact:
    folder, cure = cache_folder(), "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
    without = "each process compiles again, or cannot compile at all"
    return Fact("compile cache", os.access(folder, os.W_OK), folder, without, cure)


def _kernel_calls(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Ops that models are made of, on the CPU in one dtype."""
    x, image = torch.ones(2, 4, 8, dtype=dtype), torch.ones(1, 2, 8, 8, dtype=dtype)
    return {
        "matmul": lambda: x @ x.mT,
        "linear": lambda: F.linear(x, x[0]),
        "conv2d": lambda: F.conv2d(image, image[:, :, :3, :3]),
        "batch_norm": lambda: F.batch_norm(image, None, None, training=True),
        "layer_norm": lambda: F.layer_norm(x, (8,)),
        "softmax": lambda: x.softmax(-1),
        "cross_entropy": lambda: F.cross_entropy(x[0], torch.zeros(4, dtype=torch.long)),
        "attention": lambda: F.scaled_dot_product_attention(x, x, x),
        "interpolate": lambda: F.interpolate(image, scale_factor=2, mode="bilinear"),
        "cumsum": lambda: x.cumsum(-1),
        "fft": lambda: torch.fft.rfft(x),
        "cholesky": lambda: torch.linalg.cholesky(torch.eye(2, dtype=dtype)),
    }


def _kernels(dtype: torch.dtype) -> Fact:
    calls = _kernel_calls(dtype)
    missing = [name for name, call in calls.items() if not _runs(call)]
    lacking = f"none for {listed(missing, len(missing))}" if missing else "all"
    name, found = str(dtype).removeprefix("torch."), f"{len(calls) - len(missing)} of {len(calls)} tried; {lacking}"
    without = "an emulated device runs such an op in float32 and rounds; on --device cpu the model raises there"
    usual = set(missing) <= {"fft", "cholesky"}
    return Fact(f"CPU kernels in {name}", usual, found, without, "install a newer PyTorch")


def _runs(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError as error:  # also what oneDNN raises for an instruction set that is missing
        return not (lacks_kernel(error) or "Unsupported dtype" in str(error) or "primitive" in str(error))
    return True


def _subnormals() -> Fact:
    support = measure_subnormal_support()
    flushed = [name for name, kept in support.items() if False in (kept.multiply, kept.add)]
    found = f"flushed in {listed(flushed)}" if flushed else "kept on the CPU in every dtype"
    without = "values below the smallest normal number become zero; the check flush counts them"
    cure = "leave out torch.set_flush_denormal(True), or compilers' -ffast-math"
    return Fact("subnormals", not flushed, found, without, cure)


def _speed() -> Fact:
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    found = f"load {load:.1f} on {counted(cores, 'cores')}"
    without = "speed verdicts take longer and are often UNDECIDED; none fails because of it"
    cure = "end other programs before ampcheck speed"
    return Fact("quiet machine", load < max(cores / 2, 1), found, without, cure)


def _plugin() -> Fact:
    found = any(entry.name == "ampcheck" for entry in entry_points(group="pytest11"))
    off = os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    reason = "PYTEST_DISABLE_PLUGIN_AUTOLOAD is set" if off else "" if found else "ampcheck is not installed with pip"
    without = "--ampcheck, the marker and the fixture speed do not exist; assert_* functions work"
    cure = "run pytest -p ampcheck.plugin.plugin" if off else "pip install ampcheck in this environment"
    return Fact("pytest plugin", not reason, reason or f"pytest {installed('pytest')} loads it", without, cure)


def _git() -> Fact:
    path = shutil.which("git")
    without = "no comparison with another revision: bisect, speed --base"
    return Fact("git", path is not None, path or "not on the PATH", without, "install git")


def _extension(added: Extension) -> Fact:
    cure = "mend it, or uninstall the package"
    return Fact(str(added), not added.error, added.error or "loaded", "its checks, traits and rules are left out", cure)


def _package(package: str, name: str, without: str) -> Fact:
    spec = None if package in sys.modules else find_spec(package)
    # A folder of that name, such as the logs in wandb/, is a namespace package without a file of its own.
    present = package in sys.modules or (spec is not None and spec.origin is not None)
    found = installed(name) or "present" if present else "not installed"
    return Fact(name, present, found, without, f"pip install {name}")
