"""An audit as it runs: its stages with the time they may take, the verdicts so far, and what an interrupt leaves."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.causes import with_causes
from ampcheck.cli.profile import Profile
from ampcheck.cli.stage_times import StageTimes, about
from ampcheck.core.environment import environment
from ampcheck.core.progress import Listener
from ampcheck.core.run import Run, merge
from ampcheck.core.text import counted
from ampcheck.report.progress import ProgressBar
from ampcheck.report.sections import arrange
from ampcheck.report.terminal import problem_lines

_LOADING = "loading torch and the subject"
_LONG = 10.0
"""Seconds from which a training is announced."""

_EARLY = 4
"""Lines of the eager verdicts that are printed before anything is compiled."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during an audit. run: what was judged until then. printed: lines of it that were printed."""

    def __init__(self, run: Run, printed: int) -> None:
        self.run, self.printed = run, printed


class Following:
    """Follows the audit of one target.

    judge: makes of the run so far what the repository reports of it. early: print the eager verdicts before anything is
    compiled. profile: samples every stage. printed: the lines of the eager verdicts.
    """

    def __init__(
        self,
        bar: ProgressBar,
        times: StageTimes,
        judge: Callable[[Run], Run],
        *,
        early: bool,
        profile: Profile | None = None,
    ) -> None:
        self._bar, self._times, self._judge, self._early, self._profile = bar, times, judge, early, profile
        self._runs: list[Run] = []
        self._seconds: dict[str, float] = {}
        self._stage, self._begin, self._done, self._total = "", 0.0, 0, 1
        self.printed, self._noted = 0, False
        self._progress(_LOADING, 0, 1)

    @property
    def listener(self) -> Listener:
        """The callbacks of the audit."""
        return Listener(self._progress, self._runs.append, self._compiling, self._training)

    def finish(self) -> None:
        """Keep the times of an audit that came to its end."""
        self._clock("")
        self._times.save(self._seconds)

    def partial(self, subject: str, device: str) -> Run | None:
        """The run so far, in which `coverage` says that it is incomplete; None before the first stage."""
        if self._stage == _LOADING:
            return None
        from ampcheck.autocast.device import place

        run = merge(self._runs)
        text = f"interrupted during the stage {self._stage}; {self._done} of {self._total} stages were judged"
        lacking = COVERAGE.incomplete(subject, text, hint="run it again to its end")
        findings = (lacking, *with_causes(run.findings))
        facts = environment(place(device).device)
        return replace(run, findings=findings, environment=facts, title=f"audit of {subject}, interrupted")

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._clock(stage)
        self._done, self._total = done, total
        known = stage in self._times.seconds
        self._bar(f"{stage}, {about(self._expected([stage]))}" if known else stage, done, total)

    def _expected(self, stages: Iterable[str]) -> float:
        # Of loading, which waits for the disk, nothing follows for the other stages.
        return self._times.expected(stages, {s: time for s, time in self._seconds.items() if s != _LOADING})

    def _clock(self, stage: str) -> None:
        """End the current stage and begin the next."""
        now = time.monotonic()
        if self._stage and self._done < self._total:
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._begin
        self._stage, self._begin = stage, now
        if self._profile is not None:
            self._profile.begin(stage)

    def _training(self, steps: int) -> None:
        expected = self._expected(self._times.seconds)
        if self._noted or (self._times.seconds and expected < _LONG) or os.environ.get("RANK", "0") != "0":
            return
        self._noted = True
        time_text = f"{about(expected)}, as the last time" if expected else "each takes several times as long as alone"
        text = (
            f"ampcheck: up to {counted(steps, 'training steps')} are observed; {time_text}; --steps N observes fewer, "
        )
        text += "-v or --json PATH shows every finding in full"
        with self._bar.paused():
            print(text, file=sys.stderr, flush=True)

    def _compiling(self) -> None:
        if not self._early or not self._runs:
            return

        begun = (*self._seconds, self._stage)
        left = self._expected(stage for stage in self._times.seconds if stage not in begun)
        content = arrange(self._judge(merge(self._runs)))
        width = shutil.get_terminal_size((80, 24)).columns
        lines = [f"eager: {content.headline}; now compiling{f', {about(left)}' if left else ''}"]
        lines += problem_lines(content, width, limit=_EARLY - 1, more="in full below")
        with self._bar.paused():
            print(*lines, sep="\n", flush=True)
        self.printed = len(lines)


@contextmanager
def second_interrupt_ends() -> Iterator[None]:
    """Ctrl-C raises `KeyboardInterrupt` once, so that what was judged can be reported; the next ends the process.

    A handler that is not Python's (`getsignal` returns None) stays, as it could not be restored.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
