"""The frozen record of a compiled run beside the shadowed eager one, and the line between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.compiled.accuracy.decided import Freedom
from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Where
from ampcheck.shadow.bounds import FLOOR, JUDGED_UNIT, SLACK
from ampcheck.shadow.compare import WHOLE, ResultError

EAGER, AOT_EAGER, EMULATED, INDUCTOR = "eager", "aot_eager", "inductor + emulate_precision_casts", "inductor"
STAGES = (EAGER, AOT_EAGER, EMULATED, INDUCTOR)
"""The stages of the compiler: none; Dynamo and AOTAutograd, with eager kernels; Inductor that rounds to 16 bits where
eager mode does; Inductor as torch.compile runs by default."""

EMULATE = "torch._inductor.config.emulate_precision_casts"
EQUAL_STREAMS = "torch._inductor.config.fallback_random"
BACKWARD_AUTOCAST = "torch._functorch.config.backward_pass_autocast"

FLOAT32 = format_of("float32").unit_roundoff


@dataclass(frozen=True, slots=True)
class Trial:
    """The compiled run once more under one setting or at another stage. passes: nothing of it is beyond its limit.
    raised: the exception that it ended with."""

    name: str
    passes: bool
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Exceptions:
    """What the runs raised, in one line each; "" where a run came to its end.

    float32: what eager mode raises in float32. missing: for want of a compiler or a kernel on this machine.
    """

    eager: str = ""
    compiled: str = ""
    float32: str = ""
    missing: str = ""
    where: Where = field(default_factory=Where)


@dataclass(frozen=True, slots=True)
class AccuracyStats:
    """The results of compiled code, each compared with the exact value that the shadowed eager run gives.

    arm: `bfloat16`, `float16 native`, `float32`. format: the narrowest format that the run computes in. incomparable:
    why nothing is compared. freedom: of honest runs to differ, see there. casts: casts alone round to 16 bits, in a
    model that is float32 otherwise: its author means them. eager_shapes, compiled_shapes: dtype and shape of everything
    that a call gave. trials: stages and settings that were tried after a failure.
    """

    subject: str
    arm: str
    format: str
    device: str
    backend: str = "inductor"
    incomparable: str = ""
    autocast: bool = False
    steps: int = 1
    errors: tuple[ResultError, ...] = ()
    freedom: Freedom = field(default_factory=Freedom)
    casts: bool = False
    exceptions: Exceptions = field(default_factory=Exceptions)
    eager_shapes: Mapping[str, str] = field(default_factory=dict)
    compiled_shapes: Mapping[str, str] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    graphs: int = 0
    unsupported: str = ""
    no_gradients: str = ""
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def comparable(self) -> tuple[ResultError, ...]:
        """The results of which something is known."""
        return tuple(error for error in self.errors if error.judged or error.beyond)

    def casts_left_out(self, error: ResultError) -> bool:
        """Whether compiled code leaves out a rounding that the author means, and so is nearer to exact."""
        coarse = self.casts and error.unit >= JUDGED_UNIT and error.eager_error > SLACK * FLOOR * FLOAT32
        return bool(coarse and error.apart > error.eager_error / 2)

    def beyond(self, error: ResultError) -> bool:
        """Whether compiled code is at fault, but for what near ties excuse."""
        if not (error.beyond or self.casts_left_out(error)):
            return False
        if error.lost or error.absent:
            return True
        if error.dtype in INTEGERS:
            return True
        return not (error.kind in WHOLE and error.share <= math.sqrt(self.freedom.kinks_at(error.step)))

    def excused(self, error: ResultError) -> bool:
        """Whether decisions near a tie explain what is beyond: taken otherwise, so many of them move about as much; of
        inf and NaN, that eager mode has about as many at other places: the edge of overflow."""
        if error.absent:
            return False
        if error.lost:
            return error.lost <= 4 * error.eager.lost and not error.other.flagged
        turned = 2 * self.freedom.near_ties
        if error.dtype in INTEGERS:
            return error.apart * error.numel <= turned
        return error.error <= 2 * math.sqrt(self.freedom.share)

    def failures(self, kinds: tuple[str, ...] = ()) -> tuple[ResultError, ...]:
        """What is beyond its limit and not excused, of these kinds or of all."""
        return tuple(e for e in self.excess(kinds) if not self.excused(e))

    def excess(self, kinds: tuple[str, ...] = ()) -> tuple[ResultError, ...]:
        """What is beyond its limit, of these kinds or of all."""
        return tuple(e for e in self.errors if (not kinds or e.kind in kinds) and self.beyond(e))


INTEGERS = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"))


def unknown(error: ResultError) -> str:
    """Why no element of a result can be judged."""
    return "it is NaN in float64 too" if error.nan else "eager and compiled, it is not finite where float64 is"
