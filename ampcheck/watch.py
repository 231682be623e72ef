"""The same eyes on a user's own loop, sampled: its training, and what is inside compiled graphs while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, overload

import torch

from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits, load_settings
from ampcheck.core.run import Finding, Run, Verdict, verify
from ampcheck.telemetry.checks import check_telemetry, tables
from ampcheck.telemetry.sites import Level
from ampcheck.telemetry.stats import TelemetryStats
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools import dynamo, interception
from ampcheck.torchtools.copying import modules_of
from ampcheck.training.monitor.checks import check_watched
from ampcheck.training.monitor.monitor import TrainingWatch
from ampcheck.training.monitor.report import watched_charts, watched_tables
from ampcheck.training.monitor.stats import WatchStats
from ampcheck.training.monitor.unwrapped import plain_optimizer


class _Asked:
    """What a `watch` sees; ask it inside the block or after it. Asking waits for the device."""

    def run(self) -> Run:
        """What the statistics say."""
        raise NotImplementedError

    def verify(self) -> Run:
        """`run()`, reported to whoever collects; raises `AssertionError` with its failures."""
        __tracebackhide__ = True
        return verify(self.run())


class Seen(_Asked):
    """What a `watch` sees of compiled graphs; ask it inside the block or after it. Asking waits for the device."""

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


class SeenTraining(_Asked):
    """What a `watch` sees of training; ask it inside the block or after it. Asking waits for the device.

    compiled: what it sees inside compiled graphs; None where the model has none.
    """

    def __init__(self, training: TrainingWatch, name: str, limits: Limits, device: str, compiled: Seen | None) -> None:
        self._training, self._name, self._limits, self._device = training, name, limits, device
        self.compiled = compiled

    def step(self, loss: torch.Tensor | float) -> None:
        """Tell the loss of a step, a number or a tensor of one element. It is charted; the last must be finite."""
        self._training.step(loss)

    def stats(self) -> WatchStats:
        """The statistics of gradients, updates and the loss scale so far."""
        return self._training.read(self._name)

    def run(self) -> Run:
        """What the statistics say: `overflow` of the loss, `nonfinite-gradient`, `gradient-underflow`, `loss-scale`,
        `stagnation`, `coverage`, and what is found inside compiled graphs."""
        stats = self.stats()
        run = Run(
            environment=environment(self._device),
            findings=tuple(check_watched(stats, self._limits)),
            coverage=stats.coverage,
            tables=watched_tables(stats, self._limits),
            charts=watched_charts(stats, self._limits),
            title=f"the training of {self._name}",
        )
        if self.compiled is None:
            return run
        inside = self.compiled.run()
        # Something was looked at even if no compiled graph held what telemetry measures.
        return run + replace(inside, findings=tuple(map(_no_failure_of_coverage, inside.findings)))


def _no_failure_of_coverage(finding: Finding) -> Finding:
    missed = finding.check == "coverage" and finding.verdict is Verdict.FAIL
    return replace(finding, verdict=Verdict.SKIP) if missed else finding


@overload
def watch(
    model: Any,
    optimizer: None = None,
    scaler: None = None,
    *,
    every: int = 1,
    level: str = "casts",
    name: str = "",
    limits: Limits | None = None,
) -> AbstractContextManager[Seen]: ...


@overload
def watch(
    model: Any,
    optimizer: Any,
    scaler: Any = None,
    *,
    every: int = 1,
    level: str = "casts",
    name: str = "",
    limits: Limits | None = None,
) -> AbstractContextManager[SeenTraining]: ...


def watch(
    model: Any,
    optimizer: Any = None,
    scaler: Any = None,
    *,
    every: int = 1,
    level: str = "casts",
    name: str = "",
    limits: Limits | None = None,
) -> AbstractContextManager[Any]:
    """Look at a model while it runs in the user's own code, and change nothing that it computes.

    With `optimizer`, training is watched: of each N-th step that the optimizer makes the gradients of its parameters
    (range, zeros, infinities), what the step changes, and of every step the loss scale and whether it was skipped.
    Without, and beside it where the model is compiled, what is inside the graphs that Inductor compiles is measured.

    model: a module; what `torch.compile` returned, with any of its options; a module of which parts are compiled; a
    compiled function. optimizer: one, or a list; also as a library wraps it. scaler: a `torch.amp.GradScaler`, where
    one is used. every: measure each N-th step, and each N-th call of a graph, the first among them. level: of what is
    inside graphs, `casts` (every rounding to 16 bits that stays one under fusion), `ops` (the result of every op), or
    `all` (every floating value). limits: by default those of `[tool.ampcheck]`.

    Training: weights are copied for the time of a measured step; those of fewer than 32 bits once more for the whole
    block, with a byte for each element, and 64 MiB are used to compare them. Steps inside compiled code
    (`torch.compile(optimizer.step)`) cannot be measured. Nothing is read from the device before `seen.run()`, except on
    the CPU.

    Compiled: on entering, compiled code is forgotten (`torch.compiler.reset`), so that the next call compiles graphs
    with statistics; compilation takes up to twice as long, at level `all` more. A value that overflows or is NaN is
    measured again with everything counted, which compiles its graph once more. After the block the plain graphs go on.

    Raises `UsageError` for a level or a number that does not exist, for a model that cannot be called, for what is no
    optimizer or scaler, for a scaler without an optimizer, and for a watch of compiled code inside another.
    """
    require_settings(every, level)
    if not callable(model):
        raise UsageError(f"what is watched must be a module or a function; found {type(model).__name__}")
    if optimizer is None and scaler is not None:
        raise UsageError("a scaler is watched by what it does to an optimizer's steps: give optimizer= as well")
    if scaler is not None and not all(hasattr(scaler, one) for one in ("step", "update", "is_enabled")):
        raise UsageError(f"scaler must be a torch.amp.GradScaler; found {type(scaler).__name__}")
    return _watching(model, optimizer, scaler, every, Level(level), name, limits)


def require_settings(every: int, level: str) -> None:
    """Raises `UsageError` for a level or a number that `watch` does not know."""
    levels = [one.value for one in Level]
    if level not in levels:
        raise UsageError(f"there is no level {level!r}; there are {', '.join(levels)}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"every must be a whole number of calls, 1 or more; found {every!r}")


@contextmanager
def _watching(
    model: Any, optimizer: Any, scaler: Any, every: int, level: Level, name: str, limits: Limits | None
) -> Iterator[Any]:
    plain = dynamo.uncompiled(model)
    roots = modules_of(plain)
    known = name or getattr(plain, "__name__", type(plain).__name__)
    place = next((str(p.device) for root in roots for p in root.parameters()), "cpu")
    device = torch.device(place).type
    allowed = limits or load_settings().limits
    with ExitStack() as stack:
        inside = None
        if optimizer is None or _is_compiled(model, roots):
            if interception.is_intercepted():
                raise UsageError(
                    "a watch inside another would leave the outer one with nothing: watch one model at a time"
                )
            telemetry = Telemetry(roots, level=level, every=every)
            stack.callback(telemetry.release)
            dynamo.reset()
            stack.enter_context(telemetry.watching())
            inside = Seen(telemetry, known, allowed, device)
        if optimizer is None:
            yield inside
            return
        training = TrainingWatch(_optimizers(optimizer), scaler, _names(roots), every=every)
        stack.enter_context(training.watching())
        yield SeenTraining(training, known, allowed, device, inside)


def _is_compiled(model: Any, roots: Sequence[torch.nn.Module]) -> bool:
    parts = (part for root in roots for part in root.modules())
    return dynamo.is_compiled(model) or any(map(dynamo.is_compiled, parts))


def _optimizers(given: Any) -> list[torch.optim.Optimizer]:
    many = list(given) if isinstance(given, (list, tuple)) else [given]
    if not many:
        raise UsageError("optimizer is an empty list; give one optimizer or several")
    found = {id(one): one for one in map(plain_optimizer, many)}
    return list(found.values())


def _names(roots: Sequence[torch.nn.Module]) -> dict[int, str]:
    many = len(roots) > 1
    return {
        id(parameter): (f"{number}.{name}" if many else name).replace("_orig_mod.", "")
        for number, root in enumerate(roots)
        for name, parameter in root.named_parameters()
    }
