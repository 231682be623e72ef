"""A timer that makes pytest-benchmark record the seconds of an earlier paired measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from ampcheck.core.errors import UsageError


class RecordedTimer:
    """A timer for pytest-benchmark, which reads it at both ends of each round."""

    __name__ = "ampcheck"

    def __init__(self) -> None:
        self._readings: list[float] = []

    def __call__(self) -> float:
        """The next reading. Raises `UsageError` after the last one."""
        if not self._readings:
            _incompatible("reads its timer more than twice a round")
        return self._readings.pop()

    def replay(self, benchmark: Any, seconds: Iterable[float], step: Callable[[], object]) -> None:
        """Make the fixture `benchmark` record these durations of its rounds.

        step: runs only in a profile of --benchmark-cprofile, which is outside the rounds.
        """
        durations = list(seconds)
        self._readings = [reading for duration in reversed(durations) for reading in (duration, 0.0)]
        benchmark.pedantic(lambda: None if self._readings else step(), rounds=len(durations))
        if self._readings:
            _incompatible("reads its timer less than twice a round")


def _incompatible(reason: str) -> NoReturn:
    from importlib.metadata import version

    raise UsageError(f"pytest-benchmark {version('pytest-benchmark')} {reason}: use a version that ampcheck supports")
