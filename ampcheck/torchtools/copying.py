"""A copy of a subject that may be run, moved, cast and changed without touching the user's."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcheck.core.errors import SubjectError, UsageError, as_result, brief, require_ran
from ampcheck.core.subject import Call, Kind, Subject
from ampcheck.torchtools import dynamo
from ampcheck.torchtools.closures import rebound, walk
from ampcheck.torchtools.pytree import map_tensors, tensors


@dataclass(slots=True)
class Prepared:
    """A model and its calls that may be run and changed."""

    kind: Kind
    model: Any
    calls: tuple[Call, ...]
    root: torch.nn.Module | None
    """The module whose paths findings name; None for a plain function."""
    origins: dict[int, Any] = field(default_factory=dict)
    """The user's module or function, by the `id` of its copy."""

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The callables that run, one after the other."""
        return self.model if isinstance(self.model, tuple) else (self.model,)


def prepare(subject: Subject, *, device: str = "cpu", to: torch.dtype | None = None) -> Prepared:
    """A deep copy of the subject on `device`, its real floating tensors cast `to`, complex ones to the same width.

    What went through `torch.compile` is plain again in the copy; `recompiled` compiles it as it was. Raises
    `UsageError` for a model that cannot be copied, moved or cast.
    """
    found = modules_of(subject.model)
    try:
        memo = _cached_results(found)
        _load_scripts(found, memo)
        origins: dict[int, Any] = {}
        copied = tuple(_plain_copy(part, memo, origins) for part in _blocks(subject.model))
        model = copied if isinstance(subject.model, tuple) else copied[0]
        calls = tuple(Call(map_tensors(_bare, c.args), map_tensors(_bare, dict(c.kwargs))) for c in subject.calls)
        calls = copy.deepcopy(calls)
    except BaseException as error:  # any __deepcopy__ of the user's may raise anything
        raise UsageError(
            f"{subject.name} must be copied to be run more than once, and copying it raised {brief(as_result(error))}"
        ) from error
    copies = modules_of(model)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=_wide(tensor, to))

    try:
        for module in copies:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's, of modules that TorchScript holds
                module._apply(move)  # type: ignore[no-untyped-call]
        calls = tuple(Call(map_tensors(move, c.args), map_tensors(move, dict(c.kwargs))) for c in calls)
    except BaseException as error:  # each device and subclass refuses in its own way
        as_result(error)
        name = "its own dtypes" if to is None else str(to).removeprefix("torch.")
        raise UsageError(f"{subject.name} cannot be brought to {device} in {name}: {brief(error)}") from error
    root: torch.nn.Module | None = None
    if subject.kind is Kind.REGIONAL or len(copies) > 1:
        root = torch.nn.ModuleList(copies)
    elif copies:
        root = copies[0]
    return Prepared(subject.kind, model, calls, root, origins)


def forward_through(blocks: Sequence[Callable[..., Any]], call: Call) -> Any:
    """Run all blocks, the output of each fed to the next. Raises `SubjectError` for what `require_ran` refuses."""
    result: Any = require_ran(blocks[0](*call.args, **call.kwargs), "the model")
    for block in blocks[1:]:
        result = block(*result) if isinstance(result, tuple) else block(result)
        require_ran(result, "the model")
    return result


def loss_of(loss: Callable[[Any], Any], result: Any) -> torch.Tensor:
    """The user's loss of an output. Raises `SubjectError` for what is no floating tensor of one element."""
    total = require_ran(loss(result), "the loss")
    if isinstance(total, torch.Tensor) and total.numel() == 1 and total.is_floating_point():
        return total
    found = (
        f"a tensor of shape {tuple(total.shape)}, {total.dtype}"
        if isinstance(total, torch.Tensor)
        else (f"an object of type {type(total).__name__}")
    )
    raise SubjectError(f"the loss must return a floating tensor of one element, for backward; it returned {found}")


def recompiled(subject: Subject, prepared: Prepared) -> tuple[Any, ...]:
    """The blocks of a copy, compiled as the subject's own are, in whole and in parts; by `torch.compile` where nothing
    of the subject is compiled."""
    if not is_compiled_already(subject):
        return tuple(torch.compile(block) for block in prepared.blocks)
    again = dynamo.CompiledLike()

    def compiled(twin: torch.nn.Module) -> torch.nn.Module:
        module: torch.nn.Module = again.of(prepared.origins[id(twin)], twin)
        return module

    def wrapped(function: Any, twin: Any) -> Any:
        return again.of(prepared.origins.get(id(function), function), twin)

    known = prepared.origins
    return tuple(rebound(block, compiled, wrap=wrapped, also=lambda one: id(one) in known) for block in prepared.blocks)


def is_compiled_already(subject: Subject) -> bool:
    """Whether the subject, or a module or function that it holds, went through `torch.compile` or `compile()`."""
    parts = [one for part in _blocks(subject.model) for one in walk(part)]
    inside = [module for part in parts if isinstance(part, torch.nn.Module) for module in part.modules()]
    return any(dynamo.is_compiled(part) for part in (*parts, *inside))


def modules_of(model: Any) -> list[torch.nn.Module]:
    """The modules that a subject's callables run: themselves, or what they hold (see `walk`)."""
    found: list[torch.nn.Module] = []
    for part in _blocks(model):
        for one in walk(part):
            plain = dynamo.uncompiled(one)
            if isinstance(plain, torch.nn.Module) and not any(plain is other for other in found):
                found.append(plain)
    return found


def _blocks(model: Any) -> tuple[Any, ...]:
    return model if isinstance(model, tuple) else (model,)


def _plain_copy(part: Any, memo: dict[int, Any], origins: dict[int, Any]) -> Any:
    """A deep copy without `torch.compile`; of a function, with copies of what it holds, which deepcopy would share."""

    def plain(module: torch.nn.Module) -> torch.nn.Module:
        copied: torch.nn.Module = dynamo.stripped(copy.deepcopy(dynamo.uncompiled(module), memo))
        origins.setdefault(id(copied), module)
        return copied

    def noted(function: Any, twin: Any) -> Any:
        origins[id(twin)] = function
        return twin

    def given(value: Any) -> Any:
        with suppress(Exception):  # a lock, a generator: shared, as what a closure holds beside modules is
            return copy.deepcopy(value, memo)
        return value

    if isinstance(part, torch.jit.ScriptFunction):
        return _reloaded(part)
    made = rebound(part, plain, given=given, wrap=noted)
    return copy.deepcopy(part, memo) if made is part else made


NO_SCRIPT = "torch.compile takes no TorchScript"
"""Why nothing of a scripted subject is compiled."""


def is_scripted(subject: Subject) -> bool:
    """Whether a block of the subject is TorchScript, which `torch.compile` does not take."""
    return any(isinstance(part, (torch.jit.ScriptModule, torch.jit.ScriptFunction)) for part in _blocks(subject.model))


def _load_scripts(modules: list[torch.nn.Module], memo: dict[int, Any]) -> None:
    """Put copies of all TorchScript inside these modules into the memo of `copy.deepcopy`.

    deepcopy itself would share their code with the originals, which TorchScript's executor specialises to the dtypes of
    the first runs: the next dtype of autocast would fail in it. It would also copy their tensors once more, where
    other modules hold them too. So each is saved and loaded again, and takes the memo's copies of its tensors.
    """
    scripts = [one for root in modules for one in root.modules() if isinstance(one, torch.jit.ScriptModule)]
    inner = {id(child) for script in scripts for child in script.modules() if child is not script}
    for script in scripts:
        if id(script) in inner or id(script) in memo:
            continue
        twins = dict(_loaded(script).named_modules(remove_duplicate=False))
        for path, child in script.named_modules(remove_duplicate=False):
            memo[id(child)] = twin = twins[path]
            own = (child.named_parameters, child.named_buffers)
            for name, tensor in (item for items in own for item in items(recurse=False, remove_duplicate=False)):
                with suppress(Exception):  # a tensor with a history cannot be copied: it keeps what was loaded
                    setattr(twin, name, copy.deepcopy(tensor, memo))
        memo.setdefault(id(memo), []).extend(script.modules())  # held, so that their numbers stay theirs


def _loaded(script: torch.jit.ScriptModule) -> torch.nn.Module:
    """The module saved and loaded again; what cannot be saved is copied."""
    with suppress(Exception):
        return _reloaded(script)
    return copy.deepcopy(script)


def _reloaded(script: torch.jit.ScriptModule | torch.jit.ScriptFunction[Any, Any]) -> torch.nn.Module:
    """A copy of TorchScript through its file format; of a function, a module that runs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that TorchScript is deprecated
        buffer = io.BytesIO()
        torch.jit.save(script, buffer)
        buffer.seek(0)
        module: torch.nn.Module = torch.jit.load(buffer)  # type: ignore[no-untyped-call]
        return module


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """An input without its history, which deepcopy refuses."""
    return tensor.detach()


def _wide(tensor: torch.Tensor, to: torch.dtype | None) -> torch.dtype:
    if to is None:
        return tensor.dtype
    if tensor.is_complex():
        return torch.complex128 if to is torch.float64 else torch.complex64
    return to if tensor.is_floating_point() else tensor.dtype


def _cached_results(modules: list[torch.nn.Module]) -> dict[int, Any]:
    """Tensors with a history that modules keep as attributes (a cached bias table): deepcopy refuses them."""
    memo: dict[int, Any] = {}
    for root in modules:
        for module in root.modules():
            held = {k: v for k, v in vars(module).items() if isinstance(v, (torch.Tensor, dict, list, tuple))}
            for _, tensor in tensors({k: v for k, v in held.items() if not k.startswith("_")}):
                if tensor.grad_fn is not None:
                    memo[id(tensor)] = tensor.detach().clone()
    return memo
