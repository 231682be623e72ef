"""The common part of the callbacks: watch from the begin of training to its end, and report once."""

from __future__ import annotations

import os
from typing import Any

from ampcheck.core.limits import Limits
from ampcheck.core.run import Run
from ampcheck.core.writer import Writer
from ampcheck.outcome.ending import end
from ampcheck.report.html import write_html
from ampcheck.watch import Watched, require_settings, watched

Path = str | os.PathLike[str]


class WatchCallback:
    """A watch of one training after another. `run` is that of the last one; None before its end.

    every, level, name, limits, fail_on: of `ampcheck.watch`. json, html: where the run is written at the end.
    writer: follows each watch, see `Watched.follow`.
    """

    def __init__(
        self,
        *,
        every: int = 10,
        level: str = "casts",
        name: str = "",
        limits: Limits | None = None,
        fail_on: str | None = None,
        json: Path | None = None,
        html: Path | None = None,
        writer: Writer | None = None,
    ) -> None:
        super().__init__()
        require_settings(every, level, fail_on)
        self._settings: dict[str, Any] = {"every": every, "level": level, "name": name, "limits": limits}
        self._settings["exact"] = False  # a whole training is watched
        self._fail_on, self._json, self._html, self._writer = fail_on, json, html, writer
        self._seen: Watched | None = None
        self.run: Run | None = None

    def _begin(self, model: object, optimizer: object, scaler: object, *, writes: bool = True) -> None:
        """Begin to watch; a watch that an earlier training left open ends first. writes: as of `_report`."""
        self._end()
        self._seen = watched(model, optimizer, scaler, **self._settings).__enter__()
        if writes and self._writer is not None:
            self._seen.follow(self._writer)

    def _step(self, loss: Any) -> None:
        """Record a loss, if training is watched."""
        if self._seen is not None:
            self._seen.step(loss)

    def _end(self) -> dict[str, int] | None:
        """End the watch: all hooks are removed. How many findings have each verdict; None if there was no watch."""
        if self._seen is None:
            return None
        seen, self._seen = self._seen, None
        seen.__exit__(None, None, None)
        self.run = seen.run
        return {f"ampcheck/{verdict}": count for verdict, count in self.run.counts().items()}

    def _report(self, *, writes: bool = True, raises: bool = True) -> None:
        """Emit the run, print and write it where `writes`, and raise its failures as `fail_on` says where `raises`."""
        __tracebackhide__ = True
        if self.run is None:
            return
        if writes and self._json is not None:
            self.run.save(self._json)
        if writes and self._html is not None:
            write_html(self.run, self._html)
        end(self.run, self._fail_on, prints=writes, raises=raises)
