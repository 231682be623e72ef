"""What of a subject's data, and of its reference, is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ampcheck.core.subject import Subject
from ampcheck.numerics.arm_format import on_device
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.reference import Reference
from ampcheck.numerics.stats import Raised
from ampcheck.torchtools.copying import modules_of
from ampcheck.torchtools.pytree import is_plain, tensors


@dataclass(frozen=True, slots=True)
class Values:
    """How many elements of one tensor are NaN or infinite. kind: input, parameter, buffer, output or gradient."""

    kind: str
    name: str
    numel: int
    nan: int
    infinite: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name or '(the only one)'}"


@dataclass(frozen=True, slots=True)
class ReferenceStats:
    """Where the reference is not finite.

    how: the precision of the reference; device: what follows it in the name of the arm where a device is emulated.
    handed_in: inputs, weights and buffers with a NaN, and weights with an infinity. made: the ops that made NaN or
    infinities, in order. outputs, gradients, losses: those of the reference, losses of the user's own. masked: the
    default loss leaves out infinite outputs. raised: see `Reference`.
    """

    subject: str
    how: str
    device: str = ""
    handed_in: tuple[Values, ...] = ()
    made: tuple[OpFacts, ...] = ()
    outputs: tuple[Values, ...] = ()
    gradients: tuple[Values, ...] = ()
    masked: bool = False
    losses: tuple[Values, ...] = ()
    raised: Raised | None = None

    @property
    def arm(self) -> str:
        """The subject and the precision of its reference, as findings name them."""
        return f"{self.subject} [{self.how}{self.device}]"


def measure_nonfinite(subject: Subject, reference: Reference) -> ReferenceStats:
    """What of the subject's data and of its reference is not finite."""
    outcome = reference.wide.outcome
    return ReferenceStats(
        subject.name,
        reference.how.partition(",")[0],  # without how operands are promoted
        on_device(),
        tuple(_handed_in(subject)),
        reference.wide.nonfinite,
        tuple(_values("output", name, tensor) for name, tensor in outcome.outputs.items()),
        tuple(_values("gradient", name, tensor) for name, tensor in outcome.gradients.items()),
        reference.finite_loss and subject.loss is None,
        tuple(_values("loss", "", tensor) for tensor in outcome.totals),
        reference.raised,
    )


def _handed_in(subject: Subject) -> Iterator[Values]:
    """Inputs, weights and buffers with a NaN, and weights with an infinity: a buffer of -inf is a mask."""
    for number, call in enumerate(subject.calls):
        prefix = f"{number}." if len(subject.calls) > 1 else ""
        for path, tensor in tensors({"args": call.args, "kwargs": dict(call.kwargs)}):
            yield from _bad(_values("input", prefix + path, tensor), infinite=False)
    modules = modules_of(subject.model)
    for number, module in enumerate(modules):
        prefix = f"{number}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            yield from _bad(_values("parameter", prefix + name, parameter), infinite=True)
        for name, buffer in module.named_buffers():
            yield from _bad(_values("buffer", prefix + name, buffer), infinite=False)


def _bad(values: Values, *, infinite: bool) -> Iterator[Values]:
    if values.nan or (infinite and values.infinite):
        yield values


def _values(kind: str, name: str, tensor: torch.Tensor) -> Values:
    if not is_plain(tensor) or not (tensor.is_floating_point() or tensor.is_complex()) or _uninitialized(tensor):
        return Values(kind, name, 0, 0, 0)
    plain = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()  # float8 has no isnan
    return Values(kind, name, plain.numel(), int(plain.isnan().sum()), int(plain.isinf().sum()))


def _uninitialized(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer))
