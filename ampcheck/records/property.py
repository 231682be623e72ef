"""The frozen records of a search: what breaks, with which example, and how much was examined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ampcheck.core.run import Coverage, Where

RAISES, NONFINITE, RANGE, ACCURACY, DECISION = "raises", "nonfinite", "range", "accuracy", "decision"
COMPILED, INVARIANCE = "compiled", "invariance"


@dataclass(frozen=True, slots=True)
class Problem:
    """One property that one example breaks.

    kind: one of the constants above; `range`: no value of the format is near the exact one. output: path of the output;
    index: in it, flattened. low, exact: the element. observed, limit: relative errors; counts where there is no error.
    detail: what an exception or invariance said. where: the op at fault. vanished: its own result is finite, and lost
    by that, such as an eps that the format does not hold.
    """

    kind: str
    output: str = ""
    index: int = 0
    low: float = 0.0
    exact: float = 0.0
    observed: float = 0.0
    limit: float = 0.0
    detail: str = ""
    where: Where = field(default_factory=lambda: Where(phase="forward"))
    vanished: bool = False


@dataclass(slots=True)
class Breaking:
    """A problem with the smallest example that was found for it.

    example: an `ampcheck.parity.example.Example`; its `code()` is what findings show. found_after: how many examples
    had been examined. climbed: whether gradient ascent found it, which leaves what was drawn for the declared domain.
    file: the test that was written, "" for none; unwritten: why there is none.
    """

    example: Any
    problem: Problem
    found_after: int
    climbed: bool = False
    file: str = ""
    unwritten: str = ""


@dataclass(frozen=True, slots=True)
class Peak:
    """The result inside a run that takes the largest share of its 16-bit format; infinite where an op overflowed.

    code: the example.
    """

    share: float = 0.0
    magnitude: float = 0.0
    where: Where = field(default_factory=Where)
    format: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class PropertyStats:
    """One callable searched in one format.

    name: as findings name the subject. examples: how many were examined while searching, of `budget` at most. outside:
    those that float32 refuses too. elements: those that were judged. ratio: the
    largest error, of the limit. climbs: examples of gradient ascent that were judged. domain: in words. peak: the value
    that came nearest to the end of its format. overflow: one that went beyond, without reaching an output. asked: the
    properties searched for. invariances: each with the examples that it changed and that were judged. skipped: property
    to the reason why it was not judged. lacking: the kernel that this machine lacks. cut: whether the budget was spent
    while a failure was minimised. calls: how often the model ran in all, minimising included.
    """

    name: str
    format: str
    examples: int = 0
    budget: int = 0
    stopped: str = ""
    outside: int = 0
    elements: int = 0
    ratio: float = 0.0
    climbs: int = 0
    compiled_examples: int = 0
    invariances: Mapping[str, int] = field(default_factory=dict)
    domain: str = ""
    peak: Peak = field(default_factory=Peak)
    overflow: Peak | None = None
    lacking: str = ""
    cut: bool = False
    calls: int = 0
    breakings: tuple[Breaking, ...] = ()
    asked: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def judged(self) -> int:
        """Examples that were judged, those of gradient ascent included."""
        return self.examples - self.outside + self.climbs


@dataclass(slots=True)
class Look:
    """Errors of one example. outside: why it was not judged, "" where it was; lacking: for want of a kernel.

    elements: those judged; undefined: those that are not finite in exact. ratio: the largest error, of its limit.
    peak, overflow: see `PropertyStats`.
    """

    problems: list[Problem] = field(default_factory=list)
    outside: str = ""
    lacking: str = ""
    elements: int = 0
    undefined: int = 0
    ratio: float = 0.0
    peak: Peak = field(default_factory=Peak)
    overflow: Peak | None = None
