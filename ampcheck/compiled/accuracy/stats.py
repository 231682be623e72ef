"""The frozen record of a compiled run beside the eager one, both held against float64, and the line between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Where
from ampcheck.numerics.stats import LOST

EAGER, AOT_EAGER, EMULATED, INDUCTOR = "eager", "aot_eager", "inductor + emulate_precision_casts", "inductor"
LADDER = (EAGER, AOT_EAGER, EMULATED, INDUCTOR)
"""The stages of the compiler, see `ampcheck.compiled.accuracy.ladder`."""

EMULATE = "torch._inductor.config.emulate_precision_casts"
EQUAL_STREAMS = "torch._inductor.config.fallback_random"
BACKWARD_AUTOCAST = "torch._functorch.config.backward_pass_autocast"


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one tensor lies from float64, in eager mode and compiled.

    kind: `output`, `loss`, `gradient`, `update` or `buffer`. eager, compiled: relative errors (Euclidean norm of the
    difference over that of the reference; of integers the part that differs), the first on the data as they are, the
    others on data nudged by a rounding. grain: what storing the tensor in its own dtype costs by itself. float32: how
    far the reference moves when its data are rounded to float32; turned: when its decisions near a tie are taken
    otherwise, and nothing else. rounded: the root mean square
    of eager mode's errors when its ops round otherwise (`ampcheck.numerics.rounding`); 0 where that was not measured.
    share, eager_share: the norms of the difference over that of all tensors of this kind together. between: how far the
    two lie from each other. All these are taken over the elements that are finite on all sides; infinite is what cannot
    be known.
    judged: elements of which something is known: finite on all sides, or infinite on all sides in place and sign. nan:
    NaN in float64 and compiled code alike, which is no agreement.
    nonfinite, eager_nonfinite: elements that are inf or NaN where float64 is not, or the other way round; in eager mode
    the most on any of the data. lost: of these, in compiled code on the data as they are, where eager mode agrees with
    float64.
    """

    kind: str
    name: str
    step: int
    dtype: str
    eager: tuple[float, ...]
    compiled: tuple[float, ...]
    grain: float = 0.0
    float32: float = 0.0
    turned: float = 0.0
    rounded: float = 0.0
    share: float = 0.0
    eager_share: float = 0.0
    between: float = 0.0
    nonfinite: int = 0
    eager_nonfinite: int = 0
    lost: int = 0
    numel: int = 1
    judged: int = 1
    nan: int = 0

    @property
    def worst_eager(self) -> float:
        """The largest error of eager mode on any of the data that give one."""
        return max((far for far in self.eager if math.isfinite(far)), default=math.inf)

    @property
    def least_compiled(self) -> float:
        """The smallest error of compiled code on any of the data: what is wrong by luck is right on the next."""
        pairs = zip(self.eager, self.compiled, strict=False)
        return min((far for eager, far in pairs if math.isfinite(eager)), default=math.inf)

    @property
    def unknown(self) -> str:
        """Why there is no limit that could judge it; "" where there is one."""
        pairs = zip(self.eager, self.compiled, strict=False)
        if not self.judged:
            return "it is NaN in float64 too" if self.nan else "no element of it is finite on all sides"
        if not any(math.isfinite(eager) for eager, _ in pairs):
            return "nothing of it is finite in eager mode and in float64 alike"
        if not math.isfinite(self.float32) and not self._measured_again:
            return "float64 does not stay finite when its data are rounded to float32, and no other data give a limit"
        return ""

    @property
    def _measured_again(self) -> bool:
        return sum(math.isfinite(far) for far in self.eager) > 1

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip() + (f" at step {self.step}" if self.step else "")


@dataclass(frozen=True, slots=True)
class Trial:
    """The compiled arm once more under one setting or at another stage.

    rung: of the ladder, or the setting. mends: whether everything that was beyond its limit is within it.
    raised: the exception that it ended with.
    """

    rung: str
    mends: bool
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Exceptions:
    """What the arms raised, in one line each; "" where an arm ran to its end.

    float32: what eager mode raises in float32. missing: for want of a compiler or a kernel on this machine.
    """

    eager: str = ""
    compiled: str = ""
    float32: str = ""
    missing: str = ""
    where: Where = field(default_factory=Where)


@dataclass(frozen=True, slots=True)
class AccuracyStats:
    """Compiled against eager, both against float64.

    arm: `bfloat16`, `float16 native`, `float32`. format: the narrowest format that the arm computes in. chain: the most
    roundings in a row; reduction: the length of the longest sum. reference: what judges; "" where there is none, and
    then `incomparable` says why. eager_shapes, compiled_shapes: dtype and shape of everything that a call gave.
    near_ties: discrete decisions that a rounding of the data turns, which compiled code may take otherwise.
    trials: stages and settings that were tried after a failure.
    """

    subject: str
    arm: str
    format: str
    device: str
    backend: str = "inductor"
    reference: str = ""
    incomparable: str = ""
    autocast: bool = False
    steps: int = 1
    deviations: tuple[Deviation, ...] = ()
    exceptions: Exceptions = field(default_factory=Exceptions)
    eager_shapes: Mapping[str, str] = field(default_factory=dict)
    compiled_shapes: Mapping[str, str] = field(default_factory=dict)
    near_ties: int = 0
    trials: tuple[Trial, ...] = ()
    chain: int = 1
    reduction: int = 1
    graphs: int = 0
    unsupported: str = ""
    no_gradients: str = ""
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def comparable(self) -> tuple[Deviation, ...]:
        """The tensors that a limit can judge, and those with inf or NaN of compiled code's own."""
        return tuple(d for d in self.deviations if d.lost or not d.unknown)

    def float32_floor(self, factor: float, float32: float) -> float:
        """What float32 arithmetic in another order may do: its roundings add like a random walk along the longest sum
        and the longest chain, and each acts as a rounding of the data does (`float32`, where known)."""
        walk = math.sqrt(self.chain + self.reduction)
        return factor * walk * (format_of("float32").unit_roundoff + (float32 if math.isfinite(float32) else 0.0))

    def limit(self, deviation: Deviation, factor: float) -> float:
        """The largest error that compiled code may have.

        Compiled code does the same roundings as eager mode, or fewer, in another order: its error is another draw of
        the same kind, and within `factor` squared of its usual size, `factor` for either draw. That size is eager
        mode's error, or, where that one is small by luck, the one it has when its ops round otherwise. To that comes
        what one storage in the tensor's dtype costs, and the float32 floor.
        """
        floor = deviation.grain + self.float32_floor(factor, deviation.float32)
        return factor**2 * max(deviation.worst_eager, deviation.rounded) + floor

    def beyond(self, deviation: Deviation, factor: float) -> bool:
        """Whether compiled code is worse than eager mode by more than chance and reordering explain.

        What is inf or NaN in compiled code alone is worse, whatever it is on other data.
        """
        return deviation.lost > 0 or self._off(deviation, factor)

    def _off(self, deviation: Deviation, factor: float) -> bool:
        """Whether what is finite on all sides lies beyond its limit."""
        if deviation.unknown:
            return False
        if deviation.dtype in INTEGERS:
            few = max(1.0, self.limit(deviation, factor) * deviation.numel) if self.near_ties else 0.0
            return deviation.least_compiled * deviation.numel > few
        if not deviation.least_compiled > self.limit(deviation, factor):
            return False
        if deviation.kind not in ("gradient", "update"):
            return True
        known = self.float32_floor(factor, 0.0)
        if deviation.worst_eager > LOST:  # eager mode knows nothing of it: only what moves the whole is a failure
            known = max(known, factor**2 * deviation.eager_share)
            if deviation.float32 > LOST:  # nor does the reference: it is zero but for rounding
                known = max(known, factor * format_of(self.format).unit_roundoff)
        return deviation.share > known

    def excused(self, deviation: Deviation, factor: float) -> bool:
        """Whether an excess is explained: by a decision near a tie, which taken otherwise moves the reference about as
        far; of inf and NaN by the edge of overflow, where eager mode itself has about as many on some of the data."""
        edge = deviation.lost <= factor**2 * deviation.eager_nonfinite
        if deviation.unknown or not self._off(deviation, factor):
            return edge
        beyond_that = deviation.least_compiled - self.limit(deviation, factor)
        return edge and bool(self.near_ties) and 0 < beyond_that <= factor * deviation.turned

    def excess(self, factor: float, kinds: tuple[str, ...] = ()) -> tuple[Deviation, ...]:
        """What is beyond its limit, of these kinds or of all."""
        return tuple(d for d in self.deviations if (not kinds or d.kind in kinds) and self.beyond(d, factor))


INTEGERS = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"))
