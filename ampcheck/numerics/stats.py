"""The frozen record of one low-precision run beside its reference: what the range and precision checks look at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Where
from ampcheck.health import TensorHealth
from ampcheck.numerics.decisions import Flip
from ampcheck.numerics.facts import OpFacts
from ampcheck.telemetry.stats import TelemetryStats

LOST = 0.25
"""Relative error of an output from which less than two bits agree: whatever explains it, the value is lost."""


@dataclass(frozen=True, slots=True)
class TensorError:
    """How far one tensor lies from its reference.

    kind: `output`, `module` or `gradient`. error: the Euclidean norm of the difference over that of the reference.
    sensitivity: how far the reference moves, in the same measure, when its data are rounded to the format.
    share: for gradients, the norm of the difference over that of all gradients of the reference together.
    nonfinite: elements that are not finite here and finite in the reference, or NaN here and infinite there.
    misplaced: infinities of the reference in whose place stands a number, or an infinity of the other sign.
    compared: elements that are finite on both sides. float32: how far the reference moves when its data are rounded to
    float32, which tells what can be known of this tensor at all; in_float32: the error of the model's float32 run.
    excused: the error that eager mode has by decisions that fell otherwise, which compiled code may have as well.
    """

    kind: str
    name: str
    dtype: str
    error: float
    sensitivity: float
    share: float
    nonfinite: int
    compared: int = 1
    misplaced: int = 0
    float32: float = 0.0
    excused: float = 0.0
    order: int = 0
    in_float32: float = 0.0


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of the low-precision run that the wide runs did not raise; missing: for want of a tool."""

    where: Where
    message: str
    missing: bool = False


@dataclass(frozen=True, slots=True)
class NumericsStats:
    """One arm of a subject (`float16, eager`) beside its reference.

    format: the narrowest format that the arm computes in. chain: the most roundings in a row between two weights;
    reduction: the length of the longest sum. scale: the loss scale in use. health: by (phase, module).
    reference_nonfinite: elements of the reference's outputs that are inf or NaN; reference_produced: where such
    values are made there.
    zeroed_buffers: 16-bit buffers of the model with an element that is exactly zero.
    flips: the decisions that fell otherwise; followed: whether the reference took them as well before it was compared.
    no_backward: why there are no gradients; prevented: it is the subject that keeps backward from its weights;
    cut: parameters of modules that ran while gradients were off.
    loss_nonfinite: the user's loss is inf or NaN here, and finite in the reference.
    unrepeated: how far two runs of the reference with equal seeds lie apart; looked at where a verdict rests on it.
    low: results of 16 bits; casts: between integers and floats. left: switches that forward, loss or backward left
    changed, with their values before and after.
    graphs: how many were compiled; unsupported: why Dynamo took none, in its own words; inside: what was seen in them.
    keeps_nan: whether a result with a NaN was in use at the end. judged: whether there was a reference; without one a
    finding cannot be excused by its lack of consequences.
    """

    subject: str
    arm: str
    format: str
    device: str
    compiled: bool = False
    native: bool = False
    judged: bool = True
    keeps_nan: bool = False
    reference: str = ""
    ops: tuple[OpFacts, ...] = ()
    errors: tuple[TensorError, ...] = ()
    flips: tuple[Flip, ...] = ()
    followed: bool = False
    health: Mapping[tuple[str, str], TensorHealth] = field(default_factory=dict)
    reference_nonfinite: int = 0
    reference_produced: frozenset[Where] = frozenset()
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
    prevented: bool = False
    cut: tuple[str, ...] = ()
    graphs: int = 0
    unsupported: str = ""
    inside: TelemetryStats | None = None
    loss_nonfinite: bool = False
    unrepeated: float = 0.0
    low: int = 0
    casts: int = 0
    left: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def unit_roundoff(self) -> float:
        """Of the arm's format."""
        return format_of(self.format).unit_roundoff

    @property
    def comparable(self) -> bool:
        """Whether the arm can be held against the reference tensor by tensor."""
        return self.judged and not (self.draws and self.compiled)

    @property
    def uncompared(self) -> bool:
        """Whether there are outputs, and none has an element that is finite here and in the reference."""
        outputs = [error for error in self.errors if error.kind == "output"]
        return bool(outputs) and not any(error.compared for error in outputs)

    def traced(self, where: Where, factor: float) -> bool:
        """Whether a loss at `where` has left a trace: a tensor that rounding does not explain, however small its share.

        Of backward the gradients of the module there count, those of the whole model where it has no parameters.
        """
        if where.phase == "backward":
            judged = [e for e in self.errors if e.kind == "gradient"]
            judged = [e for e in judged if _is_inside(gradient_module(e.name), where.module)] or judged
        else:
            judged = list(self.errors)
        judged = [e for e in judged if self.known(e) and not self.shared(e)]
        return any(e.nonfinite or e.error > self.error_limit(e, factor) for e in judged)

    def shared(self, error: TensorError) -> bool:
        """Whether float32 is about as far off, or keeps nothing of it either: low precision is not at fault."""
        if error.nonfinite or error.misplaced:
            return False
        return error.in_float32 > LOST or 0.0 < error.error <= 2 * error.in_float32

    def known(self, error: TensorError) -> bool:
        """Whether float32 knows the tensor to the digits of the format; the gradient of a bias that softmax or a norm
        takes out again is zero but for rounding in every precision, and there is nothing to compare."""
        return error.compared > 0 and (error.kind != "gradient" or error.float32 <= self.unit_roundoff)

    def error_limit(self, error: TensorError, factor: float) -> float:
        """The largest relative error that rounding explains.

        Independent roundings add like a random walk (Higham and Mary, 2019), so `chain` of them in a row move a value
        by about sqrt(chain) unit roundoffs; what the data's own rounding does is measured (`sensitivity`); what even
        float32 does not know (`float32`) is not asked for; a sum of n terms, kept in float32 by every backend, adds
        sqrt(n) unit roundoffs of float32. `factor` is in standard deviations.
        """
        walk = factor * math.sqrt(self.chain) * (self.unit_roundoff + error.sensitivity)
        doubt = error.float32 if error.kind != "gradient" else 0.0
        return walk + factor * (doubt + error.excused) + math.sqrt(self.reduction) * format_of("float32").unit_roundoff

    def beyond(self, error: TensorError, factor: float) -> bool:
        """Whether rounding does not explain this error, and, for a gradient, whether it moves the whole gradient."""
        if error.nonfinite or error.misplaced:
            return True
        if not self.known(error):
            return False
        if error.kind == "output" and error.error > LOST and not max(error.float32, error.excused) > LOST / 2:
            return True
        if not error.error > self.error_limit(error, factor):
            return False
        return error.kind != "gradient" or error.share > factor * math.sqrt(self.chain) * self.unit_roundoff

    def honest(self, flip: Flip, factor: float) -> bool:
        """Whether rounding explains a decision that fell otherwise.

        It does when the values that were decided upon lie within their own limit, and depend on data that were rounded
        at all: what follows from positions or constants alone has no excuse. A ranking may turn where there are near
        ties, which are not the greater part; of values held against a threshold or an integer a relative error e turns
        about a part e (or one). What float32 itself would turn is always honest.
        """
        if flip.error <= factor * flip.float32:
            return True
        limit = factor * math.sqrt(self.chain) * (self.unit_roundoff + flip.sensitivity)
        few = flip.changed <= max(1.0, (0.5 if flip.ranks else limit) * flip.numel)
        return flip.sensitivity > 0 and flip.error <= limit and few

    def flipped(self, factor: float) -> Flip | None:
        """The first decision that fell otherwise, if rounding explains it and the reference could not follow it."""
        return self.flips[0] if self.flips and not self.followed and self.honest(self.flips[0], factor) else None

    def inexact_outputs(self, factor: float) -> bool:
        """Whether an output lies further off than its own roundings explain, the sensitivity to its data apart."""
        bare = (replace(e, sensitivity=0.0) for e in self.errors if e.kind == "output")
        return any(e.error > self.error_limit(e, factor) for e in bare)

    def coarse_kernel(self, error: TensorError, factor: float) -> OpFacts | None:
        """The CPU kernel that explains the excess of a gradient by summing in 16 bits, as no GPU kernel does.

        Such a sum of n terms is off by up to about sqrt(n) unit roundoffs; a kernel that is further off is wrong.
        """
        if error.kind != "gradient" or self.device != "cpu" or error.nonfinite:
            return None
        for op in self.ops:
            explains = min(factor * math.sqrt(op.terms) * self.unit_roundoff, LOST)
            coarse = 2 * self.unit_roundoff < op.error <= explains
            here = op.where.phase == "backward" and op.where.module == gradient_module(error.name)
            if here and coarse and error.error <= self.error_limit(error, factor) + factor * op.error:
                return op
        return None

    def harm(self, factor: float) -> tuple[TensorError, ...]:
        """The outputs and gradients that rounding does not explain, be it directly or by a decision that it turned."""
        found = tuple(e for e in self.errors if e.kind != "module" and self.beyond(e, factor))
        found = tuple(e for e in found if not self.shared(e) and self.coarse_kernel(e, factor) is None)
        return tuple(e for e in found if e.nonfinite) if self.flipped(factor) else found


def _is_inside(module: str, whole: str) -> bool:
    return module == whole or not whole or module.startswith(f"{whole}.")


def gradient_module(name: str) -> str:
    """The module of a parameter; inputs belong to the root."""
    return "" if name.startswith("input.") else name.rpartition(".")[0]
