"""Code that asks for CUDA on a machine without it: it is judged again, from the start, with CUDA emulated on the CPU.

PyTorch raises where such code places a tensor, and switches its autocast regions and its scaler off with a warning: it
would train in float32, unscaled, and nothing of what it does on a GPU would be judged.
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from ampcheck.autocast.device import is_present
from ampcheck.autocast.emulate import active
from ampcheck.core.errors import AsksForCUDA
from ampcheck.core.progress import current_listener, listening
from ampcheck.core.run import Run, emitted_if
from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.source import is_users

_P = ParamSpec("_P")
_T = TypeVar("_T")


def on_cpu_or_cuda(judge: Callable[[str], _T], device: str | None) -> _T:
    """`judge(device)`. Without a device that is the CPU, or CUDA, emulated, where the code asks for CUDA.

    What the code does before it asks is done twice; modules of the user that were imported meanwhile are imported
    again. Code that catches the request, or asks in a thread, is judged again when it ends. Only the last judgement
    emits runs, lines that both print are shown once, and a process group of the first one serves the second.
    """
    __tracebackhide__ = True
    if device:
        return judge(device)
    if is_present("cuda") or active() is not None:
        return judge("cpu")
    before, request, grouped = set(sys.modules), _Request(), _is_grouped()
    try:
        with _provisional(request), _asking(request):
            run = judge("cpu")
        if not request.asked:
            return run
    except AsksForCUDA:
        pass
    except Exception:
        if not request.asked:
            raise
    for name in sys.modules.keys() - before:
        if _is_own(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]
    with _continuing(request.printed, grouped=_is_grouped() and not grouped):
        return judge("cuda")


def cuda_where_asked(judge: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function of a model with a keyword `device`, whose None is the CPU, or CUDA where the model asks for it."""

    @functools.wraps(judge)
    def within(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        __tracebackhide__ = True
        device: Any = kwargs.pop("device", None)

        def judge_there(there: str) -> _T:
            __tracebackhide__ = True
            return judge(*args, **{**kwargs, "device": there})  # type: ignore[arg-type]

        return on_cpu_or_cuda(judge_there, device)

    return within


def _is_own(file: str | None) -> bool:
    """Return whether a file is the user's own Python: none of an installed package or of Python, which may not load
    twice."""
    if not file or not file.endswith(".py") or not is_users(file):
        return False
    return not any(Path(file).is_relative_to(folder) for folder in _INSTALLED) and "dist-packages" not in file


@dataclass
class _Request:
    """Requests of code for CUDA, and the text that it printed."""

    asked: bool = False
    printed: deque[str] = field(default_factory=deque)

    def ask(self) -> NoReturn:
        self.asked = True
        raise AsksForCUDA


@contextmanager
def _provisional(request: _Request) -> Iterator[None]:
    """Emit nothing of a block that asks for CUDA, show no verdicts of it from then on, and note what it prints."""
    listener = current_listener()

    def judged(run: Run) -> None:
        if not request.asked:
            listener.judged(run)

    def compiling() -> None:
        if not request.asked:
            listener.compiling()

    def note(write: Callable[[str], int]) -> Callable[[str], int]:
        def noted(text: str) -> int:
            request.printed.append(text)
            return write(text)

        return noted

    following = listening(replace(listener, judged=judged, compiling=compiling))
    with emitted_if(lambda: not request.asked), following, _written(note):
        yield


@contextmanager
def _continuing(printed: deque[str], *, grouped: bool) -> Iterator[None]:
    """Do not print again what was printed. grouped: the process group that there is takes the place of the next one.

    Under torchrun a second group would find the addresses of the first one in the store, and wait for those.
    """

    def skip(write: Callable[[str], int]) -> Callable[[str], int]:
        line = ""

        def skipped(text: str) -> int:
            nonlocal line
            if printed and printed[0] == text:
                printed.popleft()
                line = (line + text).rpartition("\n")[2] if printed else ""
                return len(text)
            printed.clear()
            text, line = line + text, ""  # a line that ends otherwise is printed whole
            return write(text)

        return skipped

    def keep(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(*args: Any, **kwargs: Any) -> Any:
            return None if torch.distributed.group.WORLD is group else original(*args, **kwargs)

        return init

    with ExitStack() as stack:
        stack.enter_context(_written(skip))
        if grouped:
            group = torch.distributed.group.WORLD
            for owner in (torch.distributed, torch.distributed.distributed_c10d):
                stack.enter_context(replaced(owner, "init_process_group", keep))
        yield


def _written(make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """`make` the function that writes to standard output, where there is one that can be replaced."""
    return replaced(sys.stdout, "write", make) if hasattr(sys.stdout, "__dict__") else nullcontext()


def _is_grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def _asking(request: _Request) -> Iterator[None]:
    """Raise `AsksForCUDA` inside where the user's code needs CUDA or asks for its autocast or its scaler by name."""

    def asks(original: Callable[..., Any]) -> Callable[..., Any]:
        def need(*args: Any, **kwargs: Any) -> Any:
            no_device = len(args) == 1 and type(args[0]) is int and args[0] < 0  # `torch.cuda.device_of` a CPU tensor
            return original(*args, **kwargs) if no_device or _for_a_compiler() else request.ask()

        return need

    def asks_for_nccl(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            return request.ask() if "nccl" in str(backend) else original(backend, *args, **kwargs)

        return init

    with ExitStack() as stack:
        for owner, name in _NEED_CUDA:
            stack.enter_context(replaced(owner, name, asks))
        for kind in (torch.autocast, torch.amp.GradScaler):
            stack.enter_context(replaced(kind, "__init__", functools.partial(_asks_if_off, request)))
        if torch.distributed.is_available():
            for owner in (torch.distributed, torch.distributed.distributed_c10d):
                stack.enter_context(replaced(owner, "init_process_group", asks_for_nccl))
        yield


def _asks_if_off(request: _Request, original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a region or a scaler; `GradScaler()` alone is one for CUDA."""
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA is not available")  # it is emulated then
            original(self, *args, **kwargs)
        if active() is not None or _for_a_compiler():  # a part of the judgement is emulated, with its own regions
            return
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        device = given.arguments.get("device_type", given.arguments.get("device"))
        if device == "cuda" and given.arguments["enabled"] and not self._enabled:
            request.ask()

    return init


def _for_a_compiler() -> bool:
    """Return whether Dynamo or Inductor calls, which look for devices, and not the user's code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _is_own(frame.f_code.co_filename):
        if str(frame.f_globals.get("__name__")).startswith(_COMPILERS):
            return True
        frame = frame.f_back
    return False


_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch")
_INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NEED_CUDA: tuple[tuple[Any, str], ...] = (
    *((torch.cuda, name) for name in ("_lazy_init", "set_device", "_exchange_device", "_maybe_exchange_device")),
    *((kind, "__new__") for kind in (torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph)),
)
"""Functions through which goes every use of CUDA that places a tensor, names a device or orders work."""
