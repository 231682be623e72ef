"""What was seen of the ops of a run: plain numbers by place."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ampcheck.core.run import Where


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What was seen of one op at one place, all its calls together. Counts are of elements.

    dtype: of the output. amax: largest finite magnitude going in and coming out.
    produced: infinities and NaNs born here from finite inputs; spoiled: NaNs made here of infinities that came in;
    carried: other non-finite results of non-finite inputs. nan: NaNs made here while no input held any;
    written: NaNs that a constant of the op puts here.
    limited: of `produced`, whether float64 stays finite on the same inputs (None: that could not be run).
    error: norm of the difference to float64 on the same inputs over the norm of float64's result, at the worst call.
    terms: how many elements went into each element of that result, at the most.
    emptied: calls whose output is all zero where float64's is not.
    nonzero, flushed: elements that are nonzero in float64, and those of them that are zero here for being too small;
    flushed_share: the Euclidean norm of the flushed over that of all, at the worst call.
    constant: a nonzero Python scalar among the arguments that the output's format cannot tell from zero.
    inexact: integers that the cast could not keep; collided: how many fewer different integers are left;
    used: whether something computed from these reached an output or a buffer.
    """

    where: Where
    dtype: str
    calls: int = 1
    numel: int = 0
    amax_in: float = 0.0
    amax: float = 0.0
    produced: int = 0
    spoiled: int = 0
    carried: int = 0
    nan: int = 0
    written: int = 0
    limited: bool | None = None
    nonzero: int = 0
    flushed: int = 0
    flushed_share: float = 0.0
    error: float = 0.0
    terms: int = 1
    emptied: int = 0
    constant: float | None = None
    inexact: int = 0
    collided: int = 0
    used: bool = False
    index: int = 0

    def __add__(self, other: OpFacts) -> OpFacts:
        return replace(
            self,
            calls=self.calls + other.calls,
            numel=self.numel + other.numel,
            amax_in=max(self.amax_in, other.amax_in),
            amax=max(self.amax, other.amax),
            produced=self.produced + other.produced,
            spoiled=self.spoiled + other.spoiled,
            carried=self.carried + other.carried,
            nan=self.nan + other.nan,
            written=self.written + other.written,
            limited=_either(self.limited, other.limited),
            nonzero=self.nonzero + other.nonzero,
            flushed=self.flushed + other.flushed,
            flushed_share=max(self.flushed_share, other.flushed_share),
            error=max(self.error, other.error),
            terms=self.terms if self.error >= other.error else other.terms,
            emptied=self.emptied + other.emptied,
            constant=self.constant if self.constant is not None else other.constant,
            inexact=self.inexact + other.inexact,
            collided=self.collided + other.collided,
            used=self.used or other.used,
            index=min(self.index, other.index),
        )


def _either(one: bool | None, other: bool | None) -> bool | None:
    return other if one is None else one if other is None else one or other
