"""One side of a comparison, and one call of it: on copies of its arguments, after which its state is as before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.subject import Subject, is_architecture, load_attribute, load_subject
from ampcheck.core.text import listed
from ampcheck.facts.memory import parts_of
from ampcheck.records.results import Key
from ampcheck.torchtools.closures import walk
from ampcheck.torchtools.dynamo import uncompiled
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.pytree import is_plain, map_tensors, results, tensors
from ampcheck.torchtools.reachable import reach
from ampcheck.torchtools.snapshot import preserved
from ampcheck.torchtools.source import users_place


@dataclass(frozen=True, slots=True)
class Side:
    """What runs: a function of these arguments, or what `build` makes inside the shadow, as `(function, args)`.

    name: `a` or `b` in findings. dtype: what autocast casts to; None leaves the caller's autocast as it is. modules: by
    the path of a module, the name under which its result and the gradients of its parameters are compared.
    own_gradients: take those of arguments that require one alone. shared: parameters that both sides use, by name,
    whose gradients are compared though a function closes over them.
    """

    name: str
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[[], Any] | None = None
    dtype: torch.dtype | None = None
    backward: bool = True
    modules: Mapping[str, str] = field(default_factory=dict)
    own_gradients: bool = False
    shared: Mapping[str, torch.nn.Parameter] = field(default_factory=dict)

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
        subject = raised_by(self, self.build)
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


def raised_by(side: Side, call: Callable[[], Any]) -> Any:
    """Run code of the user. What it raises is a `UsageError` of its side; where only gradients prevent it,
    `NoBackwardError`."""
    try:
        return call()
    except UsageError:
        raise
    except BaseException as error:
        text = brief(as_result(error))
        if side.backward and isinstance(error, RuntimeError) and any(word in text for word in ("leaf", "grad")):
            raise NoBackwardError(text) from error
        file, line = users_place(error)
        place = f" at {file}:{line}" if file else ""
        raise UsageError(f"side {side.name} raised {text}{place}") from error


class LiveCall:
    """One call of a function on copies of its arguments."""

    def __init__(self, side: Side) -> None:
        function, args, kwargs = side.made()
        memories: dict[int, torch.UntypedStorage] = {}
        copied = partial(_copied, memories=memories, gradient=side.backward, own=side.own_gradients)
        args, kwargs = map_tensors(copied, list(args)), map_tensors(copied, dict(kwargs))
        self._arguments = {path: t for path, t in tensors((list(args), kwargs)) if is_plain(t) and t.numel()}
        self._before = {path: t.detach().clone() for path, t in self._arguments.items()}
        module = function if isinstance(function, torch.nn.Module) else None
        module = None if module is None else uncompiled(module)
        named = {} if module is None else dict(module.named_parameters())
        named = {_renamed(name, side.modules): p for name, p in named.items()} | dict(side.shared)
        self._parameters = {f"parameter {name}": p for name, p in named.items()}
        self._buffers = {} if module is None else {_renamed(n, side.modules): b for n, b in module.named_buffers()}
        self._old = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}
        self._backward, self._name = side.backward, side.name
        self.modules: dict[Key, torch.Tensor] = {}
        with _module_results(side, module, self.modules), _autocast(side, self._arguments.values()):
            returned = raised_by(side, lambda: function(*args, **kwargs))
        self.outputs: dict[Key, torch.Tensor] = {("output", path, 0): t for path, t in _parts(returned)}
        self.plain = {path: value for path, value in leaves_of(returned) if not isinstance(value, torch.Tensor)}

    @property
    def arguments(self) -> Mapping[str, torch.Tensor]:
        """The tensors among the arguments, as they were before the call."""
        return self._before

    @property
    def names(self) -> frozenset[str]:
        """What may have a result of its own, whether it has one or not: parameters and buffers."""
        return frozenset((*self._parameters, *(f"buffer {name}" for name in self._buffers)))

    def results(self) -> dict[Key, torch.Tensor]:
        """All results by key, in the order in which they are compared."""
        return self.modules | self.outputs | self._written() | self._changed_buffers() | self._gradients()

    def _written(self) -> dict[Key, torch.Tensor]:
        """The arguments that the call has written."""
        changed = {n: t for n, t in self._arguments.items() if not torch.equal(t.detach(), self._before[n])}
        return {("written", f"argument {name}", 0): t for name, t in changed.items()}

    def _changed_buffers(self) -> dict[Key, torch.Tensor]:
        """The buffers that it has written."""
        return {("buffer", n, 0): t for n, t in self._buffers.items() if not torch.equal(t, self._old[n])}

    def _gradients(self) -> dict[Key, torch.Tensor]:
        """The gradients of a sum of all outputs with random signs, which no norm takes out, and which are whole
        numbers."""
        roots = [t for t in self.outputs.values() if t.requires_grad and t.numel() and is_plain(t)]
        arguments = {f"argument {path}": t for path, t in self._arguments.items()}
        leaves = {name: t for name, t in (arguments | self._parameters).items() if t.requires_grad and t.is_leaf}
        if not (self._backward and roots and leaves):
            return {}
        signs = [_signs(tensor) for tensor in roots]
        try:
            given = torch.autograd.grad(roots, list(leaves.values()), signs, allow_unused=True)
        except RuntimeError as error:
            raise NoBackwardError(brief(error)) from error
        except Exception as error:
            raise UsageError(f"the backward pass of {self._name} raised {brief(error)}") from error
        return {("gradient", name, 0): g for name, g in zip(leaves, given, strict=True) if g is not None}


def _parts(returned: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory in what a call returned, by their paths."""
    for path, leaf in results(returned):
        if isinstance(leaf, torch.Tensor):
            yield from parts_of(leaf, path)


def _copied(
    tensor: torch.Tensor, *, memories: dict[int, torch.UntypedStorage], gradient: bool, own: bool
) -> torch.Tensor:
    """A copy with the layout of a tensor. Tensors that share memory do so in the copy, with what lies around them.

    own: it requires a gradient where the tensor does; else every one of numbers does.
    """
    gradient = gradient and (tensor.requires_grad or not own)
    if not is_plain(tensor):
        return tensor.detach().clone()
    numbers = tensor.is_floating_point() or tensor.is_complex()
    if 0 in tensor.stride() or tensor.is_neg():  # elements that share memory would share a gradient
        return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(gradient and numbers)
    storage = tensor.untyped_storage()
    memory = memories.get(storage._cdata)
    if memory is None:
        memory = memories[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    twin.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    twin = twin.conj() if tensor.is_conj() else twin
    return twin.requires_grad_(gradient and numbers)


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
def _module_results(side: Side, root: torch.nn.Module | None, results: dict[Key, torch.Tensor]) -> Iterator[None]:
    """Keep the floating results of the modules that are named, in the order in which they run."""
    known = {} if root is None else dict(root.named_modules())
    if absent := [path for path in side.modules if path not in known]:
        have = listed(known) if known else "no modules, as it is a function"
        raise UsageError(f"modules must name modules of {side.name}; there is no {absent[0]!r}, but {have}")
    calls = Counter[str]()

    def keep(name: str, _module: object, _args: object, output: object) -> None:
        number = calls[name]
        calls[name] += 1
        title = f"{name} call {number}" if number else name
        for path, tensor in tensors(output):
            if tensor.is_floating_point():
                results["module", f"{title} {path}".strip(), 0] = tensor

    hooks = [known[path].register_forward_hook(partial(keep, name)) for path, name in side.modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _autocast(side: Side, arguments: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
    if side.dtype is None:
        return nullcontext()
    device = next((tensor.device.type for tensor in arguments), "cpu")
    return torch.autocast(device, side.dtype)


def _signs(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tensor.numel())
    signs = torch.randint(0, 2, (tensor.numel(),), generator=generator).mul_(2).sub_(1)
    return signs.view(tensor.shape).to(tensor)


def leaves_of(returned: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The tensors, numbers, texts and None in what a call returned, in lists, tuples and mappings, by their paths."""
    items: Iterable[tuple[object, object]] = ()
    if isinstance(returned, Mapping):
        items = returned.items()
    elif isinstance(returned, (list, tuple)):
        items = enumerate(returned)
    elif returned is None or isinstance(returned, (torch.Tensor, bool, int, float, complex, str)):
        yield path, returned
    elif type(returned).__module__ == "numpy":
        yield path, repr(returned.tolist()) if hasattr(returned, "tolist") else repr(returned)
    for key, value in items:
        yield from leaves_of(value, f"{path}.{key}" if path else str(key))


@contextmanager
def restored(function: object) -> Iterator[None]:
    """Restore what a function leads to, its modules with their gradients among them, and PyTorch's settings."""
    with preserved_state(), preserved(reach({"": function}), process=False):
        yield


def modules_of(function: object) -> list[torch.nn.Module]:
    """The modules that a function is, closes over, is bound to or reads as globals."""
    return [value for value in walk(function) if isinstance(value, torch.nn.Module)]


def side_of_target(target: str, name: str, **options: Any) -> Side:
    """The side that `file.py:function` names, which is called inside the shadow."""
    if not is_architecture(target):
        load_attribute(target)  # imported outside of it
    return Side(name, build=partial(load_subject, target), **options)
