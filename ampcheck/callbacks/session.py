"""What the callbacks share: a watch that is entered when training begins, left when it ends, and reported once."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Any

from ampcheck.core.limits import Limits
from ampcheck.core.run import Run, Verdict, describe, emit, verify
from ampcheck.report.html import write_html
from ampcheck.watch import Watched, watched

Path = str | os.PathLike[str]


class Session:
    """A watch of one training after another. `run` is that of the last one; None before its end.

    every, level, name, limits: of `ampcheck.watch`. raises: whether a failure raises `AssertionError` at the end of
    training. json, html: where the run is written then.
    """

    def __init__(
        self,
        *,
        every: int = 10,
        level: str = "casts",
        name: str = "",
        limits: Limits | None = None,
        raises: bool = False,
        json: Path | None = None,
        html: Path | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {"every": every, "level": level, "name": name, "limits": limits}
        self._raises, self._json, self._html = raises, json, html
        self._stack: ExitStack | None = None
        self.seen: Watched | None = None
        self.run: Run | None = None

    @property
    def entered(self) -> bool:
        """Whether training is being watched."""
        return self._stack is not None

    def enter(self, model: Any, optimizer: Any, scaler: Any) -> None:
        """Begin to watch; what an earlier training left open ends first."""
        self.leave()
        stack = ExitStack()
        self.seen = stack.enter_context(watched(model, optimizer, scaler, **self._settings))
        self._stack = stack

    def step(self, loss: Any) -> None:
        """Tell a loss, if training is being watched."""
        if self.entered and self.seen is not None:
            self.seen.step(loss)

    def leave(self) -> Run | None:
        """End the watch: all hooks are gone. The run, which is new only if there was a watch."""
        if self._stack is not None and self.seen is not None:
            stack, self._stack = self._stack, None
            stack.close()
            self.run = self.seen.run
        return self.run

    def report(self, *, writes: bool = True, raises: bool = True) -> None:
        """Hand the run to whoever collects and write it, where `writes`; raise its failures, where asked for."""
        __tracebackhide__ = True
        if self.run is None:
            return
        if writes and self._json is not None:
            self.run.save(self._json)
        if writes and self._html is not None:
            write_html(self.run, self._html)
        if self._raises and raises:
            verify(self.run)
        else:
            emit(self.run)
            for finding in self.run.of(Verdict.FAIL) if writes else ():
                logging.getLogger("ampcheck").warning(describe(finding))

    def counts(self) -> dict[str, int]:
        """How many findings have each verdict, for a logger."""
        return {f"ampcheck/{verdict}": n for verdict, n in self.run.counts().items()} if self.run else {}
