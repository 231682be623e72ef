"""The frozen records of a search: what broke, with which example, and how much was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ampcheck.core.run import Coverage, Where

RAISES, NONFINITE, RANGE, ACCURACY, DECISION, SHAPE = "raises", "nonfinite", "range", "accuracy", "decision", "shape"
COMPILED, INVARIANCE = "compiled", "invariance"


@dataclass(frozen=True, slots=True)
class Problem:
    """One property that one example breaks.

    kind: `raises`, `nonfinite`, `range` (no value of the format is near the true one), `accuracy`, `decision` (an
    integer or bool), `shape`, `compiled` or `invariance`. output: path of the output; index: in it, flattened.
    low, wide: the element in low precision and in float64. observed, allowed: absolute error and what rounding
    explains; counts where there is no error. roundings: the chain that `allowed` counts. detail: what an exception or
    invariance said. at: the changed example at which an invariance breaks.
    """

    kind: str
    output: str = ""
    index: int = 0
    low: float = 0.0
    wide: float = 0.0
    observed: float = 0.0
    allowed: float = 0.0
    roundings: int = 0
    detail: str = ""
    at: Any = None


@dataclass(frozen=True, slots=True)
class Breaking:
    """A problem with the smallest example that was found for it, as code.

    found_after: how many examples had been looked at. calls: how often the model was looked at in all, minimising
    included. climbed: whether gradient ascent came upon it, which leaves what was drawn for the declared domain. where:
    the op that lost the values, if known. file: the test that was written, "" for none; unwritten: the
    reason why there is none.
    """

    problem: Problem
    code: str
    found_after: int
    calls: int
    where: Where = field(default_factory=Where)
    climbed: bool = False
    file: str = ""
    unwritten: str = ""


@dataclass(frozen=True, slots=True)
class Peak:
    """A value inside a run, the op that gave it, the example that made it, and the format that the op gives it in."""

    magnitude: float = 0.0
    where: Where = field(default_factory=Where)
    code: str = ""
    format: str = ""


@dataclass(frozen=True, slots=True)
class PropertyStats:
    """One callable searched in one format.

    examples: how many were looked at while searching, of `budget` at most. outside: those that float32 or the judge
    refused. undefined: elements that are not finite in float64. elements: those that were judged. ratio: the largest
    error in terms of what was allowed. climbs: steps of gradient ascent that were judged. domain: in words. peak: the
    value that came nearest to the end of its own format. overflow: one that went beyond inside. asked: the properties
    searched for. invariances: each with the examples that it changed and that were judged. skipped: property to the
    reason why it was not looked at. lacking: the kernel that this machine lacks. cut:
    whether the budget was spent while what broke was made smaller. unsteady: why equal inputs gave different results.
    """

    subject: str
    arm: str
    format: str
    device: str
    reference: str
    examples: int = 0
    budget: int = 0
    seconds: float = 0.0
    stopped: str = ""
    outside: int = 0
    elements: int = 0
    undefined: int = 0
    ratio: float = 0.0
    flushed: float = 0.0
    climbs: int = 0
    graphs: int = 0
    compiled_examples: int = 0
    invariances: Mapping[str, int] = field(default_factory=dict)
    domain: str = ""
    peak: Peak = field(default_factory=Peak)
    overflow: Peak | None = None
    lacking: str = ""
    cut: bool = False
    unsteady: str = ""
    breakings: tuple[Breaking, ...] = ()
    asked: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    outside_reason: str = ""
    coverage: Coverage = field(default_factory=Coverage)
