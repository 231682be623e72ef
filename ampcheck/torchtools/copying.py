"""A copy of a subject that may be run, moved, cast and changed without touching the user's."""

from __future__ import annotations

import copy
import io
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcheck.core.environment import quiet
from ampcheck.core.errors import SubjectError, UsageError, as_result, brief, require_ran
from ampcheck.core.subject import Call, Kind, Subject
from ampcheck.torchtools import dynamo
from ampcheck.torchtools.closures import rebound, walk
from ampcheck.torchtools.pytree import map_tensors
from ampcheck.torchtools.storage import device_of

NO_SCRIPT = "torch.compile takes no TorchScript"
"""Why nothing of a scripted subject is compiled."""


@dataclass(slots=True)
class Prepared:
    """A model and its calls that may be run and changed."""

    model: Any
    calls: tuple[Call, ...]
    root: torch.nn.Module | None
    """The module whose paths findings name; None for a plain function."""
    origins: dict[int, object] = field(default_factory=dict)
    """The user's module or function, by the `id` of its copy."""

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The callables that run, one after the other."""
        return _blocks(self.model)


def prepare(subject: Subject, *, device: str = "cpu", to: torch.dtype | None = None) -> Prepared:
    """A deep copy of the subject on `device`, its real floating tensors cast `to`, complex ones to the same width.

    Nothing of the copy is compiled; `recompiled` compiles what was. Raises `UsageError` for a model that cannot be
    copied, moved or cast.
    """
    modules = modules_of(subject.model)
    origins: dict[int, object] = {}
    try:
        memo: dict[int, Any] = {}
        _copy_scripts(modules, memo)
        copied = tuple(_plain_copy(block, memo, origins) for block in _blocks(subject.model))
        model = copied if isinstance(subject.model, tuple) else copied[0]
        calls = _deepcopy(_mapped(lambda t: t.detach(), subject.calls), {})
    except BaseException as error:  # a user's __deepcopy__ may raise anything
        raise UsageError(
            f"{subject.name} must be copied to be run more than once, and copying it raised {brief(as_result(error))}"
        ) from error
    copies = modules_of(model)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved: dict[str, Any] = {} if device_of(tensor) == torch.device(device) else {"device": device}
        return tensor.to(dtype=_cast_dtype(tensor, to), **moved)

    try:
        for module in copies:
            with quiet():  # PyTorch's, of modules inside TorchScript
                module._apply(move)  # type: ignore[no-untyped-call]
        calls = _mapped(move, calls)
    except BaseException as error:  # devices and subclasses raise errors of their own
        as_result(error)
        name = "its own dtypes" if to is None else str(to).removeprefix("torch.")
        raise UsageError(f"{subject.name} cannot be brought to {device} in {name}: {brief(error)}") from error
    root: torch.nn.Module | None = None
    if subject.kind is Kind.REGIONAL or len(copies) > 1:
        root = torch.nn.ModuleList(copies)
    elif copies:
        root = copies[0]
    return Prepared(model, calls, root, origins)


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], calls: Sequence[Call]) -> tuple[Call, ...]:
    return tuple(Call(map_tensors(function, c.args), map_tensors(function, dict(c.kwargs))) for c in calls)


def fresh_call(call: Call, device: str | None = None) -> Call:
    """The arguments of a call as new tensors, on `device` if given, with what the user marked for Dynamo."""

    def duplicate(tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.detach().clone()
        if device is not None and device_of(tensor) != torch.device(device):
            copied = copied.to(device)
        copied.requires_grad_(tensor.requires_grad)
        for name, value in vars(tensor).items():
            if name.startswith("_"):  # where torch._dynamo.mark_dynamic and mark_static write
                setattr(copied, name, copy.copy(value))
        return copied

    return _mapped(duplicate, [call])[0]


def _cast_dtype(tensor: torch.Tensor, to: torch.dtype | None) -> torch.dtype:
    if to is None:
        return tensor.dtype
    if tensor.is_complex():
        return torch.complex128 if to is torch.float64 else torch.complex64
    return to if tensor.is_floating_point() else tensor.dtype


def forward_through(blocks: Sequence[Callable[..., Any]], call: Call) -> Any:
    """Run all blocks, the output of each fed to the next. Raises `SubjectError` for what `require_ran` refuses."""
    result: Any = require_ran(blocks[0](*call.args, **call.kwargs), "the model")
    for block in blocks[1:]:
        result = require_ran(block(*result) if isinstance(result, tuple) else block(result), "the model")
    return result


def loss_of(loss: Callable[[Any], object], result: object) -> torch.Tensor:
    """The user's loss of an output. Raises `SubjectError` unless it is a floating tensor of one element."""
    total = require_ran(loss(result), "the loss")
    if isinstance(total, torch.Tensor) and total.numel() == 1 and total.is_floating_point():
        return total
    returned = f"an object of type {type(total).__name__}"
    if isinstance(total, torch.Tensor):
        returned = f"a tensor of shape {tuple(total.shape)}, {total.dtype}"
    raise SubjectError(f"the loss must return a floating tensor of one element, for backward; it returned {returned}")


def recompiled(subject: Subject, prepared: Prepared, **options: Any) -> tuple[Any, ...]:
    """The blocks of a copy, compiled where the subject's are; by `torch.compile` where nothing of it is compiled.

    options: of `torch.compile`; a subject that is compiled already has its own.
    """
    if not is_compiled_already(subject):
        return tuple(torch.compile(block, **options) for block in prepared.blocks)
    compiler, origins = dynamo.CompiledLike(), prepared.origins

    def change(twin: torch.nn.Module) -> torch.nn.Module:
        module: torch.nn.Module = compiler.of(origins[id(twin)], twin)
        return module

    def wrap(function: object, twin: object) -> object:
        return compiler.of(origins.get(id(function), function), twin)

    return tuple(rebound(b, change, wrap=wrap, also=lambda value: id(value) in origins) for b in prepared.blocks)


def is_compiled_already(subject: Subject) -> bool:
    """Return whether the subject, or a module or function inside it, went through `torch.compile` or `compile()`."""
    return has_compiled_parts(subject.model)


def is_scripted(subject: Subject) -> bool:
    """Return whether a block of the subject is TorchScript, which `torch.compile` does not take."""
    return any(isinstance(part, (torch.jit.ScriptModule, torch.jit.ScriptFunction)) for part in _blocks(subject.model))


def trains(subject: Subject) -> bool:
    """Return whether anything in the subject is trained."""
    return any(p.requires_grad for module in modules_of(subject.model) for p in module.parameters())


def modules_of(model: object) -> list[torch.nn.Module]:
    """The modules that a subject's callables are or contain (see `closures.walk`), each once."""
    plain = (dynamo.uncompiled(part) for block in _blocks(model) for part in walk(block))
    return list({id(part): part for part in plain if isinstance(part, torch.nn.Module)}.values())


def _blocks(model: object) -> tuple[Any, ...]:
    return model if isinstance(model, tuple) else (model,)


def _plain_copy(block: object, memo: dict[int, Any], origins: dict[int, object]) -> object:
    """A deep copy that is not compiled; of a function, with copies of the modules in it, which deepcopy would share."""

    def change(module: torch.nn.Module) -> torch.nn.Module:
        copied: torch.nn.Module = dynamo.stripped(_deepcopy(dynamo.uncompiled(module), memo))
        origins.setdefault(id(copied), module)
        return copied

    def wrap(function: object, twin: object) -> object:
        origins[id(twin)] = function
        return twin

    def copy_argument(value: object) -> object:
        with suppress(Exception):  # a lock, a generator: shared, as other contents of a closure are
            return copy.deepcopy(value, memo)
        return value

    if isinstance(block, torch.jit.ScriptFunction):
        return _reloaded(block)
    twin = rebound(block, change, copy_argument=copy_argument, wrap=wrap)
    return _deepcopy(block, memo) if twin is block else twin


def _copy_scripts(modules: list[torch.nn.Module], memo: dict[int, Any]) -> None:
    """Put copies of all TorchScript inside these modules into the memo of `copy.deepcopy`.

    deepcopy would share their code with the originals, which TorchScript's executor specialises to the dtypes of the
    first runs: the next dtype of autocast would fail in it. It would also copy tensors twice that other modules share.
    So each is saved and loaded again, and takes the memo's copies of its tensors.
    """
    scripts = [part for root in modules for part in root.modules() if isinstance(part, torch.jit.ScriptModule)]
    inner = {id(child) for script in scripts for child in script.modules() if child is not script}
    for script in scripts:
        if id(script) in inner or id(script) in memo:
            continue
        try:
            twin = _reloaded(script)
        except Exception:  # noqa: BLE001  # it cannot be saved, for any reason
            twin = copy.deepcopy(script)
        twins = dict(twin.named_modules(remove_duplicate=False))
        for path, child in script.named_modules(remove_duplicate=False):
            memo[id(child)] = twin = twins[path]
            for named in (child.named_parameters, child.named_buffers):
                for name, tensor in named(recurse=False, remove_duplicate=False):
                    with suppress(Exception):  # a tensor with a history: the loaded one stays
                        setattr(twin, name, copy.deepcopy(tensor, memo))
        memo.setdefault(id(memo), []).extend(script.modules())  # kept alive: their ids are not reused


def _reloaded(script: torch.jit.ScriptModule | torch.jit.ScriptFunction[Any, Any]) -> torch.nn.Module:
    """A copy of TorchScript through its file format; of a function, a module that runs it."""
    with quiet():  # PyTorch's, that TorchScript is deprecated
        buffer = io.BytesIO()
        torch.jit.save(script, buffer)
        buffer.seek(0)
        module: torch.nn.Module = torch.jit.load(buffer)  # type: ignore[no-untyped-call]
        return module


def _deepcopy(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy. A tensor in it with a history (a cached bias table) is detached; what Python cannot copy, such as a
    lock, an open file or the handle of an op, is shared.
    """
    known = dict(memo)
    while True:
        try:
            return copy.deepcopy(value, memo)
        except Exception as error:  # noqa: PERF203  # each failure shares one more part
            frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
            parts = [frame.f_locals["x"] for frame in frames if frame.f_code is copy.deepcopy.__code__]
            if not parts or isinstance(parts[-1], torch.nn.Module) or id(parts[-1]) in known:
                raise
            part = parts[-1]
            known[id(part)] = part.detach().clone() if isinstance(part, torch.Tensor) else part
            memo.clear()  # it holds what was copied in part
            memo.update(known)


def parameter_names(roots: Sequence[torch.nn.Module]) -> dict[int, str]:
    """The names of parameters by `id`; of several modules with the number of the module before them."""
    return {
        id(parameter): (f"{number}.{name}" if len(roots) > 1 else name).replace("_orig_mod.", "")
        for number, root in enumerate(roots)
        for name, parameter in root.named_parameters()
    }


def has_compiled_parts(model: object) -> bool:
    """Return whether a model or function is compiled, or contains a module that is."""
    parts = [part for block in _blocks(model) for part in walk(block)]
    inside = [module for part in parts if isinstance(part, torch.nn.Module) for module in part.modules()]
    return any(map(dynamo.is_compiled, (*parts, *inside)))


def eager_modules(model: object) -> int:
    """Return how many modules of a partly compiled model compute outside its compiled parts."""
    if not isinstance(model, torch.nn.Module) or dynamo.is_compiled(model):
        return 0
    inside = sum(eager_modules(child) for child in model.children())
    return inside + (not isinstance(model, (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)))
