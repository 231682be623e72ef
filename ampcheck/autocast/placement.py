"""Code written for CUDA runs on the CPU: `.cuda()`, `.to("cuda")` and `device=` place tensors on a CUDA device that is
not there, and such tensors report that device.

A mode of `__torch_function__` moves the device arguments of each call to the CPU, and records the storages of what was
placed; results of placed tensors are placed. It is a mode, and neither a backend of its own (`privateuse1`) nor a
subclass of `torch.Tensor`, since then all tensors stay plain tensors of the CPU: PyTorch's kernels, autograd, saving,
`__torch_dispatch__` modes and autocast's emulation see what they see on a CPU. Dynamo traces the mode, so that graphs
are of the CPU without a graph break. While the mode is off, as inside of a function of PyTorch or in a subprocess,
tensors report the CPU and are moved nowhere: what a tensor reports and where it can be moved never disagree.

Devices are recorded by storage, and not assumed for all tensors, since a move between devices copies:
`weights = {k: v.cpu() for ...}` must not change with the model. A copy is made exactly where CUDA would make one.

Compiled code sees the CPU (`x.device`, `x.is_cuda`), as Dynamo answers for the tensors of its graphs itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ampcheck.autocast import cuda_devices, cuda_stand_in
from ampcheck.autocast.cuda_devices import (
    HOST,
    any_placed,
    device_index,
    index_of,
    is_placed_text,
    number,
    place_storage,
    tensors,
)
from ampcheck.autocast.cuda_stand_in import KINDS, current_device, placed_kind
from ampcheck.torchtools.patching import observed, once_imported, replaced, traces_unseen
from ampcheck.torchtools.private import (
    DeviceContext,
    MetaTensorDescriber,
    default_device,
    device_constructors,
    function_modes,
    pack_padded_sequence,
    parse_to,
    without_torch_function,
)
from ampcheck.torchtools.threads import Function, wrapped_threads

_CPU = torch.device("cpu")
_DEFAULT = torch.device("cpu")
"""The default device of PyTorch while CUDA is the one that was asked for; a CPU, told apart by its identity."""

_UNSAID = -2
"""In the place of the index of a CUDA device: a call that names no device."""

_open: list[_Placement] = []


@contextmanager
def placed(kind: str, gpu: str = "") -> Iterator[None]:
    """A device on the CPU inside, in this thread and those that it starts; a second block inside does nothing.

    kind: `cuda`, `xpu` or `mps`. gpu: the name of the GPU whose capability and memory `torch.cuda` reports, of
    `gpus.GPUS`. On a machine that has the device nothing is replaced.
    """
    if _open or cuda_stand_in.is_here(kind):
        yield
        return
    with ExitStack() as stack:
        mode = _Placement()
        _open.append(mode)
        stack.callback(_open.remove, mode)
        for context in _replacements(kind, gpu):
            stack.enter_context(context)
        stack.enter_context(wrapped_threads(_in_mode, lambda: bool(_open)))
        stack.callback(_reset_default_device)
        stack.enter_context(mode)
        yield


def is_open(kind: str = "cuda") -> bool:
    """Return whether the CPU stands in for this device now: `torch.cuda` then describes the emulated device."""
    return bool(_open) and placed_kind() == kind


def _in_mode(function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> object:
        if not _open:  # the thread began after the block
            return function(*args, **kwargs)
        with _Placement():
            return function(*args, **kwargs)

    return run


def _reset_default_device() -> None:
    if default_device() is _DEFAULT:
        torch.set_default_device(None)


class _Placement(TorchFunctionMode):
    """Moves device arguments to the CPU; tensors that were placed report CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # Dynamo traces the mode
            return _traced(func, args, kwargs)
        special = _SPECIAL.get(func)
        return _call(func, args, kwargs) if special is None else special(func, args, kwargs)


def _traced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call on the CPU, in code that Dynamo can trace."""
    if func in (torch.Tensor.cuda, torch.Tensor.xpu, torch.Tensor.pin_memory):
        return args[0]
    if func is torch.device:
        return func(*args, **kwargs)
    if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
        args = (args[0], "cpu", *args[2:])
    moved = {name: _on_cpu(value) for name, value in kwargs.items() if name != "pin_memory"}
    return func(*[_on_cpu(value) for value in args], **moved)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type in KINDS else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] in KINDS else value


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call on the CPU. What it returns is placed on the device that it names, else on that of its arguments."""
    said = _device_said(func, args, kwargs)
    if said != _UNSAID:
        args = tuple(map(_move, args))
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], _CPU, *args[2:])
        kwargs = {name: _CPU if name == "device" and said != HOST else _move(v) for name, v in kwargs.items()}
    if kwargs.get("pin_memory"):
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if said == _UNSAID and not any_placed():
        return func(*args, **kwargs)
    inputs = list(tensors((args, kwargs)))  # before the call: `copy.deepcopy` notes its result in an argument
    result = func(*args, **kwargs)
    if said == _UNSAID:
        said = next((index for tensor in inputs if (index := device_index(tensor)) is not None), HOST)
        if said != HOST:
            _place_new(result, inputs, said)
        return result
    if isinstance(result, torch.Tensor):
        return _moved_to(func, result, inputs, said)
    _place_new(result, inputs, said)
    return result


def _place_new(result: Any, inputs: list[torch.Tensor], index: int) -> None:
    """Place results, but for views of arguments and arguments that were written: those stay where they are."""
    if index == HOST:
        return
    old = {number(tensor) for tensor in inputs}
    for tensor in tensors(result):
        if number(tensor) not in old:
            place_storage(tensor, index)


def _moved_to(func: Any, result: torch.Tensor, inputs: list[torch.Tensor], index: int) -> torch.Tensor:
    """The result on a device. CUDA copies what comes from another one: also arrays of numpy, which PyTorch shares."""
    shared = number(result) in {number(tensor) for tensor in inputs}
    before = device_index(result) if shared else None
    comes = shared and (before if before is not None else HOST) != index
    if comes or (func in _SHARING and index != HOST and not shared):
        result = result.clone()
    if index != HOST:
        place_storage(result, index)
    return result


def _device_said(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The index of the CUDA device that a call names, `HOST` or `_UNSAID`."""
    device = kwargs.get("device")
    if device is None:
        if func is torch.Tensor.to or func is torch.Tensor.type_as:
            return _device_of_to(args[1:2] or (kwargs.get("other"),))
        device = next((value for value in args if type(value) is torch.device or is_placed_text(value)), None)
    if device is None:
        defaults = default_device() is _DEFAULT and func in device_constructors()
        device = _DEFAULT if defaults else None
    if device is _DEFAULT:
        return current_device()
    return _UNSAID if device is None else index_of(device)


def _device_of_to(target: tuple[Any, ...]) -> int:
    """The device that the first argument of `Tensor.to` names: a device, its index, or a tensor on it."""
    value = target[0] if target else None
    if isinstance(value, torch.Tensor):
        index = device_index(value)
        return HOST if index is None else index
    return index_of(value) if isinstance(value, (torch.device, str, int)) else _UNSAID


def _move(value: Any) -> Any:
    return _CPU if (type(value) is torch.device and value.type == placed_kind()) or is_placed_text(value) else value


def _make_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """`torch.device`: a number alone means a device of the accelerator."""
    return torch.device(placed_kind(), args[0]) if len(args) == 1 and type(args[0]) is int else func(*args, **kwargs)


def _parse_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of `Module.to`, whose tensors are then moved one by one."""
    if args and type(args[0]) is int:
        args = (torch.device(placed_kind(), args[0]), *args[1:])
    return func(*args, **kwargs)


Special = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _read_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index = device_index(args[0])
    return func(*args) if index is None else torch.device(placed_kind(), index)


def _read_is(kind: str) -> Special:
    """`Tensor.is_cuda` and its like."""

    def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args) or (kind == placed_kind() and device_index(args[0]) is not None)

    return read


def _read_is_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args) and device_index(args[0]) is None


def _get_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index = device_index(args[0])
    return func(*args) if index is None else index


def _cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = {"memory_format": kwargs["memory_format"]} if "memory_format" in kwargs else {}
    device = kwargs.get("device", args[1] if len(args) > 1 else None)
    index = current_device() if device is None else index_of(device)
    return _moved_to(func, args[0].to(_CPU, **options), [args[0]], index)


def _cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _moved_to(func, func(*args, **kwargs), [args[0]], HOST)


def _type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.type`: `torch.cuda.FloatTensor` is the name of a dtype and of a device."""
    if len(args) == 1 and not kwargs:
        name = func(*args)
        return name if device_index(args[0]) is None else name.replace("torch.", "torch.cuda.", 1)
    kind = args[1] if len(args) > 1 else kwargs.get("dtype")
    text = kind if isinstance(kind, str) else f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}"
    if isinstance(kind, torch.dtype) or "Tensor" not in text:
        return _call(func, args, kwargs)
    on_cuda = text.startswith("torch.cuda.")
    result = func(args[0], text.replace("torch.cuda.", "torch.", 1))
    return _moved_to(func, result, [args[0]], current_device() if on_cuda else HOST)


def _pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].clone()


def _packed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The data of a packed sequence are where they were; its batch sizes stay on the CPU."""
    data, sizes = func(*args, **kwargs)
    _place_new(data, [], HOST if (index := device_index(args[0])) is None else index)
    return data, sizes


_SPECIAL: dict[Any, Special] = {
    torch.device: _make_device,
    parse_to: _parse_to,
    torch.Tensor.device.__get__: _read_device,
    **{getattr(torch.Tensor, f"is_{kind}").__get__: _read_is(kind) for kind in KINDS},
    torch.Tensor.is_cpu.__get__: _read_is_cpu,  # type: ignore[attr-defined]
    torch.Tensor.get_device: _get_device,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.xpu: _cuda,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.type: _type,
    torch.Tensor.pin_memory: _pinned,
    pack_padded_sequence: _packed,
}
_SHARING = frozenset({torch.as_tensor, torch.asarray})
"""Functions that share the memory of an array of numpy."""


def _replacements(kind: str, gpu: str) -> Iterator[Any]:
    """The functions that `torch.cuda` and others get inside."""
    yield cuda_stand_in.stand_in(kind, gpu)
    yield observed(DeviceContext, "__init__", _choose_default)
    yield replaced(torch.Tensor, "record_stream", lambda original: lambda tensor, stream: None)
    yield replaced(MetaTensorDescriber, "describe_tensor", _make_true)
    yield once_imported("torch.utils.checkpoint", _checkpoints)
    yield traces_unseen(lambda traced: None)
    yield from cuda_devices.replaced_storages()
    for module in (torch.autograd, torch.autograd.graph):
        yield replaced(module, "_engine_run_backward", _make_backward)


def _make_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Backward passes, in which hooks and checkpoints run the user's code: PyTorch calls them with the mode off."""

    def run(*args: Any, **kwargs: Any) -> Any:
        modes: list[object] = function_modes()
        if any(isinstance(mode, _Placement) for mode in modes):
            return original(*args, **kwargs)
        return _in_mode(original)(*args, **kwargs)

    return run


def _make_true(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that sees where tensors really are, such as `torch.export`, which makes fake ones of them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_torch_function():
            return original(*args, **kwargs)

    return run


@contextmanager
def _checkpoints(module: Any) -> Iterator[None]:
    """`torch.utils.checkpoint` as without CUDA where no tensor is placed: it remembers a device type for the process.

    It compares the device that a tensor reports inside of an op, with the mode off, with that outside.
    """
    describe, chosen = module._allowed_determinism_checks_to_fns, module.DefaultDeviceType
    original, device_type = describe["default"], chosen._default_device_type
    describe["default"] = _make_true(original)
    chosen._default_device_type = device_type or "cpu"
    try:
        yield
    finally:
        describe["default"], chosen._default_device_type = original, device_type


def _choose_default(context: Any, device: Any) -> Iterator[None]:
    """`torch.set_default_device("cuda")` and `with torch.device("cuda")`: it is the mode that places."""
    yield
    if context.device.type == placed_kind():
        context.device = _DEFAULT
