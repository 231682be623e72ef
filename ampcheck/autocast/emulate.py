"""CPU tensors that follow another device's autocast policy, so that a CPU-only machine sees what a GPU would round.

The rules come from the policy of the installed PyTorch or of a shipped release. Where the CPU's own rule is another, a
Python kernel replaces it on the CPU's autocast key; all other ops keep PyTorch's kernel. `torch.autocast` for the
emulated device acts on the CPU, and both devices show the same state.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch

from ampcheck.autocast.cuda_stand_in import KINDS
from ampcheck.autocast.gpus import gpu_of
from ampcheck.autocast.kernels import CallObserver, CastCache, casts_with_grad, make_kernel
from ampcheck.autocast.placement import placed
from ampcheck.autocast.policy import load_release, releases
from ampcheck.autocast.probe import low_dtype, measure_policy
from ampcheck.autocast.redirect import Redirection
from ampcheck.autocast.state import autocast_key, device_type, registered, short
from ampcheck.core.arguments import DType
from ampcheck.core.arm import Arm
from ampcheck.core.environment import quiet
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.records.policy import LOWER, OTHER, RECURRENT, OpPolicy, Policy, release_of
from ampcheck.torchtools import dynamo
from ampcheck.torchtools.private import library_kernels

_P = ParamSpec("_P")
_T = TypeVar("_T")

_active: list[Emulation] = []
_lock = threading.RLock()


def emulate(device: str = "cuda", dtype: DType | None = None, *, release: str | None = None) -> Emulation:
    """A context in which CPU tensors follow the autocast policy of `device`.

    device: a device type that autocast knows, such as `cuda`. dtype: enter autocast to it, as
    `torch.autocast(device, dtype)` does; None leaves that to the `torch.autocast` regions inside, and `torch.autocast`
    for the device or for the CPU then means the emulated one. release: the PyTorch whose policy is followed, such as
    `2.13`; the installed one by default. Custom ops follow what is registered for the device on entering.

    For `cuda` on a machine without it, code that was written for a GPU runs as it stands: what it places on CUDA stays
    on the CPU and reports `device(type="cuda")`, `torch.cuda` answers, a `GradScaler` is enabled, and NCCL is Gloo.
    `cuda:a100`, `cuda:h100`, `cuda:3070`, `cuda:t4` and `cuda:v100` name the GPU whose capability and memory are
    reported.

    Works in eager mode, in backward, under torch.compile (Dynamo is reset on entry and exit), under activation
    checkpointing and in every thread; backward of a checkpoint must run inside, since it computes a forward again.
    Nests, and decorates functions; leaving restores PyTorch's kernels. Dtypes, casts, overflow to infinity and flush
    to zero are those of the device; the order in which a kernel sums is the CPU's. An op for which the CPU has no
    16-bit kernel raises here; `ampcheck audit` runs it in float32 and rounds. A decorator `@torch.autocast("cuda")`
    that was made before is off, for PyTorch switched it off when it was made: import the code inside.

    Raises `UsageError` for an unknown device, dtype or release, and on entering while another thread emulates.
    """
    low = low_dtype(dtype) if dtype is not None else None
    return Emulation(emulated_policy(device, dtype, release), low, gpu=gpu_of(device))


def emulated_policy(device: str, dtype: DType | None = None, release: str | None = None) -> Policy:
    """The policy of a device under a release, custom ops of this process included.

    Ops that only the device's own builds of PyTorch register, such as cuDNN's recurrent layers, come from the shipped
    snapshot where the installed build lacks them.
    """
    low = low_dtype(dtype if dtype is not None else torch.float16)
    measured = _measured(device_type(device), low)
    shipped = None
    if release is not None:
        shipped = load_release(release).policy(measured.device, *measured.dtypes)
        custom = {name: op for name, op in measured.ops.items() if not name.startswith("aten::")}
        measured = replace(shipped, ops={**shipped.ops, **custom})
    elif measured.device == "cuda" and release_of(measured.torch) in releases():  # cuDNN's
        snapshot = load_release(measured.torch)
        if measured.device in snapshot.policies:
            shipped = snapshot.policy(measured.device, *measured.dtypes)
    known = (policy for policy in (measured, shipped) if policy is not None)
    if any("aten::_cudnn_rnn" in (*policy.ops, *policy.unprobed) for policy in known):
        layers = {name: OpPolicy(LOWER, source="ATen/cudnn/AutocastRNN.cpp") for name in RECURRENT}
        measured = replace(measured, ops={**measured.ops, **layers})
    return measured


def _measured(device: str, low: torch.dtype) -> Policy:
    """The policy of the installed PyTorch, probed again when ops were registered since; never that of an emulation."""
    if device == "cpu" and _active:
        return replace(_active[0]._native, dtypes=(short(low),))
    return _probed(device, low, registered(device))


@functools.lru_cache(maxsize=32)
def _probed(device: str, low: torch.dtype, overloads: tuple[str, ...]) -> Policy:
    return measure_policy(device, low)


class Emulation:
    """Entered, the CPU follows `policy`.

    policy: the device's. dtype: autocast to it inside; None does not change autocast. observe: called for each call of
    an op that has a rule on either device, or is one of `also`. gpu: the name of the GPU that `torch.cuda` reports.
    `unavailable` names the ops of the policy that the installed PyTorch does not have. `made_before` counts the
    `torch.autocast` regions for the device that were entered, are off, and were made before the emulation: PyTorch
    does not tell whether that was meant.
    """

    def __init__(
        self,
        policy: Policy,
        dtype: torch.dtype | None = None,
        *,
        observe: CallObserver | None = None,
        also: Iterable[str] = (),
        gpu: str = "",
    ) -> None:
        unknown = [name for name, op in policy.ops.items() if op.rule == OTHER]
        if unknown:
            raise UsageError(f"{', '.join(unknown)} on {policy.device} follow no rule that can be emulated")
        self.policy = policy
        self.dtype = dtype
        self.unavailable: tuple[str, ...] = ()
        self._observe = observe
        self._also = frozenset(also) if observe is not None else frozenset()
        self._gpu = gpu
        self._thread = 0
        self._native = policy
        self._cache = CastCache(with_grad=casts_with_grad(policy.torch))
        self._redirection = Redirection(policy.device, self._cache.clear)
        self._overridden: set[str] = set()
        self._open = ExitStack()

    @property
    def made_before(self) -> int:
        """Number of entered regions for the device that are off, as they were made before the emulation."""
        return self._redirection.made_before

    def __enter__(self) -> Emulation:
        with _lock, ExitStack() as opening:
            if _active and _active[-1]._thread != threading.get_ident():
                raise UsageError("another thread emulates a device: autocast's kernels belong to the whole process")
            if self in _active:
                raise UsageError("this emulation is active already: make another to nest it")
            self._thread = threading.get_ident()
            self._install(opening)
            opening.callback(_active.remove, self)
            _active.append(self)
            opening.enter_context(self._redirection.installed())
            if self.policy.device in KINDS:
                opening.enter_context(placed(self.policy.device, self._gpu))
            opening.enter_context(dynamo.without_autograd_cache())  # its key does not include our kernels
            dynamo.reset()  # compiled code is guarded by autocast's state and not by its kernels
            opening.callback(dynamo.reset)
            if self.dtype is not None:
                opening.enter_context(torch.autocast("cpu", self.dtype))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        with _lock:
            self._open.__exit__(None, None, None)
            self._cache.clear()

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """`function`, each call of which runs under an emulation of its own."""

        @functools.wraps(function)
        def emulated(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with Emulation(self.policy, self.dtype, observe=self._observe, also=self._also, gpu=self._gpu):
                return function(*args, **kwargs)

        return emulated

    def _install(self, opening: ExitStack) -> None:
        native = self._native = _active[0]._native if _active else _measured("cpu", torch.float16)
        # An observer of an outer emulation observes the calls inside of this one too.
        observing = next(
            (emulation for emulation in (self, *reversed(_active)) if emulation._observe is not None), self
        )
        outer = set().union(*(emulation._overridden for emulation in _active))
        libraries: dict[str, torch.library.Library] = {}
        missing = []
        same_cache = casts_with_grad(self.policy.torch) == casts_with_grad(native.torch)
        self._overridden.clear()
        for name in sorted({*self.policy.ops, *native.ops, *observing._also, *outer}):
            wanted, own = self.policy.ops.get(name), native.ops.get(name)
            same = same_cache and _effect(wanted) == _effect(own)
            if observing._observe is None and name not in outer and same:
                continue
            namespace, _, rest = name.partition("::")
            try:
                kernel = make_kernel(name, wanted, self._cache, observing._observe)
            except (AttributeError, RuntimeError):
                missing.append(name)
                continue
            if namespace not in libraries:
                library = libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
                opening.callback(library._destroy)
            _implement(libraries[namespace], rest, kernel)
            self._overridden.add(name)
        self.unavailable = tuple(missing)


def active() -> Emulation | None:
    """The innermost emulation of this process."""
    return _active[-1] if _active else None


def arm_of(dtype: torch.dtype | str = "", mode: str = "", *, native: bool = False) -> Arm:
    """An arm in this process, which names the device and the release that are emulated."""
    name, emulation = format_of(dtype).name if dtype else "", active()
    if emulation is None:
        return Arm(name, mode, native=native)
    return Arm(name, mode, emulation.policy.device, release_of(emulation.policy.torch), native)


def _effect(op: OpPolicy | None) -> tuple[str, str, bool] | None:
    return None if op is None else (op.rule, op.redispatch, op.restores)


def _implement(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    """Register a kernel on the CPU's autocast key over the present one."""
    options: dict[str, Any] = {"with_keyset": kernel is not torch.library.fallthrough_kernel}
    if "allow_override" in inspect.signature(library.impl).parameters:
        options["allow_override"] = True
    else:  # PyTorch 2.6 refuses a second kernel from Python, that of an emulation inside another
        library_kernels.discard(f"{library.ns}/{name}/{autocast_key('cpu')}")
    with quiet():  # that a kernel is overridden is intended
        library.impl(name, kernel, autocast_key("cpu"), **options)  # type: ignore[no-untyped-call]
