"""Starts a subject in fresh processes: eager, cold, warm, from artifacts, in parts, with dynamic shapes."""

from __future__ import annotations

import base64
import math
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Progress, silent
from ampcheck.speed.startup.stats import (
    ARTIFACTS,
    CACHED,
    COLD,
    DYNAMIC,
    EAGER,
    FIXED,
    REGIONAL,
    WARM,
    Launch,
    Lookup,
    StartupArm,
    StartupStats,
)
from ampcheck.speed.stats import ArmTimes
from ampcheck.speed.worker import PATIENCE, Worker

ROOM = "ampcheck.speed.startup.child_process"


def measure_startup(
    target: str,
    *,
    mode: str = "default",
    precision: str = "float32",
    device: str = "cpu",
    backward: bool | None = None,
    regional: bool | None = None,
    dynamic: bool | None = None,
    cold: int = 1,
    warm: int = 3,
    budget: float = 2.0,
    env: Mapping[str, str | None] | None = None,
    cwd: str | None = None,
    pythonpath: Sequence[str] = (),
    timeout: float = PATIENCE,
    progress: Progress = silent,
) -> StartupStats:
    """Measure what a subject's start costs, each launch in a process of its own with cache folders of its own.

    target: `package.module:factory` or `path/to/file.py:factory`; each process loads it anew. mode, precision,
    backward: as of `step_of`. regional: also compile each of the model's repeated blocks instead of the whole; dynamic:
    also compile with `dynamic=True` and `dynamic=False`; None: where there are such blocks, where the shapes of the
    calls vary. cold, warm: launches with empty caches, and with those that the first cold launch filled; artifacts
    are taken as often as warm caches. budget: seconds in which an arm's steady state is timed beside eager. env: what
    differs from this environment, the cache folders apart. timeout: seconds for any one thing that a process does.

    Raises `UsageError` for a mode or precision that there is not, a subject that cannot be loaded or compiled, or a
    process that fails.
    """
    if not isinstance(target, str):
        raise UsageError(
            "start-up is measured in fresh processes, which load the subject by its name: give "
            f"'package.module:factory' or 'path/to/file.py:factory'; found {type(target).__name__}"
        )
    for name, given in (("cold", cold), ("warm", warm)):
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise UsageError(f"{name} is a number of launches, 1 or more; found {given!r}")
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
        raise UsageError(f"budget is seconds of measurement, above 0; found {budget!r}")
    if mode == EAGER:
        raise UsageError("mode is one of torch.compile; eager is measured beside it anyway")
    from ampcheck.speed.steps import Way

    Way(mode, precision)  # a wrong name is told before anything is launched
    with tempfile.TemporaryDirectory(prefix="ampcheck-", ignore_cleanup_errors=True) as folder:
        launcher = Launcher(
            target, Path(folder), device, precision, backward, budget, env or {}, cwd, tuple(pythonpath), timeout
        )
        compiled = {"mode": mode, "precision": precision}
        plan = _Plan(progress, 1 + cold + 2 * warm)
        plan.step("eager")
        eager = launcher.launch(EAGER, {"mode": EAGER, "precision": precision})
        facts = launcher.facts
        if facts["own"]:
            raise UsageError(
                f"{target} compiles by itself, so that eager and compiled cannot be told apart: give a module or "
                "function, not compiled, and its args"
            )
        arms = [StartupArm(EAGER, _told(EAGER, precision), (eager,))]
        left_out: dict[str, str] = {}

        def add(name: str, way: Mapping[str, Any], launches: Sequence[Launch]) -> None:
            arms.append(StartupArm(name, _told(mode, precision, way), tuple(launches)))

        made = []
        for number in range(cold):
            plan.step("cold caches")
            made.append(launcher.launch(COLD, compiled, cache=f"cold{number}", save=number == 0, pair=number == 0))
        add(COLD, compiled, made)
        warmed = []
        for number in range(warm):
            plan.step("warm caches")
            warmed.append(launcher.launch(WARM, compiled, cache="cold0", pair=number == 0))
        add(WARM, compiled, warmed)
        if made[0].saved:
            taken = []
            for number in range(warm):
                plan.step("artifacts")
                taken.append(launcher.launch(ARTIFACTS, compiled, cache=f"art{number}", take=True, pair=number == 0))
            add(ARTIFACTS, compiled, taken)
        else:
            left_out[ARTIFACTS] = launcher.unsaved or "torch.compiler.save_cache_artifacts saved nothing"
        others = {
            REGIONAL: ({"regional": True}, regional, facts["blocks"] > 1, "the model has no list of repeated blocks"),
            FIXED: ({"dynamic": False}, dynamic, facts["varying"], "the calls have the same shapes"),
            DYNAMIC: ({"dynamic": True}, dynamic, facts["varying"], "the calls have the same shapes"),
        }
        for name, (extra, asked, there, reason) in others.items():
            if there if asked is None else asked:
                plan.step(name)
                way = {**compiled, **extra}
                add(name, way, [launcher.launch(name, way, cache=name.replace(" ", "_"))])
            else:
                left_out[name] = reason if asked is None else "it was not asked for"
    return StartupStats(facts["name"], tuple(arms), device, precision, left_out, facts["environment"])


@dataclass(slots=True)
class _Plan:
    """Tells how far the launches are."""

    progress: Progress
    total: int
    done: int = 0

    def step(self, what: str) -> None:
        self.progress(f"a fresh process: {what}", self.done, max(self.total, self.done + 1))
        self.done += 1


@dataclass(slots=True)
class Launcher:
    """Launches processes that all load the same target. facts: what the last of them said of it."""

    target: str
    folder: Path
    device: str = "cpu"
    precision: str = "float32"
    backward: bool | None = None
    budget: float = 1.0
    env: Mapping[str, str | None] = field(default_factory=dict)
    cwd: str | None = None
    pythonpath: tuple[str, ...] = ()
    timeout: float = PATIENCE
    facts: dict[str, Any] = field(default_factory=dict)
    unsaved: str = ""

    def launch(
        self,
        name: str,
        way: Mapping[str, Any],
        *,
        cache: str = "none",
        save: bool = False,
        take: bool = False,
        pair: bool = True,
    ) -> Launch:
        """One fresh process from its import to its steady state, with the cache folder of this name.

        save: keep artifacts for those that `take` them. pair: measure the steady state and memory as well.
        """
        place = self.folder / cache
        env = {**self.env, "TORCHINDUCTOR_CACHE_DIR": str(place), "TRITON_CACHE_DIR": str(place / "triton")}
        artifacts = str(self.folder / "artifacts")
        told: dict[str, Any] = {}
        with Worker(
            ROOM, name=f"the {name} start of {self.target}", cwd=self.cwd, env=env, pythonpath=self.pythonpath
        ) as worker:

            def ask(command: str, **arguments: Any) -> None:
                told.update(worker.ask(command, timeout=self.timeout, **arguments))

            ask("load", target=self.target, device=self.device, backward=self.backward)
            if told["own"]:  # nothing can be chosen for it; who asked is told so
                told.update(built=0.0, passes=[0.0])
            else:
                if take:
                    ask("take", path=artifacts)
                ask("start", way=way)
                if save:
                    ask("save", path=artifacts)
                    self.unsaved = told.pop("save_untold", "")
                if pair and name not in CACHED:  # the others run the same code
                    ask("memory")
                if pair:
                    ask("pair", precision=self.precision, seconds=self.budget)
            worker.kill()  # PyTorch's own end takes seconds
        self.facts = {key: told.pop(key) for key in ("name", "own", "blocks", "varying", "environment")}
        return _launch(told)


def _launch(told: dict[str, Any]) -> Launch:
    """What a process told, as a record. The pickle is our own, made by the same release in a child of ours."""
    for name, made in (
        ("passes", tuple),
        ("off", tuple),
        ("lookups", lambda given: tuple(Lookup(**one) for one in given)),
        ("times", lambda given: tuple(ArmTimes(name, tuple(s), *rest) for name, s, *rest in given)),
        ("graph", lambda given: pickle.loads(base64.b64decode(given))),
    ):
        if name in told:
            told[name] = made(told[name])
    return Launch(**told)


def _told(mode: str, precision: str, way: Mapping[str, Any] | None = None) -> str:
    extra = {name: value for name, value in (way or {}).items() if name not in ("mode", "precision")}
    return ", ".join([mode, precision, *(f"{name}={value}" for name, value in extra.items())])
