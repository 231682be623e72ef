"""A public call leaves the process, and what it was handed, as they were: on success, on an error, on Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from global_state import leaks, snapshot
from public_calls import CASES, WARM, Case, Plan, World, chosen, own_temporary_files, params, warmed
from torch import nn

import ampcheck

__all__ = ["chosen", "own_temporary_files"]  # fixtures that every test here uses


def _changed(case: Case, world: World, raises: type[BaseException] | None) -> dict[str, Any]:
    world.plan.at, world.plan.error = case.at, raises
    objects, before = world.objects(), snapshot()
    try:
        case.run(world)
    except KeyboardInterrupt:
        assert raises is KeyboardInterrupt
    except (AssertionError, ampcheck.UsageError):
        assert raises is not KeyboardInterrupt, "the user's Ctrl-C became another error"
    except ValueError:
        assert raises is ValueError
    else:
        assert raises is not KeyboardInterrupt or world.plan.ticks < case.at, "the user's Ctrl-C was swallowed"
    found = leaks(before, snapshot())
    if case.name == "watch compiled":  # Dynamo sets Inductor's deterministic mode by PyTorch's after it compiles
        found = {name: pair for name, pair in found.items() if not name.endswith("deterministic")}
    assert raises is None or world.plan.ticks >= case.at, f"the user's code was called {world.plan.ticks} times"
    return found if case.own else {**found, **leaks(objects, world.objects())}


@pytest.mark.parametrize("case", params(CASES))
def test_a_public_call_leaves_everything_as_it_was(case: Case, tmp_path: Path) -> None:
    warmed(case, tmp_path)
    assert _changed(case, World(Plan(), tmp_path, case.p), None) == {}


@pytest.mark.parametrize("case", params([case for case in CASES if case.raises]))
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_so_does_one_in_which_the_users_code_raises(case: Case, error: type[BaseException], tmp_path: Path) -> None:
    warmed(case, tmp_path)
    assert _changed(case, World(Plan(), tmp_path, case.p), error) == {}


def _grad_off() -> None:
    torch.set_grad_enabled(False)


MEDDLING: dict[str, Callable[[], Any]] = {
    "torch's generator": lambda: torch.manual_seed(1),
    "numpy's generator": lambda: numpy.random.seed(1),
    "Python's generator": lambda: random.seed(1),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "grad mode": _grad_off,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "deterministic fill": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "cudnn benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", False),
    "cudnn deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "TF32 in cuDNN": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "attention kernels": lambda: torch.backends.cuda.enable_math_sdp(False),
    "opt_einsum": lambda: setattr(torch.backends.opt_einsum, "strategy", "greedy"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "flushing of subnormals": lambda: torch.set_flush_denormal(True),
    "print options": lambda: torch.set_printoptions(precision=9, sci_mode=True),
    "warn always": lambda: torch.set_warn_always(True),
    "autocast left on": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast dtype": lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "autocast cache": lambda: torch.set_autocast_cache_enabled(False),
    "autocast entered": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "settings of Dynamo": lambda: setattr(torch._dynamo.config, "suppress_errors", True),
    "settings of Inductor": lambda: setattr(torch._inductor.config, "epilogue_fusion", False),
    "settings of Inductor in place": lambda: torch._inductor.config.pre_grad_fusion_options.update(planted={}),
    "settings of functorch": lambda: setattr(torch._functorch.config, "donated_buffer", False),
    "warnings": lambda: warnings.simplefilter("ignore"),
    "warnings in place": lambda: warnings.filters.clear(),
    "log level": lambda: logging.getLogger("torch._dynamo").setLevel(logging.DEBUG),
    "logging": lambda: logging.disable(logging.ERROR),
    "recursion limit": lambda: sys.setrecursionlimit(3456),
    "working directory": lambda: os.chdir("/"),
    "environment": lambda: os.environ.update(PATH="elsewhere"),
    "environment, removed": lambda: os.environ.pop("PATH", None),
}


class Meddler(nn.Module):
    def __init__(self, *meddles: str) -> None:
        super().__init__()
        self.layer, self.meddles = nn.Linear(8, 8), meddles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        for meddle in self.meddles:
            MEDDLING[meddle]()
        return out


def _shape(kind: str, model: nn.Module) -> Any:
    x, optimizer = torch.ones(2, 8), torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i: int) -> float:
        loss = model(x).square().mean()
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        return float(loss.detach())

    if kind == "training":
        return {"model": model, "optimizer": optimizer, "step": step}
    return (model, (x,)) if kind == "forward" else lambda: model(x).sum()


ALONE = [("forward", (meddle,)) for meddle in MEDDLING]
TOGETHER = [(kind, tuple(one for one in MEDDLING if one != "default device")) for kind in ("training", "call")]


@pytest.mark.parametrize(
    ("kind", "meddles"), [*ALONE, *TOGETHER], ids=[*MEDDLING, "all of them in a step", "all of them in a call"]
)
def test_what_the_users_own_code_changes_in_the_process_is_restored(kind: str, meddles: tuple[str, ...]) -> None:
    refused = Exception if "default device" in meddles else ampcheck.UsageError  # what it does breaks the model
    steps = {"steps": 2} if kind == "training" else {}

    def run(model: Meddler) -> None:
        shape = _shape(kind, model)
        with contextlib.suppress(refused):
            ampcheck.audit(shape, compile=False, **steps)

    if kind not in WARM:
        run(Meddler())
        WARM.add(kind)
    model = Meddler(*meddles)
    before = snapshot(functions=False)
    run(model)
    assert leaks(before, snapshot(functions=False)) == {}
