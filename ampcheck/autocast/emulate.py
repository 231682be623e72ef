"""CPU tensors that follow another device's autocast policy, so that a CPU-only machine sees what a GPU would round.

The rules come from the policy of the installed PyTorch or of a shipped release. Where the CPU's own rule is another, a
Python kernel takes its place on the CPU's autocast key; all other ops keep PyTorch's kernel.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch as pytorch

from ampcheck.autocast.kernels import RECURRENT, CallObserver, CastCache, make_kernel
from ampcheck.autocast.policy import LOWER, OTHER, OpPolicy, Policy, release_of
from ampcheck.autocast.probe import low_dtype, measure_policy
from ampcheck.autocast.redirect import Redirection
from ampcheck.autocast.snapshots import load_release, releases
from ampcheck.autocast.state import autocast_key, device_type, registered
from ampcheck.core.errors import UsageError

_active: list[Emulation] = []
_lock = threading.RLock()


def emulate(device: str = "cuda", dtype: pytorch.dtype | str | None = None, *, torch: str | None = None) -> Emulation:
    """A context in which CPU tensors follow the autocast policy of `device`.

    device: a device type that autocast knows, such as `cuda`. dtype: enter autocast to it, as
    `torch.autocast(device, dtype)` does; None leaves that to the `torch.autocast` regions inside, and `torch.autocast`
    for the device or for the CPU then means the emulated one. torch: the release whose policy is followed, such as
    `2.13`; the installed one by default. Custom ops follow what is registered for the device on entering.

    Works in eager mode, in backward, under torch.compile (Dynamo is reset on the way in and out), under activation
    checkpointing and in every thread; backward of a checkpoint must run inside, since it computes a forward again.
    Nests, and decorates functions; leaving restores PyTorch's kernels. Dtypes, casts, overflow to infinity and flush
    to zero are those of the device; the order in which a kernel sums is the CPU's. An op for which the CPU has no
    16-bit kernel raises here; `ampcheck audit` runs it in float32 and rounds. A decorator `@torch.autocast("cuda")`
    that was made before is off, for PyTorch switched it off when it was made: import the code inside.

    Raises `UsageError` for an unknown device, dtype or release, and on entering while another thread emulates.
    """
    return Emulation(emulated_policy(device, dtype, torch), low_dtype(dtype) if dtype is not None else None)


def emulated_policy(device: str, dtype: pytorch.dtype | str | None = None, release: str | None = None) -> Policy:
    """The policy of a device under a release, custom ops of this process included.

    What only the device's own builds of PyTorch register, such as cuDNN's recurrent layers, is taken from the shipped
    snapshot where the installed build lacks it.
    """
    low = low_dtype(dtype if dtype is not None else pytorch.float16)
    measured = _measured(device_type(device), low)
    shipped = _shipped(measured, release)
    if release is not None and shipped is not None:
        custom = {name: op for name, op in measured.ops.items() if not name.startswith("aten::")}
        measured = replace(shipped, ops={**shipped.ops, **custom})
    if any(policy is not None and _CUDNN in (*policy.ops, *policy.unprobed) for policy in (measured, shipped)):
        layers = {name: OpPolicy(LOWER, source="ATen/cudnn/AutocastRNN.cpp") for name in RECURRENT}
        measured = replace(measured, ops={**measured.ops, **layers})
    return measured


_CUDNN = "aten::_cudnn_rnn"


def _shipped(measured: Policy, release: str | None) -> Policy | None:
    """The snapshot of the release; without a release that of the installed one, where ampcheck carries it."""
    low = measured.dtypes[0]
    if release is not None:
        return load_release(release).policy(measured.device, low)
    if release_of(measured.torch) not in releases():
        return None
    snapshot = load_release(measured.torch)
    return snapshot.policy(measured.device, low) if measured.device in snapshot.policies else None


_probed: dict[tuple[str, pytorch.dtype], Policy] = {}


def _measured(device: str, low: pytorch.dtype) -> Policy:
    """The policy of the installed PyTorch, probed again when ops were registered since."""
    known = _probed.get((device, low))
    if device == "cpu" and _active:  # its kernels are not its own now
        return replace(_active[0]._native, dtypes=(str(low).removeprefix("torch."),))
    if known is None or registered(device) != tuple(sorted({*known.ops, *known.unprobed})):
        known = _probed[device, low] = measure_policy(device, low)
    return known


class Emulation:
    """Entered, the CPU follows `policy`.

    policy: the device's. dtype: autocast to it inside; None leaves autocast as it is. observe: told of each call of an
    op that has a rule on either device, or that `also` names. `replaced` counts the kernels that stand in for
    PyTorch's; `unavailable` names the ops of the policy that the installed PyTorch does not have.
    """

    def __init__(
        self,
        policy: Policy,
        dtype: pytorch.dtype | None = None,
        *,
        observe: CallObserver | None = None,
        also: Iterable[str] = (),
    ) -> None:
        unknown = [name for name, op in policy.ops.items() if op.rule == OTHER]
        if unknown:
            raise UsageError(f"{', '.join(unknown)} on {policy.device} follow no rule that can be emulated")
        self.policy = policy
        self.dtype = dtype
        self.replaced = 0
        self.unavailable: tuple[str, ...] = ()
        self._observe = observe
        self._also = frozenset(also) if observe is not None else frozenset()
        self._thread = 0
        self._native = policy
        self._cache = CastCache()
        self._redirection = Redirection(policy.device, self._cache)
        self._overridden: set[str] = set()
        self._open = ExitStack()

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
            opening.enter_context(self._redirection.entered())
            if (config := _functorch_config()) is not None:  # its key does not know of our kernels
                opening.enter_context(config.patch(enable_autograd_cache=False))
            reset_dynamo()
            opening.callback(reset_dynamo)
            if self.dtype is not None:
                opening.enter_context(pytorch.autocast("cpu", self.dtype))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        with _lock:
            self._open.__exit__(None, None, None)
            self._cache.clear()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, each call of which runs under an emulation of its own."""

        @functools.wraps(function)
        def emulated(*args: Any, **kwargs: Any) -> Any:
            with Emulation(self.policy, self.dtype, observe=self._observe, also=self._also):
                return function(*args, **kwargs)

        return emulated

    @property
    def made_before(self) -> int:
        """How often a `torch.autocast` region for the device was entered that was off and made before the emulation."""
        return self._redirection.made_before

    def _install(self, opening: ExitStack) -> None:
        native = self._native = _native_policy()
        # Who records a block wants to hear of what an emulation inside it does, too.
        told = next((one for one in (self, *reversed(_active)) if one._observe is not None), self)
        outer = set().union(*(emulation._overridden for emulation in _active))
        libraries: dict[str, pytorch.library.Library] = {}
        missing = []
        self._overridden.clear()
        for name in sorted({*self.policy.ops, *native.ops, *told._also, *outer}):
            wanted, own = self.policy.ops.get(name), native.ops.get(name)
            if told._observe is None and name not in outer and _same(wanted, own):
                continue
            namespace, _, rest = name.partition("::")
            try:
                kernel = make_kernel(name, wanted, self._cache, told._observe)
            except (AttributeError, RuntimeError):
                missing.append(name)
                continue
            if namespace not in libraries:
                library = libraries[namespace] = pytorch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
                opening.callback(library._destroy)
            _implement(libraries[namespace], rest, kernel)
            self._overridden.add(name)
        self.replaced, self.unavailable = len(self._overridden), tuple(missing)


def active() -> Emulation | None:
    """The innermost emulation of this process."""
    return _active[-1] if _active else None


def _same(one: OpPolicy | None, other: OpPolicy | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.rule, one.redispatch, one.restores) == (other.rule, other.redispatch, other.restores)


def _implement(library: pytorch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    """Register a kernel on the CPU's autocast key over the one that stands there."""
    options: dict[str, Any] = {"with_keyset": kernel is not pytorch.library.fallthrough_kernel}
    if "allow_override" in inspect.signature(library.impl).parameters:
        options["allow_override"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden is what we want
        library.impl(name, kernel, autocast_key("cpu"), **options)  # type: ignore[no-untyped-call]


def _native_policy() -> Policy:
    """The CPU's own policy, never that of an emulation."""
    if _active:
        return _active[0]._native
    return _measured("cpu", pytorch.float16)


def _functorch_config() -> Any:
    try:
        from torch._functorch import config
    except ImportError:
        return None
    return config if hasattr(config, "enable_autograd_cache") else None


def reset_dynamo() -> None:
    """Compiled code is guarded by autocast's state, not by its kernels."""
    if "torch._dynamo" in sys.modules:
        pytorch._dynamo.reset()
