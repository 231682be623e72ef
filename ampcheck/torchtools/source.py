"""Source locations: the module that runs, the line of the user's code, the names of ops."""

from __future__ import annotations

import dis
import os
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache, partial, wraps
from types import CodeType, FrameType
from typing import ParamSpec, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.subject import Subject
from ampcheck.torchtools.patching import around_exports, without_warning
from ampcheck.torchtools.private import OpOverload

Line: TypeAlias = "tuple[str, int | None]"
"""A file, as findings name it, and the number of a line."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

AMPCHECK = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DEMO = os.path.join(AMPCHECK, "demo", "model.py")
_CALLS_THROUGH = os.path.join(AMPCHECK, "autocast", "placement.py")
"""Calls the functions of PyTorch for the user's code, which raise there what the user's code is at fault for."""
_SCRIPTS = os.path.join(sysconfig.get_path("scripts"), "")
_NOT_THE_USERS = (AMPCHECK, _TORCH, _SCRIPTS, os.path.dirname(os.__file__) + os.sep + "contextlib.py", "<")
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
_CYTHON = (".pyx", ".pxd", ".pxi")
"""A compiled extension names its own source in a traceback; the file is not installed."""

_DRIVERS = tuple(
    f"{os.sep}{name}".replace("/", os.sep)
    for name in ("accelerate/", "lightning/", "lightning_fabric/", "pytorch_lightning/", "transformers/trainer")
)
"""Libraries that run a user's training. Their lines say less than the one that calls them."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entered: list[str] = []
        self.updates = 0


class Hook:
    """A hook that copies and pickles of its module do without: the user's code may make some while it runs."""

    __torch_unserializable__ = True  # else PyTorch warns of hooks on tensors that are saved

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: object) -> None:
        """Call the function."""
        self._function(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[Callable[..., None]]]:
        return Hook, (_ignore,)


def _ignore(*_: object) -> None:
    pass


class Scopes:
    """The module of a model that runs in this thread, from hooks on every module.

    everywhere: follow the modules of any model instead, by their paths in the outermost module that runs.
    on_evaluation: called where an outermost module begins inside a step, as in a closure; on_output: with an outermost
    module and its output. roots: the outermost modules that ran. here: the modules and steps of
    this thread.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        *,
        everywhere: bool = False,
        on_evaluation: Callable[[], None] | None = None,
        on_output: Callable[[torch.nn.Module, object], None] | None = None,
    ) -> None:
        self.roots: WeakSet[torch.nn.Module] = WeakSet()
        self._on_evaluation, self._on_output = on_evaluation, on_output
        self._model = model
        self._everywhere = everywhere
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self.here = _Stack()

    @property
    def current(self) -> str:
        """The innermost module that runs; the root where none does."""
        return self.here.entered[-1] if self.here.entered else ""

    @property
    def phase(self) -> str:
        """`update` inside the step of an optimizer, else `forward`."""
        return "update" if self.here.updates else "forward"

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The step of an optimizer."""
        self.here.updates += 1
        try:
            yield
        finally:
            self.here.updates -= 1

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow the model's modules while the block runs."""
        handles: list[RemovableHandle] = []
        with hooked(handles):
            if self._everywhere:
                handles += self._follow_everything()
            for name, module in hookable(self._model):
                enter, leave = Hook(partial(self._enter, name)), Hook(partial(self._leave, name))
                handles.append(module.register_forward_pre_hook(enter, prepend=True))
                handles.append(module.register_forward_hook(leave, always_call=True))
            try:
                yield
            finally:
                self.here.entered.clear()

    def _follow_everything(self) -> list[RemovableHandle]:
        def enter(module: torch.nn.Module, args: object) -> None:
            if not self.here.entered:
                self.roots.add(module)
                self._names.update({child: name for name, child in module.named_modules()})
                if self.here.updates and self._on_evaluation is not None:
                    self._on_evaluation()
            self._enter(self._names.get(module, type(module).__name__), module, args)

        def leave(module: torch.nn.Module, args: object, output: object) -> None:
            self._leave(self._names.get(module, type(module).__name__), module, args, output)
            if self._on_output is not None and not self.here.entered:
                self._on_output(module, output)

        return [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]

    def _enter(self, name: str, module: torch.nn.Module, args: object) -> None:
        self.here.entered.append(name)

    def _leave(self, name: str, module: torch.nn.Module, args: object, output: object) -> None:
        # When a forward raises, torch runs this hook on the way out and some modules may have been left already.
        while self.here.entered and self.here.entered.pop() != name:
            pass


@contextmanager
def hooked(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end. They are off in strict exports, whose graphs would contain them.

    PyTorch says nothing of hooks around compiled modules, which are ours and not the user's.
    """
    global_hooks = "Using `torch.compile.module.` when there are global hooks"
    try:
        with around_exports(lambda: _without(handles)), without_warning(global_hooks):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Hooks are off inside."""
    with ExitStack() as stack:
        for handle in handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                stack.callback(hooks.__setitem__, handle.id, hooks.pop(handle.id))
        yield


def hookable(model: torch.nn.Module | None) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a model by their paths, without those of TorchScript, which take no hooks."""
    for name, module in model.named_modules() if model is not None else ():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module


@cache
def op_name(op: OpOverload) -> str:
    """`aten::addmm` for the default overload, `aten::sum.dim_IntList` otherwise."""
    name, overload = op._schema.name, op._schema.overload_name
    return f"{name}.{overload}" if overload else name


def overload(name: str) -> OpOverload:
    """The overload that `op_name` names. Raises `AttributeError` where this PyTorch has none."""
    namespace, _, rest = name.partition("::")
    packet, _, overload_name = rest.partition(".")
    op: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload_name or "default")
    return op


@lru_cache(maxsize=1 << 12)
def is_users(path: str) -> bool:
    """Return whether a source file is Python's and belongs neither to PyTorch nor to ampcheck; the demo counts as a
    user's."""
    return path == _DEMO or not (path.startswith(_NOT_THE_USERS) or path.endswith(_CYTHON))


@lru_cache(maxsize=1 << 12)
def drives(path: str) -> bool:
    """Return whether a source file belongs to a library that runs a user's training."""
    _, installed, inside = path.rpartition(f"{os.sep}site-packages")
    return bool(installed) and inside.startswith(_DRIVERS)


def short_path(path: str) -> str:
    """Relative to the working directory or to the site-packages around it: `transformers/activations.py`."""
    return _relative(path, os.getcwd())


@lru_cache(maxsize=1 << 12)
def _relative(path: str, directory: str) -> str:
    _, installed, inside = path.rpartition(f"site-packages{os.sep}")
    return inside if installed else path.removeprefix(directory + os.sep)


def users_place(error: BaseException) -> tuple[str, int | None]:
    """The innermost line of the user's code that an exception came through; of Python's library in need."""
    frames = ((f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__))
    lines = [(path, line) for path, line in frames if is_users(path)]
    lines = [each for each in lines if not _is_pythons(each[0])] or lines
    return (short_path(lines[-1][0]), lines[-1][1]) if lines else ("", None)


def at_users_line(error: BaseException) -> str:
    """` at file:line` of the user's code, for a message; empty where none is known."""
    file, line = users_place(error)
    return f" at {file}:{line}" if file else ""


def _is_pythons(path: str) -> bool:
    return path.startswith(_PYTHON) and "-packages" + os.sep not in path


def scaler_method(error: BaseException) -> str:
    """The method of a GradScaler that raised an exception itself, as `GradScaler.unscale_`; empty for any other."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [code.co_filename.replace("\\", "/").endswith("torch/amp/grad_scaler.py") for code in codes]
    return f"GradScaler.{codes[own.index(True)].co_name}" if own and own[-1] else ""


def naming_users_errors(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function of a subject that raises `UsageError` where the subject's own code raises: a property, `__len__`, ...

    An exception that ampcheck itself raises is a defect of ampcheck, and is raised unchanged.
    """

    @wraps(function)
    def named(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except UsageError:
            raise
        except BaseException as error:
            subject = args[0] if args else next(iter(kwargs.values()), None)
            name = subject.name if isinstance(subject, Subject) else "the subject"
            raise users_error(error, name) from error

    return named


def users_error(error: BaseException, name: str) -> UsageError:
    """The error for an exception that the user's own code raised outside of its run; any other is raised again."""
    if not _is_the_users(as_result(error)):
        raise error
    return UsageError(f"{name} cannot be judged: its own code raises {brief(error)}{at_users_line(error)}")


def _is_the_users(error: BaseException) -> bool:
    """Return whether the user's code raised it: ampcheck raises no `SystemExit`, and recurses as deep as its subject
    does."""
    if isinstance(error, (RecursionError, MemoryError)) or not isinstance(error, Exception):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    users = [is_users(f) for f in files if is_users(f) or (f.startswith(AMPCHECK) and f != _CALLS_THROUGH)]
    return bool(users) and users[-1]


def users_line(frame: FrameType | None, *, inside: CodeType | None = None) -> Line:
    """The innermost frame of the user's code; of a library that runs a training, only where no other frame is.

    inside: only frames that this function calls.
    """
    path, line = users_frame(frame, inside=inside)
    return _relative(path, os.getcwd()), line


def is_constant_here(frame: FrameType | None, number: float) -> bool:
    """Return whether the line of the user's code that runs has a number as a constant."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and number in _constants_of(frame.f_code, frame.f_lineno)


@lru_cache(maxsize=1024)
def _constants_of(code: CodeType, line: int) -> frozenset[object]:
    """The floats that a line has as constants, folded as the compiler folds them."""
    parts = [(start, end) for start, end, number in code.co_lines() if number == line]
    loads = [each for each in dis.get_instructions(code) if each.opname.startswith("LOAD_CONST")]
    at = [each.argval for each in loads if any(start <= each.offset < end for start, end in parts)]
    return frozenset(value for value in at if isinstance(value, float))


def users_frame(frame: FrameType | None, *, inside: CodeType | None = None) -> Line:
    """The same, with the path as Python has it."""
    driver: Line = "", None
    while frame is not None and frame.f_code is not inside:
        path = frame.f_code.co_filename
        if is_users(path):
            if not drives(path):
                return path, frame.f_lineno
            driver = driver if driver[0] else (path, frame.f_lineno)
        frame = frame.f_back
    return driver
