"""What pytest-benchmark reads in place of a clock: the seconds of a paired measurement that was made before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from ampcheck.core.errors import UsageError

if TYPE_CHECKING:
    from ampcheck.speed.paired import Step


class Replay:
    """A timer for pytest-benchmark that tells seconds measured before. It is read at both ends of each round."""

    __name__ = "ampcheck"

    def __init__(self) -> None:
        self._readings: list[float] = []

    def __call__(self) -> float:
        """The next reading. Raises `UsageError` where none is left."""
        if not self._readings:
            _unlike("reads its timer more than twice a round")
        return self._readings.pop()

    @property
    def playing(self) -> bool:
        """Whether a round is still to be told, or to be told the end of."""
        return bool(self._readings)

    def tell(self, benchmark: Any, seconds: Iterable[float], step: Step) -> None:
        """Let the fixture `benchmark` take these durations for those of its rounds.

        step: what a profile of --benchmark-cprofile runs, and nothing else does.
        """
        taken = list(seconds)
        self._readings = [reading for second in reversed(taken) for reading in (second, 0.0)]
        benchmark.pedantic(lambda: None if self.playing else step(), rounds=len(taken))
        if self._readings:
            _unlike("reads its timer less than twice a round")


def _unlike(what: str) -> NoReturn:
    from importlib.metadata import version

    raise UsageError(f"pytest-benchmark {version('pytest-benchmark')} {what}: use a version that ampcheck knows")
