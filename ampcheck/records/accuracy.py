"""The frozen record of a compiled run beside the shadowed eager one, and the line between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ampcheck.core.arm import Arm, armed
from ampcheck.core.run import Coverage, Where
from ampcheck.records.results import WITHIN, ResultError
from ampcheck.records.telemetry import TelemetryStats

EAGER, AOT_EAGER, EMULATED, INDUCTOR = "eager", "aot_eager", "inductor + emulate_precision_casts", "inductor"
STAGES = (EAGER, AOT_EAGER, EMULATED, INDUCTOR)
"""The stages of the compiler: none; Dynamo and AOTAutograd, with eager kernels; Inductor that rounds to 16 bits where
eager mode does; Inductor as torch.compile runs by default."""

EMULATE = "torch._inductor.config.emulate_precision_casts"
EQUAL_STREAMS = "torch._inductor.config.fallback_random"
BACKWARD_AUTOCAST = "torch._functorch.config.backward_pass_autocast"

OTHER_STREAMS = "the model draws random numbers, and compiled code draws others than eager mode does"


@dataclass(frozen=True, slots=True)
class Trial:
    """The compiled run once more under one setting or at another stage. passes: nothing of it is beyond its limit.
    raised: the exception that it ended with."""

    name: str
    passes: bool
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Exceptions:
    """Exceptions of the runs, in one line each; "" where a run came to its end.

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

    arm: `bfloat16, compiled`, see `arm_of`. format: the narrowest format that the run computes in. incomparable:
    why nothing is compared. eager_shapes, compiled_shapes: dtype and shape of everything that a call gave. trials:
    stages and settings that were tried after a failure. lowered: ops that the graphs compute in 16 bits and eager mode
    in float32. declined: why Dynamo left the whole of `forward` to eager mode. inside: what telemetry saw in the graphs
    of an audit; beside: it is one, which judges the eager run, too. scale: of the loss; gradients contain it.
    """

    subject: str
    arm: Arm
    format: str
    backend: str = "inductor"
    incomparable: str = ""
    autocast: bool = False
    steps: int = 1
    scale: float = 1.0
    errors: tuple[ResultError, ...] = ()
    lowered: tuple[Where, ...] = ()
    exceptions: Exceptions = field(default_factory=Exceptions)
    eager_shapes: Mapping[str, str] = field(default_factory=dict)
    compiled_shapes: Mapping[str, str] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    graphs: int = 0
    unsupported: str = ""
    declined: str = ""
    no_gradients: str = ""
    inside: TelemetryStats | None = None
    beside: bool = False
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def name(self) -> str:
        """The subject and how it ran, as findings name them."""
        return armed(self.subject, replace(self.arm, backend="" if self.backend == "inductor" else self.backend))

    @property
    def comparable(self) -> tuple[ResultError, ...]:
        """The results of which something is known."""
        return tuple(error for error in self.errors if not unknown(error))

    def of(self, kinds: Collection[str]) -> tuple[ResultError, ...]:
        """The results of these kinds."""
        return tuple(error for error in self.errors if error.kind in kinds)

    def failures(self, kinds: tuple[str, ...] = ()) -> tuple[ResultError, ...]:
        """Return what is beyond its limit and not explained, of these kinds or of all."""
        return tuple(e for e in self.excess(kinds) if e.at_fault)

    def lowered_in(self, kinds: Collection[str]) -> tuple[Where, ...]:
        """Ops that compiled code lowers to 16 bits, of the phase that gives results of these kinds."""
        return tuple(where for where in self.lowered if (where.phase == "backward") == ("gradient" in kinds))

    def excess(self, kinds: tuple[str, ...] = ()) -> tuple[ResultError, ...]:
        """Return what is beyond its limit, of these kinds or of all."""
        return tuple(e for e in self.errors if (not kinds or e.kind in kinds) and e.verdict != WITHIN)


NOISE = "the data determine no digit of it"


def unknown(error: ResultError) -> str:
    """Why a result cannot be judged; "" where it can, or is at fault all the same."""
    if error.verdict != WITHIN or (error.judged and error.known):
        return ""
    if error.judged:
        return NOISE
    if error.nan:
        return "it is NaN in float64 too"
    return f"eager{'' if error.excused else ' and compiled'}, it is not finite where float64 is"


def counted_errors(errors: Iterable[ResultError]) -> tuple[Counter[str], Counter[str]]:
    """For the coverage: results by kind of which something is known, and the others by their reason."""
    seen, unseen = Counter[str](), Counter[str]()
    for error in errors:
        if reason := unknown(error):
            unseen[f"{error.kind}s of which nothing is known: {reason}"] += 1
        else:
            seen["losses" if error.kind == "loss" else f"{error.kind}s"] += 1
    return seen, unseen
