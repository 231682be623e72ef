"""The gradients of one step: of each parameter and of each module's output, pass by pass, at the scale in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import hookable
from ampcheck.torchtools.storage import local
from ampcheck.training.loop import TrainingLoop


class Spot(NamedTuple):
    """Which gradient it is. kind: `parameter` or `output`; call: how many of this name came before in the step."""

    kind: str
    name: str
    call: int

    @property
    def module(self) -> str:
        """The module that it belongs to."""
        return self.name.rpartition(".")[0] if self.kind == "parameter" else self.name.partition("[")[0]


Seen = Callable[[Spot, torch.Tensor], None]
"""Is called with each gradient as it passes, detached; what it keeps it must copy."""


@contextmanager
def captured(loop: TrainingLoop, seen: Seen, *, outputs: bool) -> Iterator[None]:
    """Give `seen` every gradient of the backward passes inside, as autograd makes it: scaled, before it is added up.

    outputs: those of the modules' outputs too, which takes hooks on modules (compiled code would be compiled again).
    """
    calls: Counter[str] = Counter()

    def note(kind: str, name: str, grad: torch.Tensor) -> None:
        spot = Spot(kind, name, calls[name])
        calls[name] += 1
        with torch.no_grad(), _disable_current_modes():
            seen(spot, plain_values(grad))

    with ExitStack() as stack:
        for name, parameter in loop.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handle: Any = parameter.register_hook(_GradientHook(note, "parameter", name))  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
        if outputs:
            for path, root in loop.reached.modules.items():
                for inner, module in hookable(root):
                    hook = _OutputHook(note, "output", loop.path(path, inner))
                    stack.callback(module.register_forward_hook(hook).remove)
        yield


class _GradientHook:
    """A hook that a step may pickle or copy along with the module that it hangs on: the copy of it does nothing."""

    __torch_unserializable__ = True  # else PyTorch warns of hooks on tensors that are saved

    def __init__(self, note: Callable[[str, str, torch.Tensor], None], kind: str, name: str) -> None:
        self._note, self._kind, self._name = note, kind, name

    def __reduce__(self) -> tuple[type[_Silent], tuple[()]]:
        return _Silent, ()

    def __call__(self, grad: torch.Tensor) -> None:
        self._note(self._kind, self._name, grad)


class _Silent:
    """The hook on a copy of a module that was made while its gradients were captured."""

    def __call__(self, *args: object) -> None:
        pass


class _OutputHook(_GradientHook):
    def __call__(self, _: torch.nn.Module, args: object, output: object) -> None:  # type: ignore[override]
        if not torch.is_grad_enabled():
            return
        for path, tensor in tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None and tensor.is_floating_point():
                name = f"{self._name}[{path}]" if path else self._name
                tensor.register_hook(_GradientHook(self._note, "output", name))


def plain_values(grad: torch.Tensor) -> torch.Tensor:
    """The values of a gradient on this process, dense and real, detached."""
    grad = local(grad)
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


@contextmanager
def scaled_backward(factor: float) -> Iterator[None]:
    """Multiply what every backward pass starts from, as a loss scale larger by `factor` would."""

    def make(original: Any) -> Any:
        def run(roots: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() == -1 and kwargs.get("accumulate_grad", False):
                firsts = (torch.ones_like(r) if g is None else g for r, g in zip(roots, grads, strict=True))
                grads = tuple(first * factor for first in firsts)
            return original(roots, grads, *args, **kwargs)

        return run

    with replaced(torch.autograd, "_engine_run_backward", make):
        yield


@dataclass(slots=True)
class Kept:
    """Gradients of a step, copied; beyond `limit` bytes they are counted as unseen."""

    limit: int
    values: dict[Spot, torch.Tensor] = field(default_factory=dict)
    bytes: int = 0
    unseen: int = 0

    def __call__(self, spot: Spot, grad: torch.Tensor) -> None:
        """Keep one."""
        size = grad.numel() * grad.element_size()
        if self.bytes + size > self.limit:
            self.unseen += 1
            return
        self.bytes += size
        self.values[spot] = grad.clone()
