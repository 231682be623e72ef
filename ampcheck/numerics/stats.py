"""The frozen record of one low-precision run beside its reference: what the range and precision checks look at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.formats import format_of
from ampcheck.health import TensorHealth
from ampcheck.numerics.decisions import Flip
from ampcheck.numerics.ops import OpFacts
from ampcheck.record import Coverage, Where


@dataclass(frozen=True, slots=True)
class TensorError:
    """How far one tensor lies from its reference.

    kind: `output`, `module` or `gradient`. error: the Euclidean norm of the difference over that of the reference.
    sensitivity: how far the reference moves, in the same measure, when its data are rounded to the format.
    share: for gradients, the norm of the difference over that of all gradients of the reference together.
    nonfinite: elements that are not finite here and finite in the reference.
    known: whether float32 knows this tensor to the digits of the format; where not, there is nothing to compare.
    """

    kind: str
    name: str
    dtype: str
    error: float
    sensitivity: float
    share: float
    nonfinite: int
    known: bool
    order: int = 0


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of the low-precision run that the wide runs did not raise."""

    where: Where
    message: str


@dataclass(frozen=True, slots=True)
class NumericsStats:
    """One arm of a subject (`float16 autocast, eager`) beside its reference.

    format: the narrowest format that the arm computes in. chain: the most roundings in a row between two weights;
    reduction: the length of the longest sum. scale: the loss scale in use. health: by (phase, module).
    reference_nonfinite: elements of the reference's outputs that are inf or NaN; reference_produced: the (module, op)
    that make such values there.
    zeroed_buffers: 16-bit buffers of the model with an element that is exactly zero.
    judged: whether there was a reference; without one a finding cannot be excused by its lack of consequences.
    """

    subject: str
    arm: str
    format: str
    device: str
    compiled: bool = False
    native: bool = False
    judged: bool = True
    reference: str = ""
    ops: tuple[OpFacts, ...] = ()
    errors: tuple[TensorError, ...] = ()
    flips: tuple[Flip, ...] = ()
    health: Mapping[tuple[str, str], TensorHealth] = field(default_factory=dict)
    reference_nonfinite: int = 0
    reference_produced: frozenset[tuple[str, str]] = frozenset()
    zeroed_buffers: tuple[str, ...] = ()
    raised: Raised | None = None
    losses: tuple[str, ...] = ()
    module_dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    declared_dtypes: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0
    chain: int = 1
    reduction: int = 1
    draws: bool = False
    no_backward: str = ""
    graphs: int = 0
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def unit_roundoff(self) -> float:
        """Of the arm's format."""
        return format_of(self.format).unit_roundoff

    @property
    def comparable(self) -> bool:
        """Whether the arm can be held against the reference tensor by tensor."""
        return self.judged and not (self.draws and self.compiled)

    def error_limit(self, error: TensorError, factor: float) -> float:
        """The largest relative error that rounding explains.

        Independent roundings add like a random walk (Higham and Mary, 2019), so `chain` of them in a row move a value
        by about sqrt(chain) unit roundoffs; what the data's own rounding does is measured (`sensitivity`); a sum of n
        terms, kept in float32 by every backend, adds sqrt(n) unit roundoffs of float32. `factor` is in standard
        deviations.
        """
        walk = factor * math.sqrt(self.chain) * (self.unit_roundoff + error.sensitivity)
        return walk + math.sqrt(self.reduction) * format_of("float32").unit_roundoff

    def beyond(self, error: TensorError, factor: float) -> bool:
        """Whether rounding does not explain this error, and, for a gradient, whether it moves the whole gradient."""
        if error.nonfinite:
            return True
        if not error.known or not error.error > self.error_limit(error, factor):
            return False
        return error.kind != "gradient" or error.share > factor * math.sqrt(self.chain) * self.unit_roundoff

    def flipped(self, factor: float) -> Flip | None:
        """The first decision that fell otherwise, if rounding explains how many did.

        Of values spread over their own magnitude a relative error e brings a part e to the other side of a threshold,
        so up to the error limit of the run's tensors (and one element) is honest. What a defect decides otherwise is
        more.
        """
        if not self.flips:
            return None
        first = self.flips[0]
        moved = max((min(e.sensitivity, 1.0) for e in self.errors if e.known and e.kind != "gradient"), default=0.0)
        honest = factor * math.sqrt(self.chain) * (self.unit_roundoff + moved)
        return first if first.changed <= max(1.0, honest * first.numel) else None

    def harm(self, factor: float) -> tuple[TensorError, ...]:
        """The outputs and gradients that rounding does not explain, be it directly or by a decision that it turned."""
        found = tuple(e for e in self.errors if e.kind != "module" and self.beyond(e, factor))
        return tuple(e for e in found if e.nonfinite) if self.flipped(factor) else found
