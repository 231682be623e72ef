"""One side of a comparison, and one call of it: on copies of its arguments, after which its state is as before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch

from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.subject import Call, Subject, is_architecture, load_attribute, load_subject
from ampcheck.core.text import listed
from ampcheck.numerics.run import Receive
from ampcheck.records.results import Key
from ampcheck.torchtools.closures import walk
from ampcheck.torchtools.copying import Prepared
from ampcheck.torchtools.dynamo import uncompiled
from ampcheck.torchtools.pytree import is_plain, like, map_tensors, tensors
from ampcheck.torchtools.source import at_users_line


@dataclass(frozen=True, slots=True)
class Side:
    """Side of a comparison: a function of these arguments, or what `build` makes inside the shadow, `(function, args)`.

    name: `a` or `b` in findings. dtype: what autocast casts to; None leaves the caller's autocast as it is. modules: by
    the path of a module, the name under which its result and the gradients of its parameters are compared. backward:
    take gradients. grad: False of one that runs without gradients, whatever the caller's mode. own_gradients: take
    those of arguments that require one alone. shared: parameters that both sides use, by name,
    whose gradients are compared though a function closes over them.
    """

    name: str
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[[], Any] | None = None
    dtype: torch.dtype | None = None
    backward: bool = True
    grad: bool = True
    modules: Mapping[str, str] = field(default_factory=dict)
    own_gradients: bool = False
    shared: Mapping[str, torch.nn.Parameter] = field(default_factory=dict)

    def without_gradients(self) -> Side:
        """The same, without gradients."""
        return replace(self, backward=False, grad=False)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters of the modules that the function is, or closes over, by the names in a comparison."""
        named: dict[str, torch.nn.Parameter] = {}
        for module in modules_of(self.function):
            prefix = "" if module is self.function else f"{type(module).__name__}."
            for name, parameter in module.named_parameters():
                named.setdefault(_renamed(prefix + name, self.modules), parameter)
        return named

    def made(self) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
        """The function and its arguments."""
        if self.function is not None:
            return self.function, self.args, self.kwargs
        assert self.build is not None
        try:
            subject = self.build()
        except BaseException as error:  # noqa: BLE001  # the user's code
            raise_from(self, as_result(error))
        if not isinstance(subject, Subject):
            subject = Subject(subject, name=self.name)
        if len(subject.calls) != 1 or isinstance(subject.model, tuple):
            raise UsageError(
                f"side {self.name} must build (function or module, args) or (function or module, args, kwargs), one "
                f"call of it; found a subject of kind '{subject.kind.value}'"
            )
        return subject.model, subject.calls[0].args, subject.calls[0].kwargs


class NoBackwardError(Exception):
    """The backward pass of a side raises."""


def raise_from(side: Side, error: BaseException, phase: str = "forward") -> NoReturn:
    """Raise an exception of the user's code as a `UsageError` of its side; where only gradients prevent it, as
    `NoBackwardError`."""
    if isinstance(error, UsageError):
        raise error
    text = brief(error)
    of_gradients = phase == "backward" or any(word in text for word in ("leaf", "grad"))
    if side.backward and isinstance(error, RuntimeError) and of_gradients:
        raise NoBackwardError(text) from error
    if phase == "backward":
        raise UsageError(f"the backward pass of {side.name} raised {text}") from error
    raise UsageError(f"side {side.name} raised {text}{at_users_line(error)}") from error


class LiveCall:
    """One call of a side on copies of its arguments.

    prepared: what runs. leaves: what gradients are taken of, by name. names: what may have a result of its own, whether
    it has one or not: parameters and buffers. arguments: the tensors among them as they are before the call.
    """

    def __init__(self, side: Side) -> None:
        function, args, kwargs = side.made()
        memories: dict[int, torch.UntypedStorage] = {}
        every = side.backward and not side.own_gradients
        copied = partial(_copied, memories=memories, every=every, none=not side.grad)
        args, kwargs = map_tensors(copied, list(args)), map_tensors(copied, dict(kwargs))
        module = uncompiled(function) if isinstance(function, torch.nn.Module) else None
        self.prepared = Prepared(function, (Call(args, kwargs),), module)
        passed = {path: t for path, t in tensors((list(args), kwargs)) if is_plain(t) and t.numel()}
        self.arguments = {path: t.detach().clone() for path, t in passed.items()}
        of_module: tuple[Any, ...] = ({}, {})
        if module is not None:
            of_module = dict(module.named_parameters()), dict(module.named_buffers())
        parameters, buffers = ({_renamed(n, side.modules): t for n, t in named.items()} for named in of_module)
        arguments = {f"argument {path}": t for path, t in passed.items()}
        parameters = {f"parameter {name}": p for name, p in (parameters | dict(side.shared)).items()}
        leaves = (arguments | parameters).items() if side.backward else ()
        self.leaves = {name: t for name, t in leaves if t.requires_grad and t.is_leaf}
        self.names = frozenset((*parameters, *(f"buffer {name}" for name in buffers)))
        self._old = {("written", f"argument {path}", 0): (passed[path], t) for path, t in self.arguments.items()}
        self._old |= {("buffer", name, 0): (buffer, buffer.detach().clone()) for name, buffer in buffers.items()}

    def written(self) -> dict[Key, torch.Tensor]:
        """The arguments and buffers that the call has written."""
        return {key: t for key, (t, before) in self._old.items() if not torch.equal(t.detach(), before)}


def _copied(
    tensor: torch.Tensor, *, memories: dict[int, torch.UntypedStorage], every: bool, none: bool
) -> torch.Tensor:
    """A copy with the class, attributes and layout of a tensor. Tensors that share memory do so in the copy, with what
    lies around them.

    It requires a gradient where the tensor does; `every` tensor of numbers does, or `none`.
    """
    numbers = tensor.is_floating_point() or tensor.is_complex()
    gradient = (tensor.requires_grad or (every and numbers)) and not none
    if not is_plain(tensor):
        return tensor.detach().clone()
    if 0 in tensor.stride() or tensor.is_neg():  # elements that share memory would share a gradient
        twin = tensor.detach().clone(memory_format=torch.contiguous_format)
    else:
        storage = tensor.untyped_storage()
        memory = memories.get(storage._cdata)
        if memory is None:
            memory = memories[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
        twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        twin.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        twin = twin.conj() if tensor.is_conj() else twin
    return like(tensor, twin).requires_grad_(gradient)


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    """The name of a parameter or buffer in a comparison, by the longest path of a module that is named."""
    name = name.replace("_orig_mod.", "")  # of a compiled module
    paths = [path for path in modules if path == "" or name.startswith(f"{path}.")]
    if not paths:
        return name
    path = max(paths, key=len)
    inside = name[len(path) :].removeprefix(".")
    return f"{modules[path]}.{inside}".removeprefix(".")


@contextmanager
def module_results(side: Side, root: torch.nn.Module | None, keep: Receive) -> Iterator[None]:
    """Keep the floating results of the modules that are named, in the order in which they run."""
    known = {} if root is None else dict(root.named_modules())
    if absent := [path for path in side.modules if path not in known]:
        found = listed(filter(None, known)) or "none"
        if not known:
            found = "a function, which has none"
        raise UsageError(f"modules must name modules of {side.name}; there is no {absent[0]!r}; found {found}")
    calls = Counter[str]()

    def take(name: str, _module: object, _args: object, output: object) -> None:
        number = calls[name]
        calls[name] += 1
        title = f"{name} call {number}" if number else name
        for path, tensor in tensors(output):
            if tensor.is_floating_point():
                keep(("module", f"{title} {path}".strip(), 0), tensor)

    hooks = [known[path].register_forward_hook(partial(take, name)) for path, name in side.modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def modules_of(function: object) -> list[torch.nn.Module]:
    """The modules that a function is, closes over, is bound to or reads as globals."""
    return [value for value in walk(function) if isinstance(value, torch.nn.Module)]


def side_of_target(target: str, name: str, **options: Any) -> Side:
    """The side that `file.py:function` names, which is called inside the shadow."""
    if not is_architecture(target):
        load_attribute(target)  # imported outside of it
    return Side(name, build=partial(load_subject, target), **options)
