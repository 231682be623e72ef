"""One run of a subject: some calls of forward, loss, backward and update, with everything kept that is judged."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.compiled.accuracy.decided import DecisionWatch
from ampcheck.compiled.options import Optimizer
from ampcheck.core.errors import as_result
from ampcheck.core.subject import Call
from ampcheck.numerics.run import total_loss
from ampcheck.shadow import Reference, Shadow
from ampcheck.shadow.companions import MOVE, has_companions, roundoff
from ampcheck.shadow.compare import Key, Result
from ampcheck.torchtools.copying import Prepared, forward_through
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.seeds import seeded

KEPT_BYTES = 2 << 30
"""How much of its results one run keeps; beyond it the rest is counted as unseen."""

_COUNTS = 2.0**16
"""Whole numbers from here on are no masks, positions or indices."""

Blocks = Callable[[Prepared], Sequence[Any]]
"""Gives the blocks of a copy as they are to run: compiled."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How every run of a subject goes.

    autocast: what autocast casts to in forward and loss; None switches it off. steps: how often all calls are made,
    each with an update. optimizer: makes one from the parameters; rate: of the plain gradient descent that replaces it,
    0 for no update. scale: of the loss; gradients are kept with it. finite_loss: leave out of the default loss what is
    not finite. leaves: the inputs whose gradient is taken, by name. backward: whether anything is differentiated.
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
class Outcome:
    """What one run gave.

    values: copies; an update is a weight after all calls less the same before. results: the same with their companions,
    of a shadowed run. shapes: dtype and shape of every tensor that a call gave, by its path. dropped: what was not
    kept, and why. begun, streams: where all random streams are at the start and at the end. error, phase, step: the
    exception that ended it.
    """

    values: dict[Key, torch.Tensor] = field(default_factory=dict)
    results: dict[Key, Result] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    dropped: dict[Key, str] = field(default_factory=dict)
    begun: tuple[object, ...] = ()
    streams: tuple[object, ...] = ()
    error: BaseException | None = None
    phase: str = "forward"
    step: int = 0
    kept: int = 0

    @property
    def random(self) -> bool:
        """Whether it drew random numbers."""
        return self.streams != self.begun

    def keep(self, key: Key, tensor: torch.Tensor, watch: DecisionWatch | None) -> None:
        """Keep a copy of a tensor, and of its companions, unless this run has kept too much already."""
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            self.dropped[key] = f"{key[0]}s of another layout than strided"
        elif tensor.is_floating_point() and tensor.dtype.itemsize < 2:
            self.dropped[key] = f"{key[0]}s in 8 bits or fewer"
        elif tensor.numel():
            with _disable_current_modes():
                self._add(key, _result(watch, tensor), watch)

    def keep_change(self, key: Key, tensor: torch.Tensor, before: Result, watch: DecisionWatch | None) -> None:
        """Keep by how much a weight or buffer has changed, if it has."""
        old, width = before.value, torch.float64 if has_companions(before.value) else torch.int64
        if watch is None and torch.equal(old, tensor):
            return
        if not has_companions(old):
            self._add(key, Result(tensor.to(width) - old.to(width), None), watch)
            return
        width = torch.complex128 if old.is_complex() else width
        terms = watch.terms if watch is not None else 1
        value, reference = tensor.to(width) - old.to(width), None
        if watch is not None and before.reference is not None:
            after = watch.result(tensor)
            assert after.reference is not None
            reference = _change(after.reference, before.reference, roundoff(old.dtype) * (self.step + 1) ** 0.5)
            if not bool(value.any()) and not bool(reference.exact.any()):
                return
        self._add(key, Result(value, reference, terms), watch)

    def _add(self, key: Key, result: Result, watch: DecisionWatch | None) -> None:
        self.kept += result.nbytes
        if self.kept > KEPT_BYTES:
            self.dropped[key] = f"{key[0]}s beyond the memory that one run keeps"
            return
        self.values[key] = result.value
        if watch is not None:
            self.results[key] = result


def _result(watch: DecisionWatch | None, tensor: torch.Tensor) -> Result:
    if watch is not None:
        return watch.result(tensor)
    with _disable_current_modes():
        return Result(tensor.detach().clone(), None)


def _change(after: Reference, before: Reference, stored: float) -> Reference:
    """The companions of a change. stored: the relative rounding that storing what is changed costs by itself."""
    exact = after.exact - before.exact
    apart = (after.moved - after.exact) - (before.moved - before.exact)
    apart = apart + stored * MOVE / after.unit * after.exact.abs() * torch.where(apart.real < 0, -1.0, 1.0)
    return replace(after, exact=exact, moved=exact + apart)


def run_plan(
    plan: Plan,
    prepared: Prepared,
    *,
    compiled: Blocks | None = None,
    watch: DecisionWatch | None = None,
    around: Iterable[AbstractContextManager[Any]] = (),
) -> Outcome:
    """Run all steps of a plan on a prepared copy, which they change.

    compiled: gives the blocks as they are to run. watch: of the run, entered with its shadow before `around`, which is
    entered in order for all of it. An exception of the model is kept in `error`.
    """
    outcome = Outcome()
    leaves = _leaves(plan, prepared)
    root = prepared.root
    parameters = {_path(n): p for n, p in root.named_parameters() if p.requires_grad} if root is not None else {}
    buffers = {_path(n): b for n, b in root.named_buffers()} if root is not None else {}
    watched = {**parameters, **leaves} if plan.backward else {}
    with seeded(plan.device), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # the user's own run shows them once; as errors they would pose as the model's
        outcome.begun = _streams(plan.device)
        for context in (watch.shadow, watch, *around) if watch is not None else around:
            stack.enter_context(context)
        if watch is not None and plan.autocast is None:
            _move_counts(watch.shadow, prepared)
        before = {
            (kind, name): _result(watch, t)
            for kind, group in (("update", parameters), ("buffer", buffers))
            for name, t in group.items()
            if _has_values(t)
        }
        try:
            optimizer = _optimizer(plan, [p for p in parameters.values() if _has_values(p)])
            blocks = prepared.blocks if compiled is None else compiled(prepared)
            for outcome.step, call in enumerate(prepared.calls * plan.steps):
                _run_call(plan, outcome, blocks, call, watched, watch)
                if optimizer is not None:
                    outcome.phase = "update"
                    optimizer.step()
                for tensor in watched.values():
                    tensor.grad = None
            for (kind, name), old in before.items():
                tensor = (parameters if kind == "update" else buffers)[name]
                if tensor.shape == old.value.shape:
                    with _disable_current_modes(), torch.no_grad():
                        outcome.keep_change((kind, name, outcome.step), tensor.detach(), old, watch)
        except BaseException as error:  # noqa: BLE001  # the user's model: its exception is a result
            outcome.error = as_result(error)
        outcome.streams = _streams(plan.device)
    return outcome


def _run_call(
    plan: Plan,
    outcome: Outcome,
    blocks: Sequence[Callable[..., Any]],
    call: Call,
    watched: dict[str, torch.Tensor],
    watch: DecisionWatch | None,
) -> None:
    outcome.phase, step = "forward", outcome.step
    with (
        torch.enable_grad(),
        torch.autocast(torch.device(plan.device).type, plan.autocast, enabled=bool(plan.autocast)),
    ):
        with preserved_state():
            result = forward_through(blocks, call)
        outcome.shapes[f"step {step}"] = type(result).__name__
        for path, tensor in tensors(result):
            dtype = str(tensor.dtype).removeprefix("torch.")
            outcome.shapes[f"step {step}, {path or 'output'}"] = f"{dtype} {list(tensor.shape)}"
            outcome.keep(("output", path, step), tensor, watch)
        if not watched:
            return
        with preserved_state():
            total = total_loss(result, plan.loss, plan.finite_loss)
        if total is not None and plan.loss is not None:
            outcome.keep(("loss", "", step), total, watch)
    if total is None or not total.requires_grad:
        return
    outcome.phase = "backward"
    torch.autograd.backward(total, torch.full_like(total, plan.scale), inputs=list(watched.values()))
    for name, tensor in watched.items():
        gradient = tensor.grad
        if gradient is not None:
            gradient = gradient if gradient.layout is torch.strided else gradient.to_dense()
            outcome.keep(("gradient", name, step), gradient, watch)
            if plan.scale != 1.0 and gradient is tensor.grad:
                gradient.div_(plan.scale)


def _optimizer(plan: Plan, parameters: list[Any]) -> Any:
    if not parameters or not plan.backward:
        return None
    if plan.optimizer is not None:
        return plan.optimizer(parameters)
    return torch.optim.SGD(parameters, lr=plan.rate) if plan.rate else None


def _leaves(plan: Plan, prepared: Prepared) -> dict[str, torch.Tensor]:
    """Make leaves of the inputs whose gradient is taken."""
    leaves: dict[str, torch.Tensor] = {}
    calls = []
    for number, call in enumerate(prepared.calls):
        chosen = {id(t): name for name, t in input_names(call, number).items() if name in plan.leaves}

        def leaf(tensor: torch.Tensor, chosen: dict[int, str] = chosen) -> torch.Tensor:
            if id(tensor) not in chosen:
                return tensor
            return leaves.setdefault(f"input {chosen[id(tensor)]}", tensor.requires_grad_())

        calls.append(Call(*map_tensors(leaf, (call.args, dict(call.kwargs)))))
    prepared.calls = tuple(calls)
    return leaves


def _move_counts(shadow: Shadow, prepared: Prepared) -> None:
    """Let large whole numbers among the inputs be data as others are: float32 may not even hold their sums exactly."""
    for call in prepared.calls:
        for _, tensor in tensors((call.args, dict(call.kwargs))):
            if has_companions(tensor) and tensor.numel() and not tensor.is_complex():
                with _disable_current_modes():
                    plain = tensor.detach()
                    large = float(plain.abs().amax()) >= _COUNTS and bool((plain == plain.round()).all())
                    if large:
                        shadow.store.lift(plain, moves=True)


def _path(name: str) -> str:
    """The path of a weight, whether or not a module on the way is compiled."""
    return name.replace("_orig_mod.", "")


def _has_values(tensor: Any) -> bool:
    return not isinstance(tensor, UninitializedParameter) and tensor.layout is torch.strided


def _streams(device: str) -> tuple[object, ...]:
    place = torch.device(device)
    states = [torch.get_rng_state()]
    if place.type != "cpu":
        states.append(getattr(torch, place.type).get_rng_state(place))
    return random.getstate(), str(numpy.random.get_state()), *(bytes(state.cpu().numpy()) for state in states)


def input_names(call: Call, number: int) -> dict[str, torch.Tensor]:
    """The floating inputs of a call by a name that is the same in every copy of it."""
    named = tensors({"args": call.args, "kwargs": dict(call.kwargs)})
    return {f"{number}.{path}": tensor for path, tensor in named if tensor.is_floating_point()}
