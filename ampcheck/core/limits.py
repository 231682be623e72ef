"""The limits of the checks, which a repository may set in `[tool.ampcheck.limits]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ampcheck.core.arguments import parse_flag, parse_integer, parse_number, show
from ampcheck.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the checks. Each is a pure number; the defaults follow from the formats.

    precision: standard deviations of rounding that an error may reach, see `ampcheck explain precision-loss`. 2 is the
        usual 95 per cent; larger values scale every limit, smaller ones those of whole outputs and gradients.
    headroom: warn from this factor below the format's maximum. 4 is two binades: a batch four times as large in
        magnitude, or sixteen times as many terms of random sign in a sum, would overflow.
    flush: the part of a tensor's Euclidean norm that may be lost to zero and subnormal numbers, in unit roundoffs of
        the format. A single rounding changes as much as 1.
    underflow: the share of a tensor's nonzero gradient elements that may become zero.
    stagnation: the share of a tensor's updates that may change no weight.
    reduction: the error that a sum or norm of gradients may have, in roundings.
    """

    precision: float = 2.0
    headroom: float = 4.0
    flush: float = 1.0
    underflow: float = 0.1
    stagnation: float = 0.9
    reduction: float = 4.0

    def with_(self, values: Mapping[str, Any], source: str) -> Limits:
        """These limits with some replaced. Raises `UsageError` for an unknown name or an invalid value."""
        names = [f.name for f in fields(self)]
        for name, value in values.items():
            if name not in names:
                raise UsageError(f"{source} sets an unknown limit {name!r:.40}; there are {', '.join(names)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
                raise UsageError(f"{source} sets {name} to {show(value)}; a positive number is required")
        return replace(self, **{name: float(value) for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Limits of the checks on graphs.

    max_breaks: graph breaks in one call, counted each time. max_recompiles: compilations after the warm-up
    and, in it, for a value that had varied before. warmup: passes through all calls before the one that is judged.
    modes: also count the graphs that train, eval, no_grad, autocast and inference_mode need.
    """

    max_breaks: int = 0
    max_recompiles: int = 0
    warmup: int = 1
    modes: bool = False

    def __post_init__(self) -> None:
        parse_integer(self.max_breaks, "max_breaks", 0)
        parse_integer(self.max_recompiles, "max_recompiles", 0)
        parse_integer(self.warmup, "warmup")
        parse_flag(self.modes, "modes")


@dataclass(frozen=True, slots=True)
class StartupLimits:
    """Requirements of a start; None requires nothing.

    compile: seconds that compilation with empty caches may cost. calls: after how many it has paid at the latest.
    memory: a compiled step's peak at most so many times the eager one's, with 1 MiB of slack; bytes: at most so many.
    breaks, recompiles: as of `GraphLimits`.
    """

    compile: float | None = None
    calls: float | None = None
    memory: float | None = 1.1
    bytes: float | None = None
    breaks: int = 0
    recompiles: int = 0

    def __post_init__(self) -> None:
        for name in ("compile", "calls", "memory", "bytes"):
            if (limit := getattr(self, name)) is not None:
                parse_number(limit, f"{name} of StartupLimits")
