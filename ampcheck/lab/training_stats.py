"""The records of the lab's training runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.lab.loops import BATCH, FLOAT32, LENGTH, Culprit, Mode, StepSeen
from ampcheck.speed.memory import Peak
from ampcheck.speed.stats import SpeedStats


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One precision, eager or compiled.

    steps: what each step showed. validation: (step, loss on held-out text). stopped: the step that left a loss or a
    weight infinite or NaN, with the `culprit`, found in eager mode. first: seconds of the first step. peak: of a step.
    """

    mode: Mode
    compiled: bool
    steps: tuple[StepSeen, ...]
    validation: tuple[tuple[int, float], ...]
    first: float
    stopped: int | None = None
    culprit: Culprit | None = None
    peak: Peak = field(default_factory=lambda: Peak(None))

    @property
    def name(self) -> str:
        """Such as `float32, compiled`."""
        return f"{self.mode.name}{', compiled' if self.compiled else ''}"


@dataclass(frozen=True, slots=True)
class TrainingStats:
    """All runs. seeds: the last validation loss in float32 with other seeds. speeds: paired, against eager float32.
    lacking: runs that this machine has no tool for, with the reason; broken: runs that raised. moving: autocast float16
    once more, with a scaler that doubles its scale after `growth` good steps. tokens: of one step."""

    device: str
    planned: int
    runs: tuple[TrainingRun, ...]
    seeds: tuple[float, ...]
    speeds: tuple[SpeedStats, ...]
    lacking: Mapping[str, str]
    broken: Mapping[str, str] = field(default_factory=dict)
    moving: TrainingRun | None = None
    tokens: int = BATCH * LENGTH

    @property
    def growth(self) -> int:
        """After how many good steps the scaler of `moving` doubled its scale."""
        return growth_for(self.planned)

    @property
    def reference(self) -> TrainingRun | None:
        """float32 in eager mode."""
        return next((run for run in self.runs if run.mode == FLOAT32 and not run.compiled), None)


def growth_for(steps: int) -> int:
    """After how many good steps the scaler of the moving scale doubles it: twelve times in a run, which is more than
    float16 bears, so that its way up and back is seen. PyTorch's default is 2,000."""
    return max(2, steps // 12)
