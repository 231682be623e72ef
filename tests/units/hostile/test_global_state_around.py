"""The same inside other blocks, in other threads, and in a fresh process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from global_state import leaks, snapshot
from public_calls import CASES, Plan, World, chosen, own_temporary_files, warmed
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

import ampcheck

__all__ = ["chosen", "own_temporary_files"]  # fixtures that every test here uses


def _audit(world: World) -> None:
    with contextlib.suppress(AssertionError, ampcheck.UsageError):
        ampcheck.audit((world.model, (world.x,)), compile=False, dtype="bfloat16")


AROUND: dict[str, Callable[[World], Any]] = {
    "watch of training": lambda w: ampcheck.watch(w.model, w.optimizer, w.scaler),
    "watch a block": lambda w: ampcheck.watch(fail_on="never"),
    "emulate": lambda w: ampcheck.emulate("cuda"),
    "autocast": lambda w: torch.autocast("cpu", torch.bfloat16),
    "no_grad": lambda w: torch.no_grad(),
    "inference mode": lambda w: torch.inference_mode(),
    "watch graphs": lambda w: ampcheck.watch(checks="graph-break", fail_on="never"),
}


@pytest.mark.parametrize("around", AROUND)
def test_an_audit_inside_another_block_leaves_that_block_as_it_was(around: str, tmp_path: Path) -> None:
    warmed(CASES[0], tmp_path)
    world = World(Plan(), tmp_path)
    outer = snapshot()
    with contextlib.suppress(AssertionError), AROUND[around](world):
        torch.relu(world.x.detach())  # so that there is something to look at
        objects, before = world.objects(), snapshot()
        _audit(world)
        assert leaks(before, snapshot()) | leaks(objects, world.objects()) == {}
    assert leaks(outer, snapshot()) == {}


def test_a_watch_goes_on_after_an_audit_inside_it(tmp_path: Path) -> None:
    world = World(Plan(), tmp_path)
    with ampcheck.watch(world.model, world.optimizer, world.scaler, fail_on="never") as seen:
        world.step()
        _audit(world)
        world.step()
        assert seen.stats.training.steps == 2


def test_an_audit_in_another_thread_leaves_both_threads_as_they_were(tmp_path: Path) -> None:
    warmed(CASES[0], tmp_path)
    found: dict[str, Any] = {}

    def work() -> None:
        before = snapshot()
        _audit(World(Plan(), tmp_path, 0.3))
        found.update(leaks(before, snapshot()))

    for _ in range(2):  # the first one initialises what PyTorch keeps for each thread
        found.clear()
        before = snapshot()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == {}
    assert leaks(before, snapshot()) == {}


def test_audits_that_overlap_in_two_threads_leave_everything_as_it_was(tmp_path: Path) -> None:
    """The first begins and ends before the second ends: what each of them found on entering is the other's."""
    warmed(CASES[0], tmp_path)
    first_runs, second_runs, first_ended = threading.Event(), threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def __init__(self, comes: threading.Event, goes_on: threading.Event) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)
            self.wait = lambda: (comes.set(), goes_on.wait(60))

        def __deepcopy__(self, memo: Any) -> Waiting:
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.wait()
            return self.dropout(self.layer(x))

    def work(model: nn.Module, ended: threading.Event) -> None:
        _audit_of(model)
        ended.set()

    models = Waiting(first_runs, second_runs), Waiting(second_runs, first_ended)
    threads = [threading.Thread(target=work, args=(models[0], first_ended))]
    threads.append(threading.Thread(target=work, args=(models[1], threading.Event())))
    before = snapshot()
    threads[0].start()
    assert first_runs.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert leaks(before, snapshot()) == {}


def _audit_of(model: nn.Module) -> None:
    with contextlib.suppress(ampcheck.UsageError):
        ampcheck.audit((model, (torch.ones(2, 8),)), compile=False, dtype="bfloat16")


FRESH = """
import json, logging, random, sys, warnings
import numpy, torch
from global_state import leaks, snapshot

warnings.filterwarnings("ignore", message="the user's own")
torch.set_float32_matmul_precision("high")
torch.backends.cudnn.allow_tf32 = False
torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
logging.getLogger("torch._inductor").setLevel(logging.DEBUG)
logging.getLogger().setLevel(logging.INFO)
model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)), torch.randn(4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(i):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())

before = snapshot()
import ampcheck
found = leaks(before, snapshot())
assert not found, found
ampcheck.audit((model, (x,)), compile=COMPILE)
ampcheck.audit({"model": model, "optimizer": optimizer, "step": step}, steps=2)
print(json.dumps({name: [str(was), str(now)] for name, (was, now) in leaks(before, snapshot()).items()}))
"""

LAZY = ("functions torch", "compiler: ")
"""What PyTorch initialises when Dynamo is first imported: it wraps functions of its own, and has a state of its own."""


COMPILING = ("multiprocessing: start method", "sys.path", "threading: alive, no daemons", "logger torch.__trace")
"""What Inductor's first compilation leaves: its pool of workers, and a handler of its trace that removes itself."""


@pytest.mark.parametrize("compiled", [False, True])
def test_in_a_fresh_process_only_pytorchs_lazy_initialisation_differs(compiled: bool, tmp_path: Path) -> None:
    folders = {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": cache_dir()}
    environment = {**os.environ, **folders, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    script = FRESH.replace("COMPILE", str(compiled))
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    allowed = COMPILING if compiled else ()
    assert {name: pair for name, pair in found.items() if not name.startswith((*LAZY, *allowed))} == {}
