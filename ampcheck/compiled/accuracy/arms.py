"""One arm of the comparison: some steps of forward, loss, backward and update, with everything kept that is judged."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import UninitializedParameter

from ampcheck.compiled.options import Optimizer
from ampcheck.core.errors import as_result
from ampcheck.core.subject import Call, Subject
from ampcheck.numerics.arms import KEPT_BYTES, total_loss
from ampcheck.numerics.equal_random import seeded
from ampcheck.numerics.reference import input_names
from ampcheck.torchtools.copying import Prepared, forward_through, is_compiled_already, prepare, recompiled
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.pytree import map_tensors, tensors

Key: TypeAlias = tuple[str, str, int]
"""What one kept tensor is: kind (`output`, `loss`, `gradient`, `update`, `buffer`), name, step. Each call is a step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How every arm runs the subject.

    autocast: what autocast casts to in forward and loss; None switches it off. steps: how often all calls are made,
    each with an update. optimizer: makes one from the parameters; rate: of the plain gradient descent that stands in
    for it, 0 for no update. scale: of the loss, taken out again before anything is kept. finite_loss: leave out of the
    default loss what is not finite. leaves: the inputs whose gradient is taken, by name. backward: whether anything is
    differentiated at all.
    """

    device: str = "cpu"
    autocast: torch.dtype | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    steps: int = 1
    optimizer: Optimizer | None = None
    rate: float = 0.0
    scale: float = 1.0
    finite_loss: bool = False
    leaves: frozenset[str] = frozenset()
    backward: bool = True


@dataclass(slots=True)
class Trajectory:
    """What one arm gave.

    values: detached copies; gradients without the loss scale; an update is a weight after all steps less the same
    before. dtypes, size: of the weight or buffer itself, size being its Euclidean norm. shapes: dtype and shape of
    every tensor that a call gave, by its path. dropped: what was not kept, and why. drew: whether numpy's or Python's
    random numbers were used; streams: where PyTorch's random streams stand at the end. error, phase, step: the
    exception that ended it.
    """

    values: dict[Key, torch.Tensor] = field(default_factory=dict)
    size: dict[Key, float] = field(default_factory=dict)
    dtypes: dict[Key, torch.dtype] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    dropped: dict[Key, str] = field(default_factory=dict)
    drew: bool = False
    streams: tuple[bytes, ...] = ()
    error: BaseException | None = None
    phase: str = "forward"
    step: int = 0
    kept: int = 0

    def keep(self, kind: str, name: str, step: int, tensor: torch.Tensor) -> None:
        """A copy of a tensor's values, unless one run has kept too much already."""
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            self.dropped[kind, name, step] = f"{kind}s of another layout than strided"
        elif tensor.numel():
            self.kept += tensor.numel() * tensor.element_size()
            if self.kept > KEPT_BYTES:
                self.dropped[kind, name, step] = f"{kind}s beyond the memory that one run keeps"
                return
            values = tensor.detach().clone()
            self.values[kind, name, step] = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def run_plan(
    plan: Plan,
    prepared: Prepared,
    *,
    transform: Callable[[Any], Any] | None = None,
    compiled: Callable[[Prepared], Sequence[Any]] | None = None,
    around: Iterable[AbstractContextManager[Any]] = (),
) -> Trajectory:
    """Run all steps of a plan on a prepared copy, which they change.

    transform: applied to each block before it runs (a compiler); compiled: gives all blocks as they are to run. around:
    entered in order for all of it. An exception of the model is kept in `error`.
    """
    found = Trajectory()
    leaves = _leaves(plan, prepared)
    root = prepared.root
    parameters = {_path(n): p for n, p in root.named_parameters() if p.requires_grad} if root is not None else {}
    buffers = {_path(n): b for n, b in root.named_buffers()} if root is not None else {}
    begun = {name: tensor.detach().clone() for name, tensor in (parameters | buffers).items() if _has_values(tensor)}
    watched = {**parameters, **leaves} if plan.backward else {}
    with seeded(plan.device) as drew, warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # the user's own run shows them once; as errors they would pose as the model's
        for context in around:
            stack.enter_context(context)
        try:
            optimizer = _optimizer(plan, [p for p in parameters.values() if _has_values(p)])
            blocks = prepared.blocks if compiled is None else compiled(prepared)
            blocks = [block if transform is None else transform(block) for block in blocks]
            for found.step, call in enumerate(prepared.calls * plan.steps):
                _one_call(plan, found, blocks, call, watched)
                if optimizer is not None:
                    found.phase = "update"
                    optimizer.step()
                for tensor in watched.values():
                    tensor.grad = None
            _keep_state(found, parameters, buffers, begun)
        except BaseException as error:  # noqa: BLE001  # the user's model: its exception is a result
            found.error = as_result(error)
        found.drew = drew()
        found.streams = _streams(plan.device)
    return found


def _one_call(
    plan: Plan,
    found: Trajectory,
    blocks: Sequence[Callable[..., Any]],
    call: Call,
    watched: dict[str, torch.Tensor],
) -> None:
    found.phase = "forward"
    place = torch.device(plan.device).type
    with torch.enable_grad(), torch.autocast(place, plan.autocast, enabled=plan.autocast is not None):
        with preserved_state():
            result = forward_through(blocks, call)
        found.shapes[f"step {found.step}"] = type(result).__name__
        for path, tensor in tensors(result):
            found.shapes[f"step {found.step}, {path or 'output'}"] = f"{_name(tensor.dtype)} {list(tensor.shape)}"
            found.keep("output", path, found.step, tensor)
        if not watched:
            return
        with preserved_state():
            total = total_loss(result, plan.loss, plan.finite_loss)
        if total is not None and plan.loss is not None:
            found.keep("loss", "", found.step, total)
    if total is None or not total.requires_grad:
        return
    found.phase = "backward"
    torch.autograd.backward(total, torch.full_like(total, plan.scale), inputs=list(watched.values()))
    for name, tensor in watched.items():
        if tensor.grad is not None:
            if tensor.grad.layout is torch.strided and plan.scale != 1.0:
                tensor.grad.div_(plan.scale)
            grad = tensor.grad if tensor.grad.layout is torch.strided else tensor.grad.to_dense()
            found.keep("gradient", name, found.step, grad)


def _keep_state(
    found: Trajectory,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    begun: dict[str, torch.Tensor],
) -> None:
    """What the steps changed, as the difference; what they left alone is not kept."""
    for kind, tensors_ in (("update", parameters), ("buffer", buffers)):
        for name, tensor in tensors_.items():
            old = begun.get(name)
            if old is None or old.shape != tensor.shape or torch.equal(old, tensor):
                continue
            if tensor.is_complex():
                tensor, old = (torch.view_as_real(t.detach().resolve_conj()) for t in (tensor, old))
            width = torch.float64 if tensor.is_floating_point() else torch.int64
            found.keep(kind, name, found.step, tensor.detach().to(width) - old.to(width))
            found.size[kind, name, found.step] = float(torch.linalg.vector_norm(tensor.detach().double()))
            found.dtypes[kind, name, found.step] = tensor.dtype


def _optimizer(plan: Plan, parameters: list[Any]) -> Any:
    if not parameters or not plan.backward:
        return None
    if plan.optimizer is not None:
        return plan.optimizer(parameters)
    return torch.optim.SGD(parameters, lr=plan.rate) if plan.rate else None


def _leaves(plan: Plan, prepared: Prepared) -> dict[str, torch.Tensor]:
    """Make leaves of the inputs whose gradient is taken."""
    found: dict[str, torch.Tensor] = {}
    calls = []
    for number, call in enumerate(prepared.calls):
        chosen = {id(t): name for name, t in input_names(call, number).items() if name in plan.leaves}

        def leaf(tensor: torch.Tensor, chosen: dict[int, str] = chosen) -> torch.Tensor:
            if id(tensor) not in chosen:
                return tensor
            return found.setdefault(f"input {chosen[id(tensor)]}", tensor.requires_grad_())

        calls.append(Call(*map_tensors(leaf, (call.args, dict(call.kwargs)))))
    prepared.calls = tuple(calls)
    return found


def _path(name: str) -> str:
    """The path of a weight, whether or not a module on the way is compiled."""
    return name.replace("_orig_mod.", "")


def _has_values(tensor: Any) -> bool:
    return not isinstance(tensor, UninitializedParameter) and tensor.layout is torch.strided


def _streams(device: str) -> tuple[bytes, ...]:
    place = torch.device(device)
    states = [torch.get_rng_state()]
    if place.type != "cpu":
        states.append(getattr(torch, place.type).get_rng_state(place))
    return tuple(bytes(state.cpu().numpy()) for state in states)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def nudged(subject: Subject, amount: float, seed: int) -> Subject:
    """The subject on other data, so near that nobody would tell: weights and floating inputs times 1 +- `amount`.

    What is a whole number (a mask, a position) stays. In the subject's own dtypes, so that every arm gets the same.
    """
    prepared = prepare(subject)
    nudge(prepared, amount, seed)
    blocks = recompiled(subject, prepared) if is_compiled_already(subject) else prepared.blocks
    twin = copy.copy(subject)
    object.__setattr__(twin, "model", blocks if isinstance(subject.model, tuple) else blocks[0])
    object.__setattr__(twin, "calls", prepared.calls)
    return twin


def nudge(prepared: Prepared, amount: float, seed: int | None) -> None:
    """Move the weights and floating inputs of a prepared copy, with random signs; without a `seed` all alike."""
    generator = torch.Generator().manual_seed(seed or 0)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.ones(tensor.shape, dtype=torch.float64)
        if seed is not None:
            signs -= 2 * torch.randint(0, 2, tensor.shape, generator=generator)
        return (tensor.double() * (1 + amount * signs.to(tensor.device))).to(tensor.dtype)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.is_floating_point() and tensor.layout is torch.strided
        return tensor if not plain or bool((tensor == tensor.round()).all()) else move(tensor)

    with torch.no_grad():
        for parameter in prepared.root.parameters() if prepared.root is not None else ():
            if parameter.is_floating_point() and _has_values(parameter):
                parameter.copy_(move(parameter))
    prepared.calls = tuple(Call(*map_tensors(moved, (c.args, dict(c.kwargs)))) for c in prepared.calls)


def input_leaves(subject: Subject, *, every: bool) -> frozenset[str]:
    """The floating inputs that the user wants gradients of; `every`: all of them."""
    named = {n: t for number, c in enumerate(subject.calls) for n, t in input_names(c, number).items()}
    return frozenset(n for n, t in named.items() if every or t.requires_grad)
