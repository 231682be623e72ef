"""Real starts in fresh processes: cold, warm, from artifacts, and with caches that are switched off."""

import math
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict
from ampcheck.records.startup import ARTIFACTS, COLD, EAGER, FIXED, REGIONAL, WARM, Launch, StartupArm
from ampcheck.speed import memory, steps
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.startup.child_process import Start
from ampcheck.speed.startup.judge import check_startup, startup_run
from ampcheck.speed.startup.measure import Launcher, measure_startup
from ampcheck.speed.steps import StepConfig

TARGETS = Path(__file__).parent / "startup_targets.py"

needs_artifacts = pytest.mark.skipif(
    not hasattr(torch.compiler, "save_cache_artifacts"), reason="torch.compiler.save_cache_artifacts came with 2.7"
)


@pytest.fixture(scope="module")
def stats(tmp_path_factory):
    """Measured once; under xdist by one worker, while the others wait for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return measure()
    kept = tmp_path_factory.getbasetemp().parent / "startup.pickle"
    lock = kept.with_suffix(".lock")
    while not kept.exists():
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            time.sleep(0.2)
            continue
        try:
            if not kept.exists():
                part = kept.with_suffix(".part")
                part.write_bytes(pickle.dumps(measure()))
                part.replace(kept)
        finally:
            lock.unlink()
    return pickle.loads(kept.read_bytes())


def measure():
    return measure_startup(f"{TARGETS}:products", SpeedOptions(warm=1, budget=0.1))


def find(findings, check):
    return [finding for finding in findings if finding.check == check]


@needs_artifacts
def test_warm_caches_and_artifacts_are_used(stats):
    found = find(check_startup(stats), "start-up")
    assert [finding.verdict for finding in found] == [Verdict.PASS, Verdict.PASS], found
    assert "a start with warm caches compiled nothing again: 2 of 2 lookups hit" in found[0].message
    assert "a start with loaded artifacts compiled nothing again" in found[1].message


@needs_artifacts
def test_each_arm_has_its_graphs_and_cache_lookups(stats):
    assert [arm.name for arm in stats.arms] == [EAGER, COLD, WARM, ARTIFACTS]
    cold, warm, taken = (stats.arm(name).launches[0] for name in (COLD, WARM, ARTIFACTS))
    assert (cold.count("miss"), cold.count("hit")) == (2, 0)
    assert (warm.count("miss"), warm.count("hit")) == (0, 2)
    assert (taken.count("miss"), taken.count("hit")) == (0, 2)
    assert cold.saved == taken.taken == 2
    assert cold.saved_bytes > 1000
    assert "gm" in cold.lookups[-1].parts  # what a key is made of, so that a miss can tell what differs
    assert [len(launch.graph.graphs) for launch in (cold, warm, taken)] == [1, 1, 1]
    assert [launch.graph.ran for launch in (cold, warm, taken)] == [1, 1, 1]
    assert [launch.kernels for launch in (cold, warm, taken)] == [0, 0, 0]
    assert [launch.binaries for launch in (cold, warm, taken)] == [0, 0, 0]


@needs_artifacts
def test_artifacts_hold_no_kernels_of_a_cpu_and_that_is_told():
    stats = measure_startup(f"{TARGETS}:chained", SpeedOptions(warm=1, budget=0.1))
    warm, taken = find(check_startup(stats), "start-up")
    assert (warm.verdict, taken.verdict) == (Verdict.PASS, Verdict.WARN)
    assert "but a C++ compiler built" in taken.message
    assert "TORCHINDUCTOR_CACHE_DIR" in taken.hint
    built = [stats.arm(name).launches[0].binaries for name in (COLD, WARM, ARTIFACTS)]
    assert built[0] == built[2] > 0 == built[1]


def test_every_stage_of_a_start_takes_time(stats):
    for arm in stats.arms:
        for launch in arm.launches:
            assert launch.imported > 0
            assert launch.first >= launch.passes[0] > 0
            assert launch.steady > 0
            assert launch.times[0].name == "eager"
            assert len(launch.times[0].seconds) == len(launch.times[1].seconds)
    assert 0 < stats.arm(COLD).launches[0].compiling < stats.arm(COLD).launches[0].first


def test_both_matrices_of_a_step_are_counted_eager_and_compiled(stats):
    assert {stats.arm(name).timed.memory for name in (EAGER, COLD)} == {2 * 64 * 64 * 4}
    assert [finding.verdict for finding in find(check_startup(stats), "peak-memory")] == [Verdict.PASS]


def test_what_was_left_out_is_told_with_the_reason(stats):
    assert stats.left_out[REGIONAL] == "the model has no repeated blocks"
    assert stats.left_out[FIXED] == "the calls have the same shapes"
    assert "cold, regional: the model has no repeated blocks" in startup_run(stats).coverage.unseen


def test_the_run_has_a_row_for_each_arm_and_survives_json(stats):
    run = startup_run(stats)
    assert Run.from_json(run.to_json()) == run
    costs, compiled = run.tables
    assert len(costs.rows) == len(stats.arms)
    assert len(compiled.rows) == len(stats.arms) - 1
    assert {len(row) for row in costs.rows} == {len(costs.columns)}
    assert {len(row) for row in compiled.rows} == {len(compiled.columns)}
    assert run.environment["torch"] == torch.__version__
    assert not run.failed, str(run)


def test_caches_that_are_switched_off_fail(stats, tmp_path):
    options = SpeedOptions(env={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"})
    launcher = Launcher(f"{TARGETS}:products", tmp_path, options)
    warm = launcher.launch(WARM, StepConfig("default"), cache="any", number=1)
    arms = tuple(StartupArm(WARM, "", (warm,)) if arm.name == WARM else arm for arm in stats.arms)
    found = find(check_startup(replace(stats, arms=arms)), "start-up")[0]
    assert found.verdict is Verdict.FAIL
    assert "must compile nothing again, but 1 graph asked no cache" in found.message
    assert "torch._inductor.config.force_disable_caches is True" in found.message
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES" in found.hint


def test_a_process_reports_facts_about_its_subject():
    def facts(name):
        loaded, _ = Start().load(f"{TARGETS}:{name}", "cpu", None)
        return loaded["blocks"], loaded["varying"], loaded["own"]

    assert facts("stack") == (3, True, False)
    assert facts("products") == (0, False, False)
    assert facts("compiled_already") == (0, False, True)


def test_what_compiles_by_itself_is_refused(monkeypatch):
    def launch(self, name, config, **settings):
        self.facts = {"own": True}
        return Launch(0, 0, 0, (0,))

    monkeypatch.setattr(Launcher, "launch", launch)
    with pytest.raises(UsageError, match="compiles by itself, so that eager and compiled cannot be separated"):
        measure_startup(f"{TARGETS}:compiled_already")


def test_a_target_that_is_not_there_is_told():
    with pytest.raises(UsageError, match=r"startup_targets\.py has no 'nobody'"):
        measure_startup(f"{TARGETS}:nobody")


def test_memory_is_counted_from_the_weights_of_the_steps_own_copy(monkeypatch):
    order, start = [], Start()

    def held(device):
        order.append("held")
        return 5 * len(order)

    def step_of(*given, **settings):
        order.append("built")
        return lambda: order.append("pass")

    monkeypatch.setattr(memory, "allocated_memory", held)
    monkeypatch.setattr(steps, "step_of", step_of)
    start.load(f"{TARGETS}:products", "cpu", None)
    order.clear()
    start.start({"mode": "eager"})
    assert order == ["built", "held", "pass", "pass", "pass"]
    monkeypatch.setattr(memory, "peak_memory", lambda step, *, device, before: memory.Peak(before))
    start.device = "cuda"
    assert start.memory()["memory"] == 10


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target": torch.relu}, "fresh processes, which load the subject by its name"),
        ({"cold": 0}, "cold must be a whole number, 1 or more; found 0"),
        ({"warm": True}, "warm must be a whole number, 1 or more; found True"),
        ({"budget": 0}, "budget must be a finite number above 0; found 0"),
        ({"budget": math.inf}, "budget must be a finite number above 0; found inf"),
        ({"launches": 4}, "launches has no effect here: leave it out"),
        ({"budget": math.nan}, "budget must be a finite number above 0; found nan"),
        ({"mode": "fast"}, "mode must be one of eager, default.*; found 'fast'"),
        ({"precision": "fp16"}, "precision must be one of float32.*; found 'fp16'"),
        ({"mode": "eager"}, "mode is one of torch.compile: leave eager out"),
    ],
    ids=[
        "a function",
        "no cold launch",
        "a flag",
        "no time",
        "no end",
        "of a base",
        "nan",
        "a mode",
        "a precision",
        "eager",
    ],
)
def test_bad_input_is_told_before_anything_is_launched(settings, told):
    with pytest.raises(UsageError, match=told):
        measure_startup(settings.pop("target", f"{TARGETS}:products"), SpeedOptions(**settings))
