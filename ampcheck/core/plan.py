"""The plan of a judgement: what is judged, in which arms, by which checks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ampcheck.core.arm import Arm
from ampcheck.core.limits import Limits
from ampcheck.core.run import Run
from ampcheck.core.settings import resolve_limits
from ampcheck.core.subject import Subject, as_subject

COVERAGE = "coverage"
"""The check that is always reported."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Checks, limits and arms of an audit of one subject; `Plan.of` fills in the limits.

    checks: slugs of the selected ones, None for all. limits: those of the subject over those that the user passed.
    device: that runs the subject; emulated: another device type whose autocast rules it follows, or empty. arms: in
    which a model runs, in their order. compile: compiled runs are among them, or follow; full: with other options of
    `torch.compile`, too, over three updates of the weights, and four times as many steps of a training loop. graphs:
    the graphs of compiled code are judged, and compiled code against eager code. steps: of a training loop that are
    observed, or of a compiled model that are compared; horizon: that are planned. None: what the subject says, or the
    default.
    """

    subject: Subject
    checks: Collection[str] | None = None
    limits: Limits = field(default_factory=Limits)
    device: str = "cpu"
    emulated: str = ""
    arms: tuple[Arm, ...] = ()
    compile: bool = True
    full: bool = False
    graphs: bool = False
    steps: int | None = None
    horizon: int | None = None

    @classmethod
    def of(cls, subject: object, limits: Limits | None = None, **options: Any) -> Plan:
        """A plan with the limits of the subject over those that were passed, by default those of the settings.

        subject: a `Subject`, or its shape. Raises `UsageError` for another shape, limits of another type, and an
        unknown or invalid limit.
        """
        judged = as_subject(subject)
        bounds = resolve_limits(limits).with_(judged.limits, f"the subject {judged.name}")
        return cls(judged, limits=bounds, **options)

    @property
    def policy(self) -> str:
        """The device type whose autocast rules the subject follows."""
        return self.emulated or self.device.partition(":")[0]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The 16-bit dtypes of the arms."""
        return tuple(dict.fromkeys(arm.dtype for arm in self.arms))

    def judges(self, check: str) -> bool:
        """Return whether a check is selected."""
        return self.checks is None or check in self.checks

    def among(self, checks: Collection[str]) -> list[str] | None:
        """Those of `checks` that are selected; None for all."""
        return None if self.checks is None else [slug for slug in self.checks if slug in checks]

    def only(self, run: Run) -> Run:
        """The run with the findings of selected checks, among which `coverage` always is."""
        return run if self.checks is None else run.only((*self.checks, COVERAGE))
