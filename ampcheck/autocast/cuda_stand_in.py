"""`torch.cuda` as a machine with a GPU answers it, on a machine without: queries, streams, events, graphs and random
numbers of the CPU. `placement` has the tensors.

While PyTorch compiles, CUDA is absent: graphs are of the CPU, and what the compiler caches outlives the block.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ampcheck.autocast.gpus import GPU, GPUS, THREADS
from ampcheck.autocast.graph_replay import CUDAGraph, end_captures, graph
from ampcheck.torchtools.patching import attribute, once_imported, replaced
from ampcheck.torchtools.private import tracing_context

KINDS = ("cuda", "xpu", "mps")
"""The types of devices that code may ask for."""

_current = 0
_kind = KINDS[0]


def placed_kind() -> str:
    """The type of device that stands in for."""
    return _kind


def is_here(kind: str) -> bool:
    """Return whether PyTorch finds a device of a type."""
    backend: Any = torch.backends.mps if kind == "mps" else getattr(torch, kind, None)
    is_available = getattr(backend, "is_available", None)  # a backend of another package may have none
    return is_available is not None and bool(is_available())


def current_device() -> int:
    """The index of the device that `torch.cuda.set_device` chose."""
    return _current


def device_count() -> int:
    """One device for each process of torchrun on this machine."""
    return 0 if _compiles() else max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _compiles() -> bool:
    return torch.compiler.is_compiling() or tracing_context() is not None


def _is_available() -> bool:
    return not _compiles()


def _set_device(device: Any) -> None:
    global _current
    if isinstance(device, int):
        _current = max(device, 0)
    elif device is not None:
        _current = torch.device(device).index or 0


def _exchange_device(index: int) -> int:
    before = _current
    if index >= 0:
        _set_device(index)
    return before


class _Done:
    """CPU ops run in the order in which they are called, and have ended when they return."""

    def synchronize(self, *_: object, **__: object) -> None:
        """Wait for nothing."""

    wait = wait_event = wait_stream = synchronize

    def query(self) -> bool:
        """Return whether the work has ended: always."""
        return True


class Event(_Done):
    """A CUDA event."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._time = 0.0

    def record(self, stream: object = None) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return 1000.0 * (end._time - self._time)


class Stream(_Done):
    """A CUDA stream."""

    cuda_stream = stream_id = priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: object) -> None:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        self.device, self.priority = torch.device(_kind, _current if index is None else index), priority
        self.device_index = self.device.index

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event."""
        event = event or Event()
        event.record()
        return event

    def is_capturing(self) -> bool:
        """Return whether a graph is captured: optimizers ask, and refuse to be captured unless `capturable`."""
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the stream."""


class _TensorType(type):
    """`torch.cuda.FloatTensor` and its like: constructors of placed tensors of one dtype."""

    def __call__(cls, *args: Any) -> torch.Tensor:
        made: torch.Tensor = getattr(torch, cls.__name__)(*args)
        return made.cuda()

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.type() == f"torch.cuda.{cls.__name__}"


class _Anything:
    """The libraries of markers and profilers, whose functions do nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args, **kwargs: 0


class _GeneratorType(type):
    real = torch.Generator

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return cls.real(device="cpu" if str(device).startswith(KINDS) else device)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)


class _Generator(metaclass=_GeneratorType):
    """`torch.Generator`: one for CUDA is one of the CPU."""


def _set_default_tensor_type(real: Callable[[Any], None], kind: Any) -> None:
    """`torch.set_default_tensor_type`; a type of CUDA's also makes it the default device."""
    name = kind if isinstance(kind, str) else f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}"
    for device in KINDS:
        if name.startswith(f"torch.{device}."):
            torch.set_default_device(device)
            return real(name.replace(f"{device}.", "", 1))
    if torch.get_default_device().type in KINDS:
        torch.set_default_device(None)
    return real(kind)


def _zero(*args: object, **kwargs: object) -> int:
    return 0


def _nothing(*args: object, **kwargs: object) -> None:
    return None


_NOTHING = (
    "synchronize empty_cache ipc_collect init _lazy_init reset_peak_memory_stats reset_max_memory_allocated "
    "reset_max_memory_cached reset_accumulated_memory_stats set_per_process_memory_fraction set_sync_debug_mode "
    "set_stream _record_memory_history _dump_snapshot check_error"
).split()
_ZERO = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached "
    "get_sync_debug_mode device_memory_used memory_usage utilization temperature power_draw clock_rate"
).split()

_MEMORY_OF_MPS = ("current_allocated_memory", "driver_allocated_memory", "recommended_max_memory")


def _functions(gpu: GPU) -> dict[str, Callable[..., Any]]:
    """The functions of `torch.cuda` by name."""
    stream = Stream(0)
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=gpu.memory,
        multi_processor_count=gpu.processors,
        warp_size=32,
        max_threads_per_multi_processor=THREADS.get(gpu.capability, 2048),
        regs_per_multiprocessor=65_536,
        gcnArchName="",
        is_integrated=0,
        is_multi_gpu_board=0,
    )
    generator = torch.default_generator
    modern = gpu.capability >= (8, 0)
    return {
        **dict.fromkeys(_NOTHING, _nothing),
        **dict.fromkeys(_ZERO, _zero),
        "is_available": _is_available,
        "device_count": device_count,
        "current_device": current_device,
        "set_device": _set_device,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "get_device_name": lambda device=None: gpu.name,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{gpu.capability[0]}{gpu.capability[1]}"],
        "can_device_access_peer": lambda device, peer: True,
        "is_bf16_supported": lambda including_emulation=True: modern or including_emulation,
        "is_tf32_supported": lambda: modern,
        "mem_get_info": lambda device=None: (gpu.memory, gpu.memory),
        "memory_stats": lambda device=None: defaultdict(int),
        "memory_summary": lambda device=None, abbreviated=False: "",
        "memory_snapshot": lambda *args, **kwargs: [],
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "get_stream_from_external": lambda *args: stream,
        "graph_pool_handle": lambda: (0, 0),
        "make_graphed_callables": lambda callables, *args, **kwargs: callables,
        "cudart": _Anything,
        # One generator serves both devices.
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "seed": lambda: generator.seed(),
        "seed_all": lambda: generator.seed(),
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for _ in range(device_count())],
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(next(iter(states))),
    }


def _of_accelerator() -> dict[str, Callable[..., Any]]:
    """What `torch.accelerator` has by names of its own."""
    return {
        "current_accelerator": lambda *args, **kwargs: None if _compiles() else torch.device(_kind),
        **dict.fromkeys(("current_device_index", "current_device_idx"), current_device),
        **dict.fromkeys(("set_device_index", "set_device_idx"), _set_device),
    }


@contextmanager
def stand_in(kind: str, gpu: str = "") -> Iterator[None]:
    """`torch.cuda` answers as the GPU of this name does, an A100 by default; all of it is restored. `torch.xpu` and
    `torch.mps` answer what does not depend on a model of GPU."""
    global _kind
    before, _kind = (_current, _kind), kind
    with ExitStack() as stack:
        stack.callback(_restore, *before)
        stack.callback(end_captures)
        stack.enter_context(attribute(torch, "Generator", _Generator))
        by_type = partial(_set_default_tensor_type, torch.set_default_tensor_type)
        stack.enter_context(attribute(torch, "set_default_tensor_type", by_type))
        _replace_parallel(stack)
        functions = _functions(GPUS[gpu or "a100"])
        of_all = {name: function for name, function in functions.items() if not name.startswith("get_device_")}
        _replace(stack, [torch.accelerator], {**of_all, **_of_accelerator()})
        if kind == "cuda":
            _replace_cuda(stack, functions)
        else:
            _replace_other(stack, kind, of_all)
        yield


def _restore(current: int, kind: str) -> None:
    global _current, _kind
    _current, _kind = current, kind


def _replace_cuda(stack: ExitStack, functions: dict[str, Callable[..., Any]]) -> None:
    _replace(stack, (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.graphs), functions)
    cudnn: dict[str, Callable[..., Any]] = {
        "is_acceptable": lambda tensor: False,
        "is_available": lambda: True,
        "version": lambda: 90_100,
    }
    _replace(stack, [torch.backends.cudnn], cudnn)
    kinds = {"Stream": Stream, "ExternalStream": Stream, "Event": Event, "CUDAGraph": CUDAGraph, "graph": graph}
    for name, kind in kinds.items():
        for module in (torch.cuda, torch.cuda.streams, torch.cuda.graphs):
            if name in vars(module):
                stack.enter_context(attribute(module, name, kind))
    stack.enter_context(attribute(torch.cuda, "default_generators", (torch.default_generator,)))
    stack.enter_context(attribute(torch.cuda.nvtx, "_nvtx", _Anything()))
    for name in [name for name in vars(torch.cuda) if name.endswith("Tensor")]:
        kind = _TensorType(name, (), {"__module__": "torch.cuda"})
        stack.enter_context(attribute(torch.cuda, name, kind))


def _replace_other(stack: ExitStack, kind: str, functions: dict[str, Callable[..., Any]]) -> None:
    """`torch.xpu` or `torch.mps`, which have much of the interface of `torch.cuda`."""
    module: Any = getattr(torch, kind)
    owners = (module, torch.backends.mps) if kind == "mps" else (module, module.memory, module.random)
    _replace(stack, owners, {**functions, **dict.fromkeys(_MEMORY_OF_MPS, _zero), "is_built": _is_available})
    for name, stands_in in {"Event": Event, "Stream": Stream}.items():
        if hasattr(module, name):
            stack.enter_context(attribute(module, name, stands_in))


def _replace(stack: ExitStack, modules: Iterable[Any], functions: dict[str, Callable[..., Any]]) -> None:
    for module in modules:
        for name, function in functions.items():
            if name in vars(module) or (module is torch.backends.cudnn and hasattr(module, name)):
                stack.enter_context(replaced(module, name, partial(_instead, function)))


def _instead(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _replace_parallel(stack: ExitStack) -> None:
    """Several devices of one process are one; NCCL is Gloo."""
    parallel = torch.nn.parallel
    one = {"forward": lambda self, *inputs, **kwargs: self.module(*inputs, **kwargs)}
    _replace(stack, [parallel.DataParallel], one)
    stack.enter_context(replaced(parallel.DistributedDataParallel, "__init__", _make_parallel))
    if torch.distributed.is_available():
        stack.enter_context(once_imported("torch.distributed.distributed_c10d", _replaced_groups))


@contextmanager
def _replaced_groups(module: ModuleType) -> Iterator[None]:
    with ExitStack() as stack:
        for owner in (module, torch.distributed):
            for name in ("init_process_group", "new_group"):
                stack.enter_context(replaced(owner, name, _make_group))
            stack.enter_context(replaced(owner, "barrier", _make_barrier))
            stack.enter_context(replaced(owner, "is_nccl_available", lambda original: lambda: True))
        yield


def _make_parallel(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
        original(self, module, None, None, *args, **kw)

    return init


def _make_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        args = tuple("gloo" if isinstance(value, str) and "nccl" in value else value for value in args)
        if "nccl" in str(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        return original(*args, **kwargs)

    return make


def _make_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda group=None, async_op=False, device_ids=None: original(group=group, async_op=async_op)
