"""The path of a GradScaler's scale over the steps of a loop: growth, back-off, skipped steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ampcheck.training.protocol.events import Act, Event
from ampcheck.training.window import ScaleWindow

COLLAPSE = 8
"""Steps skipped one after the other, with nothing but smaller scales between them, that are no back-off any more."""


@dataclass(frozen=True, slots=True)
class ScalerStep:
    """What a scaler did between two updates, or in one step of the loop where it was not updated.

    step: the number of the loop's step. scale: the one in use. taken, skipped: calls of `scaler.step` that did and did
    not step their optimizer. new_scale: the one after `update`; None without one. nonfinite: parameters whose gradient
    was infinite or NaN.
    """

    step: int
    scale: float
    taken: int = 0
    skipped: int = 0
    new_scale: float | None = None
    nonfinite: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScalerStats:
    """The path of one scaler. scaler: its path in the loop. enabled: false where it passes everything through."""

    scaler: str
    enabled: bool
    steps: tuple[ScalerStep, ...] = ()
    skipped_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def trajectory(self) -> tuple[tuple[int, float, bool], ...]:
        """(step, scale, whether no optimizer was stepped) of each scaler step."""
        return tuple((one.step, one.scale, not one.taken) for one in self._stepping)

    @property
    def scale_in_use(self) -> float | None:
        """The scale of the last step that was taken; None where none was."""
        return next((one.scale for one in reversed(self.steps) if one.taken), None)

    @property
    def last_scale(self) -> float | None:
        """The scale that the next step would have."""
        if not self.steps:
            return None
        last = self.steps[-1]
        return last.scale if last.new_scale is None else last.new_scale

    @property
    def growths(self) -> int:
        """Updates that raised the scale."""
        return sum(one.new_scale is not None and one.new_scale > one.scale for one in self.steps)

    @property
    def backoffs(self) -> int:
        """Updates that lowered the scale."""
        return sum(one.new_scale is not None and one.new_scale < one.scale for one in self.steps)

    @property
    def skips(self) -> int:
        """Steps in which an optimizer was not stepped."""
        return sum(one.skipped > 0 for one in self.steps)

    @property
    def first_skip(self) -> int | None:
        """The number of the first step in which an optimizer was not stepped."""
        return next((one.step for one in self.steps if one.skipped), None)

    @property
    def collapsed(self) -> bool:
        """Whether the last `COLLAPSE` steps, or more, were all skipped."""
        return skipped_last(self.trajectory) >= COLLAPSE

    @property
    def _stepping(self) -> tuple[ScalerStep, ...]:
        return tuple(one for one in self.steps if one.taken or one.skipped)


def skipped_last(trajectory: Iterable[tuple[int, float, bool]], ceiling: float | None = None) -> int:
    """How many steps at the end of a trajectory were skipped one after the other, at scales up to `ceiling`."""
    count = 0
    for _, scale, skipped in trajectory:
        if not skipped:
            count = 0
        elif ceiling is None or scale <= ceiling:
            count += 1
    return count


def has_fallen(first: float, last: float | None) -> bool:
    """Whether a scale fell below 1 from above. One that was set lower has its reason: sums of losses, say."""
    return last is not None and last < 1 <= first


def is_settled(window: ScaleWindow | None, scale: float, skipped: bool) -> bool:
    """Whether the last step was made, at a scale that suits the gradients: what fell so far is where it belongs."""
    return window is not None and not skipped and window.contains(scale)


def measure_scalers(events: Iterable[Event]) -> dict[str, ScalerStats]:
    """The path of every scaler that a recorder heard of, by its path in the loop.

    One with events but without a `scaler.step` has no steps. A disabled scaler has scale 1.
    """
    paths: dict[str, _Path] = {}
    for event in events:
        if event.act in (Act.SCALE, Act.UNSCALE, Act.SCALER_STEP, Act.UPDATE):
            paths.setdefault(event.who, _Path(event.who)).hear(event)
    return {who: path.told() for who, path in paths.items()}


def in_succession(scalers: Mapping[str, ScalerStats]) -> dict[str, ScalerStats]:
    """Scalers at one place (`scaler`, `scaler#2`, ...) of which each begins after the one before has ended, as one."""
    told: dict[str, ScalerStats] = {}
    heads: dict[str, str] = {}
    for who, one in scalers.items():
        head = heads.setdefault(who.partition("#")[0], who)
        before = told.get(head)
        if before is None or not (before.steps and one.steps and before.steps[-1].step < one.steps[0].step):
            told[who] = one
            continue
        blamed = dict(Counter(before.skipped_by) + Counter(one.skipped_by))
        told[head] = ScalerStats(head, before.enabled or one.enabled, before.steps + one.steps, blamed)
    return told


class _Path:
    """The steps of one scaler as they become known."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.enabled = False
        self.steps: list[ScalerStep] = []
        self.skipped_by: Counter[str] = Counter()
        self.waiting: list[Event] = []

    def hear(self, event: Event) -> None:
        self.enabled |= event.enabled
        if self.waiting and self.waiting[-1].step != event.step:
            self._close(None)
        if event.act is Act.SCALER_STEP:
            self.waiting.append(event)
        elif event.act is Act.UPDATE:
            self._close(event)

    def told(self) -> ScalerStats:
        self._close(None)
        return ScalerStats(self.who, self.enabled, tuple(self.steps), dict(self.skipped_by))

    def _close(self, update: Event | None) -> None:
        heard = [*self.waiting, update] if update else self.waiting
        if not heard:
            return
        scale = next((one.scale for one in heard if one.scale is not None), None if heard[0].enabled else 1.0)
        stepping = [one for one in heard if one.act is Act.SCALER_STEP]
        self.waiting = []
        if scale is None:
            return
        skipped = [one for one in stepping if one.skipped]
        bad = tuple(dict.fromkeys(name for one in skipped for name in one.nonfinite))
        self.skipped_by.update(bad)
        new = update.new_scale if update else None
        taken = len(stepping) - len(skipped)
        self.steps.append(ScalerStep(heard[0].step, scale, taken, len(skipped), new, bad))
