"""Starts a subject in fresh processes: eager, cold, warm, from artifacts, by regions, with dynamic shapes."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Progress, silent
from ampcheck.core.worker import Worker
from ampcheck.records.startup import (
    ARTIFACTS,
    CACHED,
    COLD,
    DYNAMIC,
    EAGER,
    FIXED,
    REGIONAL,
    WARM,
    Launch,
    StartupArm,
    StartupStats,
)
from ampcheck.speed.options import SpeedOptions

if TYPE_CHECKING:
    from ampcheck.speed.steps import StepConfig

BUDGET = 2.0
"""Seconds in which the steady state of an arm is timed in turn with eager mode."""


def measure_startup(
    target: str,
    options: SpeedOptions | None = None,
    *,
    device: str = "cpu",
    progress: Progress = silent,
) -> StartupStats:
    """Measure the cost of a subject's start, each launch in a process of its own with cache folders of its own.

    target: `package.module:function` or `path/to/file.py:function`, which each process loads. Raises `UsageError` for a
    subject that cannot be loaded or compiled, or a process that fails.
    """
    if not isinstance(target, str):
        raise UsageError(
            "start-up is measured in fresh processes, which load the subject by its name: pass "
            f"'package.module:function' or 'path/to/file.py:function'; found {type(target).__name__}"
        )
    options = options or SpeedOptions()
    options.require_used("startup")
    if options.mode == EAGER:
        raise UsageError("mode is one of torch.compile: leave eager out, which is the reference in any case")
    from ampcheck.speed.steps import StepConfig

    config = StepConfig(options.mode or "default", options.precision or "float32")
    total = 1 + options.cold + 2 * options.warm
    with tempfile.TemporaryDirectory(prefix="ampcheck-", ignore_cleanup_errors=True) as folder:
        launcher = Launcher(target, Path(folder), options, device)
        arms: list[StartupArm] = []

        def launch(name: str, config: StepConfig, count: int = 1, cache: str = "") -> None:
            """Launch an arm `count` times, with a cache folder for each launch or with one of this name."""
            launches = []
            for number in range(count):
                done = sum(len(arm.launches) for arm in arms) + number
                progress(f"a fresh process: {name}", done, max(total, done + 1))
                own = cache or f"{name}{number}".replace(" ", "_")
                launches.append(launcher.launch(name, config, cache=own, number=number))
            arms.append(StartupArm(name, str(config), tuple(launches)))

        launch(EAGER, replace(config, mode=EAGER))
        facts = launcher.facts
        if facts["own"]:
            raise UsageError(
                f"{target} compiles by itself, so that eager and compiled cannot be separated: pass a module or "
                "function, not compiled, and its args"
            )
        launch(COLD, config, options.cold)
        launch(WARM, config, options.warm, cache=f"{COLD}0")
        left_out: dict[str, str] = {}
        if arms[1].launches[0].saved:
            launch(ARTIFACTS, config, options.warm)
        else:
            left_out[ARTIFACTS] = launcher.unsaved or "torch.compiler.save_cache_artifacts saved nothing"
        blocks, shapes = facts["blocks"] > 1, facts["varying"]
        for name, variant, wanted, applies, reason in (
            (REGIONAL, replace(config, regional=True), options.regional, blocks, "the model has no repeated blocks"),
            (FIXED, replace(config, dynamic=False), options.dynamic, shapes, "the calls have the same shapes"),
            (DYNAMIC, replace(config, dynamic=True), options.dynamic, shapes, "the calls have the same shapes"),
        ):
            if applies if wanted is None else wanted:
                launch(name, variant)
            else:
                left_out[name] = reason if wanted is None else "it was not asked for"
    return StartupStats(facts["name"], tuple(arms), left_out, facts["environment"])


@dataclass(slots=True)
class Launcher:
    """Launches processes of one target. facts: that `load` reports. unsaved: why there are no artifacts."""

    target: str
    folder: Path
    options: SpeedOptions = field(default_factory=SpeedOptions)
    device: str = "cpu"
    facts: dict[str, Any] = field(default_factory=dict)
    unsaved: str = ""

    def launch(self, name: str, config: StepConfig, *, cache: str, number: int = 0) -> Launch:
        """One fresh process from its import to its steady state, with the cache folder of this name.

        The first launch of an arm is timed in the steady state as well; the first cold one saves artifacts.
        """
        options, folder = self.options, self.folder / cache
        env = {**options.env, "TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
        artifacts = str(self.folder / "artifacts")
        figures: dict[str, Any] = {}
        with Worker(
            "ampcheck.speed.startup.child_process:Start",
            name=f"the {name} start of {self.target}",
            cwd=options.cwd,
            env=env,
            pythonpath=options.pythonpath,
        ) as worker:

            def ask(command: str, **arguments: Any) -> Any:
                return worker.ask(command, timeout=options.timeout, **arguments)

            self.facts, seconds = ask("load", target=self.target, device=self.device, backward=options.backward)
            figures.update(seconds)
            if self.facts["own"]:  # the caller raises
                return Launch(**figures, built=0.0, passes=(0.0,))
            if name == ARTIFACTS:
                figures.update(ask("load_artifacts", path=artifacts))
            figures.update(ask("start", config=asdict(config)))
            if name == COLD and number == 0:
                figures.update(ask("save_artifacts", path=artifacts))
                self.unsaved = figures.pop("unsaved")
            if number == 0:
                if name not in CACHED:  # those run the same code as the cold start
                    figures.update(ask("memory"))
                budget = BUDGET if options.budget is None else options.budget
                figures.update(ask("pair", precision=config.precision, seconds=budget))
            worker.kill()  # PyTorch's own end takes seconds
        return Launch(**figures)
