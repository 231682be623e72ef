"""One step of a subject in one mode and precision, as a callable to be timed; the user's model is copied first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from ampcheck.compiled.options import MODES
from ampcheck.core.arguments import parse_choice
from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Kind, Subject
from ampcheck.numerics.losses import total_loss
from ampcheck.speed.paired import Step
from ampcheck.torchtools.batches import played
from ampcheck.torchtools.copying import Prepared, forward_through, is_compiled_already, prepare, recompiled
from ampcheck.torchtools.global_state import setting

Optimizer: TypeAlias = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

EAGER = "eager"
PRECISIONS: Mapping[str, torch.dtype | None] = {
    "float32": None,
    "tf32": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The dtype of autocast; `float32` is the model without autocast, `tf32` the same with TF32 in matmul and cuDNN."""

_BATCHES = 8
"""Of a training loop with data: so many are played in turn."""


@dataclass(frozen=True, slots=True)
class StepConfig:
    """Configuration of a step.

    mode: `eager` or a mode of torch.compile. precision: one of `PRECISIONS`. regional: compile each repeated block
    instead of the whole model. dynamic: as of torch.compile.
    """

    mode: str = EAGER
    precision: str = "float32"
    regional: bool = False
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        parse_choice(self.mode, "mode", (EAGER, *MODES))
        parse_choice(self.precision, "precision", PRECISIONS)

    def __str__(self) -> str:
        parts = [self.mode, self.precision]
        parts += ["regional"] if self.regional else []
        parts += [] if self.dynamic is None else [f"dynamic={self.dynamic}"]
        return ", ".join(parts)


def step_of(
    subject: Subject,
    config: StepConfig | None = None,
    *,
    device: str = "cpu",
    backward: bool | None = None,
    optimizer: Optimizer | None = None,
    scaler: bool = False,
) -> Step:
    """A callable that runs the subject once: forward, backward from its loss, and an update where it has an optimizer.

    config: None runs the subject unmodified, compiled where it is compiled. backward: by default where a module is in
    training mode and something requires a gradient; without it everything runs under `torch.no_grad()`. optimizer:
    makes one from the parameters of the step's own copy, which it updates after each backward pass. scaler: whether a
    `torch.amp.GradScaler` scales the loss, in any precision. A training loop or a callable takes none of these.

    Raises `UsageError` for a configuration that the subject, the device or this PyTorch does not allow.
    """
    if scaler and optimizer is None:
        raise UsageError("a GradScaler scales the loss for an optimizer: pass one, or leave scaler out")
    if subject.kind in (Kind.TRAINING, Kind.CALL):
        return _own_step(subject, config or StepConfig(), optimizer)
    prepared = prepare(subject, device=device)
    trains = _trains(subject, prepared, backward, optimized=optimizer is not None)
    kind = torch.device(device).type
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # under the TF32 settings of the user
    if config is None:
        config = StepConfig()
        blocks = recompiled(subject, prepared) if is_compiled_already(subject) else prepared.blocks
    else:
        blocks, around = _blocks(prepared, config), tf32(config.precision, kind)
    dtype = PRECISIONS[config.precision]
    replays = kind == "cuda" and config.mode in ("reduce-overhead", "max-autotune")
    update = _update(prepared, optimizer, scaler, kind) if trains else None

    def step() -> None:
        if replays:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        autocast = nullcontext() if dtype is None else torch.autocast(kind, dtype)
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


def _trains(subject: Subject, prepared: Prepared, backward: bool | None, *, optimized: bool) -> bool:
    """Return whether a step runs backward; see `step_of`."""
    trains = (learns(prepared) or optimized) if backward is None else backward
    if optimized and not trains:
        raise UsageError(f"without a backward pass the optimizer of {subject.name} has no gradients: leave it out")
    if trains and not learns(prepared, training=False):
        raise UsageError(f"nothing in {subject.name} requires a gradient: leave backward out")
    return trains


def require_configurable(subject: Subject, config: StepConfig) -> None:
    """Raise `UsageError` for a subject that runs by itself and a configuration that is not the plain one."""
    if subject.kind in (Kind.TRAINING, Kind.CALL) and config != StepConfig():
        raise UsageError(
            f"{subject.name} runs by itself, so {config} cannot be chosen for it: pass a module and its args, or "
            "compare two revisions of it (ampcheck speed --base)"
        )


def learns(prepared: Prepared, *, training: bool = True) -> bool:
    """Return whether anything requires a gradient, in a module that is in training mode; `training=False`: in any."""
    root = prepared.root
    if root is None or not any(parameter.requires_grad for parameter in root.parameters()):
        return False
    return not training or root.training or any(module.training for module in root.children())


def repeated(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that regional compilation compiles once for all: the largest group of two or more modules of one class
    in a list or sequence of modules."""
    groups: list[list[torch.nn.Module]] = []
    for container in module.modules():
        if isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential)):
            by_class: dict[type, list[torch.nn.Module]] = {}
            for child in container:
                by_class.setdefault(type(child), []).append(child)
            groups += [group for group in by_class.values() if len(group) > 1]
    return max(groups, key=lambda group: sum(p.numel() for m in group for p in m.parameters()), default=[])


def _own_step(subject: Subject, config: StepConfig, optimizer: Optimizer | None) -> Step:
    if optimizer is not None:
        raise UsageError(f"{subject.name} runs by itself and has its own optimizer, if any: leave it out")
    require_configurable(subject, config)
    if subject.kind is Kind.CALL:
        call: Step = subject.model
        return call
    number, loop = 0, played(subject, _BATCHES)

    def step() -> None:
        nonlocal number
        loop.model["step"](number)
        number += 1

    return step


def _blocks(prepared: Prepared, config: StepConfig) -> tuple[Callable[..., Any], ...]:
    if config.mode == EAGER:
        return prepared.blocks
    if config.regional:
        if prepared.root is None or not (regions := repeated(prepared.root)):
            raise UsageError("regional compilation needs a module with a list of two or more blocks of one class")
        for region in regions:
            region.compile(mode=config.mode, dynamic=config.dynamic)
        return prepared.blocks
    return tuple(torch.compile(block, mode=config.mode, dynamic=config.dynamic) for block in prepared.blocks)


def _update(prepared: Prepared, optimizer: Optimizer | None, scaler: bool, kind: str) -> Callable[[torch.Tensor], None]:
    """Backward, the update of an optimizer, and gradients reset to None."""
    parameters = list(prepared.root.parameters()) if prepared.root is not None else []
    stepped = optimizer([parameter for parameter in parameters if parameter.requires_grad]) if optimizer else None
    scales = torch.amp.GradScaler(kind, enabled=scaler)

    def update(loss: torch.Tensor) -> None:
        scales.scale(loss).backward()  # type: ignore[no-untyped-call]
        if stepped is not None:
            scales.step(stepped)
            scales.update()
        for parameter in parameters:
            parameter.grad = None

    return update


def tf32(precision: str, kind: str) -> Callable[[], AbstractContextManager[None]]:
    """A context in which TF32 is on, for `tf32`, or off, for `float32`; for other precisions one that does nothing.

    kind: of the device. Raises `UsageError` for TF32 on another device than CUDA.
    """
    if kind != "cuda":
        if precision == "tf32":
            raise UsageError(f"TF32 is a mode of NVIDIA's tensor cores, and the device is {kind}: leave tf32 out")
        return nullcontext
    return partial(_switched, precision == "tf32") if precision in ("float32", "tf32") else nullcontext


@contextmanager
def _switched(on: bool) -> Iterator[None]:
    """TF32 on or off, through the interface of PyTorch that the program uses; then all flags are restored.

    A program that has set `fp32_precision` (2.9) can no longer read the older flags, and one that has set those must be
    able to read them inside: Inductor reads `torch.get_float32_matmul_precision()` while it compiles.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    older = [setting(cudnn, "allow_tf32"), (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)]
    owners = ((torch.backends.mkldnn, "matmul"), (cudnn, "conv"), (cudnn, "rnn"))
    parts = [matmul, *(getattr(owner, name, None) for owner, name in owners)]
    newer = [setting(part, "fp32_precision") for part in parts if hasattr(part, "fp32_precision")]
    # In the order of restoring: the older interface leaves `none` at `ieee`.
    before = [(write, _read(read)) for read, write in (*older, *newer)]
    convolution, product = before[0][1], before[1][1]
    if product is None:
        matmul.fp32_precision = "tf32" if on else "ieee"
    else:
        torch.set_float32_matmul_precision("high" if on else "highest")
    if convolution is not None:
        cudnn.allow_tf32 = on  # off becomes `none`, which the older interface can still read
    for read, write in newer[2:]:
        if (read() == "tf32") is not on:
            write("tf32" if on else "ieee")
    try:
        yield
    finally:
        for write, value in before:
            if value is not None:
                write(value)


def _read(flag: Callable[[], object]) -> object:
    """A flag; None where PyTorch refuses to read an older one, since the program has set its successor."""
    try:
        return flag()
    except RuntimeError:
        return None
