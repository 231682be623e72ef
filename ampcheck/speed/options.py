"""The settings of a measurement of speed, grouped: `assert_speed`, the command line and the measurements take them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

from ampcheck.core.arguments import parse_integer, parse_number
from ampcheck.core.errors import UsageError
from ampcheck.core.worker import PATIENCE
from ampcheck.records.speed import EFFECT, FALSE_ALARMS, Rule
from ampcheck.speed.clock import Clock

LAUNCHES = 3
"""Rounds against a base at least, by default."""

_STATISTICS = ("budget", "seed", "effect", "comparisons", "false_alarms")
USED_BY: Mapping[str, Collection[str]] = {
    "matrix": ("budget",),
    "arms": (*_STATISTICS, "clock"),
    "base": (*_STATISTICS, "mode", "precision", "launches", "launches_max"),
    "startup": "mode precision budget cold warm backward regional dynamic env cwd pythonpath timeout".split(),
}
"""The options that each measurement uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions:
    """Settings of a measurement; None is the default of the measurement.

    budget: seconds of timed blocks at most (10 for arms, 24 against a base, 2 for each arm of a start). seed: of the
    order in which arms take turns. clock: for arms; by default the clock of the device.

    effect: a shortfall below this share passes. comparisons: how many comparisons the whole suite makes (by default
    those of this call), of which together at most a share of `false_alarms` fails without a cause.

    mode: of torch.compile, and precision, one of `steps.PRECISIONS`: of a target. launches, launches_max: rounds of
    fresh processes against a base, at least (3) and at most (8, or `launches` if that is more).

    cold, warm: launches of a start with empty caches, and with those that the first cold launch filled; artifacts are
    loaded as often. backward: as of `step_of`. regional: also compile repeated blocks; dynamic: also compile with
    `dynamic=True` and `dynamic=False`; None: where there are such blocks, where shapes vary. env: changes to the
    environment; None removes a name. timeout: seconds of any one command of a process.
    """

    budget: float | None = None
    seed: int = 0
    clock: Clock | None = None
    effect: float = EFFECT
    comparisons: int | None = None
    false_alarms: float = FALSE_ALARMS
    mode: str | None = None
    precision: str | None = None
    launches: int | None = None
    launches_max: int | None = None
    cold: int = 1
    warm: int = 3
    backward: bool | None = None
    regional: bool | None = None
    dynamic: bool | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    cwd: str | None = None
    pythonpath: Sequence[str] = ()
    timeout: float = PATIENCE

    def __post_init__(self) -> None:
        if self.budget is not None:
            parse_number(self.budget, "budget")
        parse_number(self.timeout, "timeout")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UsageError(f"seed must be a whole number; found {self.seed!r}")
        for name, least in (("launches", 2), ("launches_max", self.launches or LAUNCHES), ("cold", 1), ("warm", 1)):
            if (value := getattr(self, name)) is not None:
                parse_integer(value, name, least)
        self.rule()  # raises for effect, comparisons and false_alarms

    def rule(self, limit: float = 1.0, comparisons: int = 1) -> Rule:
        """The rule for a ratio. comparisons: of this call, where the options do not give those of the suite."""
        number = comparisons if self.comparisons is None else self.comparisons
        return Rule(limit, self.effect, number, self.false_alarms)

    def require_used(self, measurement: str) -> None:
        """Raise `UsageError` for an option that has no effect on a measurement, a key of `USED_BY`."""
        default, used = SpeedOptions(), USED_BY[measurement]
        for option in fields(self):
            if option.name not in used and getattr(self, option.name) != getattr(default, option.name):
                raise UsageError(
                    f"{option.name} has no effect here: leave it out; options of this measurement: {', '.join(used)}"
                )
