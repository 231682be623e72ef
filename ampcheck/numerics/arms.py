"""Running a subject once: a copy of the model, equal seeds, forward, loss and backward, everything kept for judging."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.errors import UsageError, brief
from ampcheck.nest import map_tensors, tensors
from ampcheck.numerics.equal_random import seeded
from ampcheck.subject import Call, Kind, Subject

KEPT_BYTES = 2 << 30
"""How much of the modules' outputs one arm keeps; beyond it the rest is counted as unseen."""


@dataclass(slots=True)
class Prepared:
    """A model and its calls that may be run and changed without touching the user's."""

    kind: Kind
    model: Any
    calls: tuple[Call, ...]

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The callables that run, one after the other."""
        return self.model if isinstance(self.model, tuple) else (self.model,)

    @property
    def root(self) -> torch.nn.Module | None:
        """The module whose paths findings name; None for a plain function."""
        if self.kind is Kind.REGIONAL:
            return torch.nn.ModuleList([b for b in self.blocks if isinstance(b, torch.nn.Module)])
        return self.model if isinstance(self.model, torch.nn.Module) else None


@dataclass(slots=True)
class Outcome:
    """What one arm gave. Tensors are detached copies.

    outputs: by path; modules: by (module path, call, path in its output); gradients: by parameter name, unscaled and in
    float64, whatever `gradient_dtypes` says that they were.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[tuple[str, int, str], torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    losses: list[torch.dtype] = field(default_factory=list)
    scale: float = 1.0
    error: Exception | None = None
    phase: str = "forward"
    no_backward: str = ""
    dropped: int = 0

    @property
    def finite_gradients(self) -> bool:
        """Whether every gradient is finite; true where there is none."""
        return all(bool(g.isfinite().all()) for g in self.gradients.values())


def prepare(subject: Subject, *, device: str = "cpu", to: torch.dtype | None = None) -> Prepared:
    """A deep copy of the subject on `device`, its floating tensors cast `to`.

    Raises `UsageError` for a model that cannot be copied.
    """
    try:
        model = copy.deepcopy(subject.model, _cached_results(subject.model))
        calls = copy.deepcopy(subject.calls, {})
    except Exception as error:  # any __deepcopy__ of the user's may raise anything
        raise UsageError(
            f"{subject.name} must be copied to be run more than once, and copy.deepcopy raised {brief(error)}"
        ) from error
    for block in model if isinstance(model, tuple) else (model,):
        if isinstance(block, torch.nn.Module):
            block.to(device=device)
            if to is not None:
                block.to(dtype=to)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        floating = tensor.is_floating_point() and to is not None
        return tensor.detach().to(device=device, dtype=to if floating else tensor.dtype)

    return Prepared(
        subject.kind, model, tuple(Call(map_tensors(move, c.args), map_tensors(move, dict(c.kwargs))) for c in calls)
    )


def _cached_results(model: Any) -> dict[int, Any]:
    """Tensors with a history that modules keep as attributes (a cached bias table): deepcopy refuses them."""
    memo: dict[int, Any] = {}
    for block in model if isinstance(model, tuple) else (model,):
        for module in block.modules() if isinstance(block, torch.nn.Module) else ():
            held = {k: v for k, v in vars(module).items() if isinstance(v, (torch.Tensor, dict, list, tuple))}
            for _, tensor in tensors({k: v for k, v in held.items() if not k.startswith("_")}):
                if tensor.grad_fn is not None:
                    memo[id(tensor)] = tensor.detach().clone()
    return memo


def run_arm(
    prepared: Prepared,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: AbstractContextManager[Any] | None = None,
    around: Sequence[AbstractContextManager[Any]] = (),
    scale: float = 1.0,
    keep_modules: bool = True,
    finite_loss: bool = False,
    seed: int = 0,
) -> Outcome:
    """Run forward, loss and backward once.

    autocast: entered for each forward and loss, never for backward. around: entered in order for all of it (a trace).
    scale: multiplies the loss before backward, as a GradScaler does; gradients are divided by it again.
    finite_loss: leave out of the default loss what is not finite. An exception of the model is kept in `error`.
    """
    outcome = Outcome(scale=scale)
    leaves = _leaves(prepared)
    if not leaves:
        outcome.no_backward = "nothing requires a gradient"
    with seeded(seed), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # the user's own run shows them once; as errors they would pose as the model's
        if keep_modules and prepared.root is not None:
            stack.enter_context(_kept_outputs(prepared.root, outcome))
        for context in around:
            stack.enter_context(context)
        try:
            for number, call in enumerate(prepared.calls):
                outcome.phase = "forward"
                with torch.enable_grad(), autocast or nullcontext():
                    result = _forward(prepared, call)
                    prefix = f"{number}." if len(prepared.calls) > 1 else ""
                    for path, tensor in tensors(result):
                        if tensor.is_floating_point() and tensor.numel():
                            outcome.outputs[prefix + path] = _unseen_copy(tensor)
                    total = None if outcome.no_backward else _total(result, loss, finite_loss)
                if loss is not None or not any(name.startswith("input.") for name in leaves):
                    outcome.losses += _scalar_losses(result, total if loss else None)
                if outcome.no_backward:
                    continue
                if total is None:
                    outcome.no_backward = "no floating output has a gradient"
                    continue
                outcome.phase = "backward"
                # The scale goes in as the first gradient, where a GradScaler's multiplication puts it: no op of ours
                # runs.
                torch.autograd.backward(total, torch.full_like(total, scale))
        except Exception as error:  # noqa: BLE001  # the user's model: its exception is a result
            outcome.error = error
    for name, leaf in leaves.items():
        if leaf.grad is not None and not outcome.no_backward:
            grad = leaf.grad.to_dense() if leaf.grad.layout is not torch.strided else leaf.grad
            outcome.gradient_dtypes[name] = grad.dtype
            outcome.gradients[name] = grad.detach().to(torch.float64) / scale
            leaf.grad = None
    return outcome


def _unseen_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that no trace sees: it is ours, not the model's."""
    with _disable_current_modes():
        return tensor.detach().clone()


def _forward(prepared: Prepared, call: Call) -> Any:
    result: Any = prepared.blocks[0](*call.args, **call.kwargs)
    for block in prepared.blocks[1:]:
        result = block(*result) if isinstance(result, tuple) else block(result)
    return result


def _leaves(prepared: Prepared) -> dict[str, torch.Tensor]:
    """What gradients are taken of: the parameters; where there are none, the floating inputs."""
    named = dict(prepared.root.named_parameters()) if prepared.root is not None else {}
    leaves: dict[str, torch.Tensor] = {name: p for name, p in named.items() if p.requires_grad}
    if leaves:
        return leaves
    found: dict[str, torch.Tensor] = {}

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaf = tensor.requires_grad_()
        found[f"input.{len(found)}"] = leaf
        return leaf.view_as(leaf) if leaf.layout is torch.strided else leaf  # a leaf cannot be written in place

    prepared.calls = tuple(Call(map_tensors(watch, c.args), map_tensors(watch, dict(c.kwargs))) for c in prepared.calls)
    return found


def _total(result: Any, loss: Callable[[Any], torch.Tensor] | None, finite: bool) -> torch.Tensor | None:
    """The loss: the user's, or the mean of squares of every floating output, whose ops are ours and not traced."""
    if loss is not None:
        return loss(result)
    total: torch.Tensor | None = None
    with _disable_current_modes():
        for _, tensor in tensors(result):
            if tensor.is_floating_point() and tensor.numel() and tensor.requires_grad:
                wide = tensor if tensor.dtype is torch.float64 else tensor.float()
                wide = torch.where(wide.isfinite(), wide, 0.0) if finite else wide
                part = wide.square().mean()
                total = part if total is None else total + part
    return total


def _scalar_losses(result: Any, given: torch.Tensor | None) -> list[torch.dtype]:
    """The dtypes of what can only be a loss: the user's own, or 0-d outputs that carry a gradient."""
    if given is not None:
        return [given.dtype]
    return [t.dtype for _, t in tensors(result) if t.dim() == 0 and t.is_floating_point() and t.requires_grad]


@contextmanager
def _kept_outputs(root: torch.nn.Module, outcome: Outcome) -> Iterator[None]:
    calls: dict[str, int] = {}
    kept = 0

    def hook(name: str) -> Callable[..., None]:
        def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
            nonlocal kept
            call = calls.get(name, 0)
            calls[name] = call + 1
            for path, tensor in tensors(output):
                if not tensor.is_floating_point() or not tensor.numel() or tensor.layout is not torch.strided:
                    continue
                kept += tensor.numel() * tensor.element_size()
                if kept > KEPT_BYTES:
                    outcome.dropped += 1
                else:
                    outcome.modules[name, call, path] = _unseen_copy(tensor)

        return keep

    with ExitStack() as hooks:
        for name, module in root.named_modules():
            hooks.callback(module.register_forward_hook(hook(name)).remove)
        yield
