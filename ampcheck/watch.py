"""The same eyes on a user's own loop: what is inside compiled graphs while it runs, sampled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampcheck import compiler
from ampcheck.environment import environment
from ampcheck.errors import UsageError
from ampcheck.prepare import modules_of
from ampcheck.record import Run, verify
from ampcheck.settings import Limits, load_settings
from ampcheck.telemetry.checks import check_telemetry, tables
from ampcheck.telemetry.sites import Level
from ampcheck.telemetry.stats import TelemetryStats
from ampcheck.telemetry.telemetry import Telemetry


class Seen:
    """What a `watch` sees; ask it inside the block or after it. Asking waits for the device."""

    def __init__(self, telemetry: Telemetry, name: str, limits: Limits, device: str) -> None:
        self._telemetry, self._name, self._limits, self._device = telemetry, name, limits, device

    def stats(self) -> TelemetryStats:
        """The statistics of every value that is measured."""
        return self._telemetry.read(self._name)

    def run(self) -> Run:
        """What the statistics say: `overflow`, `nonfinite-gradient`, `silent-zero`, `flush`, `headroom`, `coverage`."""
        stats = self.stats()
        return Run(
            environment=environment(self._device),
            findings=tuple(check_telemetry(stats, self._limits)),
            coverage=stats.coverage,
            tables=tables(stats),
            title=f"inside the compiled graphs of {self._name}",
        )

    def verify(self) -> Run:
        """`run()`, reported to whoever collects; raises `AssertionError` with its failures."""
        __tracebackhide__ = True
        return verify(self.run())


@contextmanager
def watch(
    model: Any, *, every: int = 1, level: str = "casts", name: str = "", limits: Limits | None = None
) -> Iterator[Seen]:
    """Measure what is inside the graphs that Inductor compiles for a model, while it runs in the user's own code.

    model: what `torch.compile` returned, with any of its options; a module of which parts are compiled; or a compiled
    function. every: measure each N-th call of a graph, the first among them; the others run the plain graph, and no
    call recompiles. level: `casts` (every rounding to 16 bits that stays one under fusion), `ops` (the result of every
    op), or `all` (every floating value of the graphs). limits: by default those of `[tool.ampcheck]`.

    On entering, compiled code is forgotten (`torch.compiler.reset`), so that the next call compiles graphs with
    statistics; compilation takes up to twice as long, at level `all` more. A value that overflows or is NaN is measured
    again with everything counted, which compiles its graph once more. After the block the plain graphs go on. Nothing
    is read from the device before `seen.run()`. Raises `UsageError` for a level or a number that does not exist, for a
    model that cannot be called, and for a watch inside another.
    """
    levels = [one.value for one in Level]
    if level not in levels:
        raise UsageError(f"there is no level {level!r}; there are {', '.join(levels)}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"every must be a whole number of calls, 1 or more; found {every!r}")
    if not callable(model):
        raise UsageError(f"what is watched must be a module or a function; found {type(model).__name__}")
    roots = modules_of(compiler.uncompiled(model))
    telemetry = Telemetry(roots, level=Level(level), every=every)
    plain = compiler.uncompiled(model)
    known = name or getattr(plain, "__name__", type(plain).__name__)
    device = next((str(p.device) for root in roots for p in root.parameters()), "cpu")
    if compiler.is_intercepted():
        raise UsageError("a watch inside another would leave the outer one with nothing: watch one model at a time")
    compiler.reset()
    try:
        with telemetry.watching():
            yield Seen(telemetry, known, limits or load_settings().limits, torch.device(device).type)
    finally:
        telemetry.release()
