"""The frozen record of one low-precision run: what the checks of range and precision look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.core.arm import Arm, armed
from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Where
from ampcheck.records.faults import Fault
from ampcheck.records.health import TensorHealth
from ampcheck.records.results import Examination, ResultError

COMPILED = "calls of compiled functions, which ran in eager mode"
"""Reason why code under a shadow that the user has compiled stays unseen."""

OTHER_THREADS = "ops of other threads"
OTHER_INFINITIES = "ops of other threads that made an infinity or a NaN of finite values"
"""Reason why ops of a block or loop that starts threads stay unseen."""

UNCOMPARED = "outputs that are sparse, nested, wrapped, float8 or on meta"
"""Floating outputs of which the default loss makes nothing; without values of 16 bits or more they are not compared."""

VALUELESS = "outputs without values, fake or on meta"

UNREAD = "outputs inside a"
"""Reason for not comparing the tensors of an iterator, or of a set with several alike; the type follows."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of the low-precision run; missing: for want of a tool or kernel on this machine. ours: only the run
    that ampcheck follows raises it. runs: what the subject runs in."""

    where: Where
    message: str
    missing: bool = False
    runs: str = "in float32"
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Values:
    """Counts of NaN and infinities in one tensor. kind: input, parameter, buffer, output, loss, gradient."""

    kind: str
    name: str
    nan: int
    infinite: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name or '(the only one)'}"


@dataclass(frozen=True, slots=True)
class Closeness:
    """Distance of the results of a module, or of the gradients of its parameters, from float64.

    error, limit: of the worst tensor, relative norms; None where the data determine neither. sampled: elements that
    were looked at; flushed: those of them that are zero and are not in float64.
    """

    error: float | None = None
    limit: float | None = None
    sampled: int = 0
    flushed: int = 0

    def __add__(self, other: Closeness) -> Closeness:
        worst = max(self, other, key=lambda side: (side.error or 0.0) / side.limit if side.limit else -1.0)
        return Closeness(worst.error, worst.limit, self.sampled + other.sampled, self.flushed + other.flushed)


@dataclass(frozen=True, slots=True)
class NumericsStats:
    """One run of a subject (`float16, eager`) beside its exact values.

    format: the narrowest format of the run. faults: the ops at fault (`ampcheck.shadow`), in order. nonfinite: ops that
    make NaN or infinities in exact, with what they make. largest: the largest magnitude of the 16-bit results of an op
    at one place, and of its inputs. errors: outputs, losses and gradients. data: inputs, weights and buffers with a
    NaN, and weights with an infinity. scale: the loss scale; gradients contain it. health, closeness: by (phase,
    module). sources: the text of source lines by (file, line). lost_in: the first module of whose result nothing is
    left. raised: an exception that the run has and float32, or another 16-bit dtype, has not. losses: dtypes in which
    losses were computed. no_backward: why there are no gradients; prevented: it is the subject that keeps backward from
    its weights; cut: parameters of modules that ran while gradients were off. masked: the default loss leaves out
    non-finite outputs of exact. left: switches that forward, loss or backward left changed, with their values before
    and after. ops, low, whole: ops that were followed, results of 16 bits, and those of them that hold whole numbers.
    casts: of the code itself to 16 bits, by file, line and dtype. judged: there are results to compare; a watched block
    has none. keeps_nan: a NaN is in use when a watched block ends. chosen: ops that chose a NaN of exact.
    """

    subject: str
    arm: Arm
    format: str
    device: str
    native: bool = False
    judged: bool = True
    keeps_nan: bool = False
    faults: tuple[Fault, ...] = ()
    nonfinite: tuple[tuple[Where, Examination], ...] = ()
    chosen: tuple[Where, ...] = ()
    largest: Mapping[tuple[Where, str], tuple[float, float]] = field(default_factory=dict)
    errors: tuple[ResultError, ...] = ()
    data: tuple[Values, ...] = ()
    health: Mapping[tuple[str, str], TensorHealth] = field(default_factory=dict)
    closeness: Mapping[tuple[str, str], Closeness] = field(default_factory=dict)
    sources: Mapping[tuple[str, int | None], str] = field(default_factory=dict)
    lost_in: str | None = None
    raised: Raised | None = None
    losses: tuple[str, ...] = ()
    module_dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    declared_dtypes: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0
    no_backward: str = ""
    prevented: bool = False
    cut: tuple[str, ...] = ()
    masked: bool = False
    left: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    ops: int = 0
    low: int = 0
    whole: int = 0
    casts: Mapping[tuple[str, int | None, str], int] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def name(self) -> str:
        """The subject and its arm, as findings name them."""
        return armed(self.subject, self.arm)

    @property
    def unit_roundoff(self) -> float:
        """Of the format of the run."""
        return format_of(self.format).unit_roundoff

    def of(self, *kinds: str) -> tuple[ResultError, ...]:
        """The errors of outputs, losses or gradients."""
        return tuple(error for error in self.errors if error.kind in kinds)

    @property
    def uncompared(self) -> bool:
        """True if there are outputs, and none has an element that is finite in exact."""
        seen = [error.seen for error in self.of("output")]
        return bool(seen) and all(s.exact_nan + s.exact_inf == s.numel for s in seen)


def gradient_module(name: str) -> str:
    """The module of a parameter; inputs belong to the root."""
    return "" if name.startswith("input ") else name.rpartition(".")[0]
