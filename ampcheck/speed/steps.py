"""One step of a subject in one mode and precision, as a callable to be timed; the user's model is never touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ampcheck.compiled.options import MODES
from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Kind, Subject
from ampcheck.numerics.arms import total_loss
from ampcheck.speed.paired import Step
from ampcheck.speed.tf32 import tf32
from ampcheck.torchtools.copying import Prepared, forward_through, is_compiled_already, prepare, recompiled

Optimizer: TypeAlias = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

EAGER = "eager"
PRECISIONS: Mapping[str, torch.dtype | None] = {
    "float32": None,
    "tf32": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""What autocast casts to; `float32` is the model as it is, `tf32` the same with TF32 in matmul and cuDNN."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a subject.

    mode: `eager` or a mode of torch.compile. precision: one of `PRECISIONS`. regional: compile each repeated block and
    not the whole. dynamic: as torch.compile takes it. inside: autocast is entered inside the compiled function.
    """

    mode: str = EAGER
    precision: str = "float32"
    regional: bool = False
    dynamic: bool | None = None
    inside: bool = False

    def __post_init__(self) -> None:
        if self.mode not in (EAGER, *MODES):
            raise UsageError(f"there is no mode {self.mode!r}; there are {', '.join((EAGER, *MODES))}")
        if self.precision not in PRECISIONS:
            raise UsageError(f"there is no precision {self.precision!r}; there are {', '.join(PRECISIONS)}")

    def __str__(self) -> str:
        parts = [self.mode, self.precision]
        parts += ["regional"] if self.regional else []
        parts += [] if self.dynamic is None else [f"dynamic={self.dynamic}"]
        parts += ["autocast inside"] if self.inside else []
        return ", ".join(parts)


def step_of(
    subject: Subject,
    way: Way | None = None,
    *,
    device: str = "cpu",
    backward: bool | None = None,
    optimizer: Optimizer | None = None,
    scaler: bool = False,
) -> Step:
    """A callable that runs the subject once: forward, backward from its loss, and an update where it has an optimizer.

    way: how; None runs the subject as it is, compiled where it is compiled. backward: by default where a module is in
    training mode and something requires a gradient; without it everything runs under `torch.no_grad()`. optimizer:
    makes one from the parameters of the step's own copy, which it updates after each backward pass. scaler: whether a
    `torch.amp.GradScaler` scales the loss, in any precision. A training loop is stepped, and a callable called, as it
    is; both take none of these.

    Raises `UsageError` for a way that the subject, the device or this PyTorch does not allow.
    """
    if scaler and optimizer is None:
        raise UsageError("a GradScaler scales the loss for an optimizer: give one, or leave scaler out")
    if subject.kind in (Kind.TRAINING, Kind.CALL):
        if optimizer is not None:
            raise UsageError(f"{subject.name} runs by itself and has its own optimizer, if any: leave it out")
        if way is not None and way != Way():
            raise UsageError(
                f"{subject.name} runs by itself, so {way} cannot be chosen for it: give a module and its args, or "
                "compare two revisions of it (ampcheck speed --base)"
            )
        return _own(subject)
    prepared = prepare(subject, device=device)
    trains = (learns(prepared) or optimizer is not None) if backward is None else backward
    if optimizer is not None and not trains:
        raise UsageError(f"without a backward pass the optimizer of {subject.name} has no gradients: leave it out")
    if trains and not learns(prepared, training=False):
        raise UsageError(f"nothing in {subject.name} requires a gradient: leave backward out")
    own = way is None
    if way is None:
        way, blocks = Way(), recompiled(subject, prepared) if is_compiled_already(subject) else prepared.blocks
    else:
        blocks = _blocks(prepared, way, device)
    kind = torch.device(device).type
    dtype = PRECISIONS[way.precision]
    marks = kind == "cuda" and way.mode in ("reduce-overhead", "max-autotune")
    around = nullcontext if own else tf32(way.precision, kind)  # as it is: under the settings that the user made
    update = _update(prepared, optimizer, scaler, kind) if trains else None

    def step() -> None:
        if marks:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        autocast = torch.autocast(kind, dtype) if dtype is not None and not way.inside else nullcontext()
        for call in prepared.calls:
            with around(), torch.set_grad_enabled(trains):
                with autocast:
                    result = forward_through(blocks, call)
                    loss = total_loss(result, subject.loss, False) if trains else None
                if update is not None:
                    if loss is None:
                        raise UsageError(f"no output of {subject.name} has a gradient: leave backward out")
                    update(loss)

    return step


def learns(prepared: Prepared, *, training: bool = True) -> bool:
    """Whether anything requires a gradient, in a module that is in training mode; `training=False`: in any."""
    if prepared.root is None:
        return False
    asked = any(parameter.requires_grad for parameter in prepared.root.parameters())
    return asked and (not training or prepared.root.training or any(m.training for m in prepared.root.children()))


def repeated(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks of a model that regional compilation compiles once for all: the largest family of one class that a
    list or sequence of modules holds, at least two."""
    families: list[list[torch.nn.Module]] = []
    for holder in module.modules():
        if isinstance(holder, (torch.nn.ModuleList, torch.nn.Sequential)):
            by_class: dict[type, list[torch.nn.Module]] = {}
            for child in holder:
                by_class.setdefault(type(child), []).append(child)
            families += [family for family in by_class.values() if len(family) > 1]
    return max(families, key=lambda family: sum(p.numel() for m in family for p in m.parameters()), default=[])


def _own(subject: Subject) -> Step:
    if subject.kind is Kind.CALL:
        call: Step = subject.model
        return call
    number = 0

    def step() -> None:
        nonlocal number
        subject.model["step"](number)
        number += 1

    return step


def _blocks(prepared: Prepared, way: Way, device: str) -> tuple[Callable[..., Any], ...]:
    kind, dtype = torch.device(device).type, PRECISIONS[way.precision] if way.inside else None
    if way.mode == EAGER:
        return prepared.blocks if dtype is None else tuple(_autocast_inside(b, kind, dtype) for b in prepared.blocks)
    if way.regional:
        if way.inside:
            raise UsageError(
                "autocast is entered inside the whole compiled function, and regions have none: choose one"
            )
        if prepared.root is None or not (found := repeated(prepared.root)):
            raise UsageError("regional compilation needs a module with a list of two or more blocks of one class")
        for block in found:
            block.compile(mode=way.mode, dynamic=way.dynamic)
        return prepared.blocks
    if dtype is None:
        return tuple(torch.compile(block, mode=way.mode, dynamic=way.dynamic) for block in prepared.blocks)
    inside = (_autocast_inside(block, kind, dtype) for block in prepared.blocks)
    return tuple(torch.compile(block, mode=way.mode, dynamic=way.dynamic) for block in inside)


def _autocast_inside(block: Callable[..., Any], kind: str, dtype: torch.dtype) -> Callable[..., Any]:
    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype):
            return block(*args, **kwargs)

    return cast


def _update(prepared: Prepared, optimizer: Optimizer | None, scaler: bool, kind: str) -> Callable[[torch.Tensor], None]:
    """What follows the loss: backward, the update if there is an optimizer, and the gradients dropped."""
    if optimizer is None:

        def differentiate(loss: torch.Tensor) -> None:
            loss.backward()  # type: ignore[no-untyped-call]
            _drop_gradients(prepared)

        return differentiate
    parameters = prepared.root.parameters() if prepared.root is not None else ()
    updates = optimizer([parameter for parameter in parameters if parameter.requires_grad])
    scales = torch.amp.GradScaler(kind, enabled=scaler)

    def train(loss: torch.Tensor) -> None:
        scales.scale(loss).backward()  # type: ignore[no-untyped-call]
        scales.step(updates)
        scales.update()
        updates.zero_grad()

    return train


def _drop_gradients(prepared: Prepared) -> None:
    if prepared.root is not None:
        for parameter in prepared.root.parameters():
            parameter.grad = None
