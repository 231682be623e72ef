"""Every public call that runs something, with what it is handed: a table of cases, and when their code raises."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from handed_over import of_module, of_state, of_tensor
from hypothesis import strategies as st
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

import ampcheck
from ampcheck.autocast.locks.lock import LockTarget, write_lock
from ampcheck.autocast.observe import observe_ops
from ampcheck.autocast.probe import measure_policy
from ampcheck.compiled.accuracy.checks import CHECKS as ACCURACY_CHECKS
from ampcheck.compiled.graph.checks import GRAPH_CHECKS
from ampcheck.compiled.options import AccuracyOptions, BlameOptions, CompileOptions
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import collect
from ampcheck.health import health_of
from ampcheck.search import SearchOptions
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.paired import measure_speed
from ampcheck.tools.lab.lab import run_lab


class Plan:
    """When the user's code raises: it calls `tick`, which raises from its k-th call on.

    Calls are counted by an iterator: an audit of a training loop restores every attribute that a step changes.
    """

    def __init__(self) -> None:
        self.count, self.at, self.error = itertools.count(), 0, None

    def __deepcopy__(self, memo: Any) -> Plan:
        return self  # copies of a model count together

    @torch._dynamo.disable
    def tick(self) -> None:
        number = next(self.count) + 1
        if self.error is not None and number >= self.at:
            raise self.error("raised by the user's code")

    @property
    def ticks(self) -> int:
        return int(repr(self.count)[len("count(") : -1])


class Net(nn.Module):
    """Two layers, a buffer that changes, a hook, and random numbers where `p` says so."""

    def __init__(self, plan: Plan, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm, self.drop, self.plan = nn.BatchNorm1d(16), nn.Dropout(p), plan
        self.calls: list[int] = []
        self.first.register_forward_hook(_hook)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.plan.tick()
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


def _hook(module: nn.Module, args: Any, output: Any) -> None:
    """A hook of the user's."""


@dataclass
class World:
    """What a case hands over, and where the user's code raises."""

    plan: Plan
    folder: Path
    model: Net = field(init=False)
    x: torch.Tensor = field(init=False)
    p: float = 0.0

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.model = Net(self.plan, self.p)
            self.x = torch.randn(6, 8, requires_grad=True)
        self.model.second.weight.grad = torch.ones(4, 16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(self, i: int = 0) -> float:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = self.model(self.x.detach()).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss.detach())

    def loop(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler, "step": self.step}

    def told(self, *_: Any) -> None:
        """A progress callback: where no code of the user's runs, it is what raises."""
        self.plan.tick()

    def objects(self) -> dict[str, Any]:
        """Everything that was handed over, bit for bit and by identity."""
        values = {f"model {name}": value for name, value in of_module(self.model).items()}
        values |= {f"input: {name}": value for name, value in of_tensor(self.x).items()}
        values |= {f"optimizer {name}": value for name, value in of_state(self.optimizer.state_dict()).items()}
        values["optimizer: attributes"] = sorted(vars(self.optimizer))
        values["optimizer: groups"] = [[id(one) for one in group["params"]] for group in self.optimizer.param_groups]
        values["optimizer: hooks"] = [
            list(table) for name, table in vars(self.optimizer).items() if name.endswith("_hooks")
        ]
        values["scaler"] = of_state(self.scaler.state_dict())
        values["scaler: attributes"] = sorted(vars(self.scaler))
        values["calls"] = list(self.model.calls)
        return values


@dataclass(frozen=True)
class Case:
    """A public call. at: the call of the user's code that raises. own: the user's own code runs, and changes things."""

    name: str
    run: Callable[[World], Any]
    at: int = 2
    own: bool = False
    p: float = 0.3
    raises: bool = True


def _call(world: World) -> Callable[[], Any]:
    def call() -> Any:
        world.plan.tick()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.linear(world.x, world.model.first.weight)

    return call


def _block(context: Callable[[World], Any]) -> Callable[[World], None]:
    def run(world: World) -> None:
        with context(world):
            world.step()
            world.step()

    return run


def _inputs() -> st.SearchStrategy[torch.Tensor]:
    return st.integers(0, 3).map(lambda seed: torch.full((6, 8), 1.0 + seed))


def _loop_of_compiled(world: World) -> dict[str, Any]:
    compiled = torch.compile(world.model)

    def step(i: int) -> float:
        world.optimizer.zero_grad()
        loss = compiled(world.x.detach()).square().mean()
        loss.backward()
        world.optimizer.step()
        return float(loss.detach())

    return {"model": compiled, "optimizer": world.optimizer, "step": step}


def _emulated_step(world: World) -> Any:
    return ampcheck.emulate("cuda", "float16")


CASES = [
    Case("audit forward", lambda w: ampcheck.audit((w.model, (w.x,)), compile=False)),
    Case("audit forward float16", lambda w: ampcheck.audit((w.model, (w.x,)), compile=False, dtype="float16"), at=2),
    Case("audit forward emulated", lambda w: ampcheck.audit((w.model, (w.x,)), compile=False, device="cuda"), at=5),
    Case("audit calls", lambda w: ampcheck.audit((w.model, [(w.x,), (w.x,)]), compile=False)),
    Case("audit blocks", lambda w: ampcheck.audit(([w.model, nn.ReLU()], [(w.x,)]), compile=False)),
    Case("audit training", lambda w: ampcheck.audit(w.loop(), steps=3)),
    Case("audit training late", lambda w: ampcheck.audit(w.loop(), steps=3), at=30),
    Case("audit training emulated", lambda w: ampcheck.audit(w.loop(), steps=3, device="cuda"), at=4),
    Case("audit call", lambda w: ampcheck.audit(_call(w)), at=1),
    Case("audit call emulated", lambda w: ampcheck.audit(_call(w), device="cuda"), at=1),
    Case("assert_numerics", lambda w: ampcheck.assert_numerics(w.model, (w.x,), dtype="bfloat16", compile=False)),
    Case("assert_dtypes", lambda w: ampcheck.assert_dtypes(w.model, (w.x,), {"first": "float32"}), at=1, own=True),
    Case("assert_training", lambda w: ampcheck.assert_training(w.loop(), steps=2), at=3),
    Case(
        "assert_property",
        lambda w: ampcheck.assert_property(w.model, inputs=_inputs(), compile=False, options=SearchOptions(examples=4)),
    ),
    Case("blame", lambda w: ampcheck.blame((w.model, (w.x,)), compile=False, dtype="float16")),
    Case("observe_ops", lambda w: observe_ops(w.model, (w.x,), compile=False), at=1),
    Case("observe_ops emulated", lambda w: observe_ops(w.model, (w.x,), device="cuda", compile=False), at=1),
    Case("watch a block", _block(lambda w: ampcheck.watch()), own=True, p=0.0),
    Case("watch training", _block(lambda w: ampcheck.watch(w.model, w.optimizer, w.scaler)), own=True, p=0.0),
    Case("watch graphs", _block(lambda w: ampcheck.watch(checks="graph-break", fail_on="never")), own=True, p=0.0),
    Case("emulate", _block(_emulated_step), own=True, p=0.0),
    Case("collect", _block(lambda w: collect()), own=True, p=0.0),
    Case("measure_speed", lambda w: measure_speed({"a": w.step, "b": w.step}, budget=0.05), own=True),
    Case(
        "assert_speed",
        lambda w: ampcheck.assert_speed({"a": w.step, "b": w.step}, at_least=0.1, options=SpeedOptions(budget=0.05)),
        own=True,
    ),
    Case("measure_policy", lambda w: measure_policy("cuda", "bfloat16"), raises=False),
    Case("assert_policy", lambda w: ampcheck.assert_policy(device="cuda", dtype="float16"), raises=False),
    Case("assert_policy of a lock", lambda w: _locked(w), at=1),
    Case("health_of", lambda w: health_of(w.x.detach(), histogram=True), raises=False),
    Case("lab numbers", lambda w: run_lab(["anatomy", "ulp", "exp"], progress=w.told), at=3),
    Case("lab autocast", lambda w: run_lab(["policy", "flow"], progress=w.told), at=3),
    Case("lab underflow", lambda w: run_lab(["underflow"], progress=w.told)),
    Case("lab confounders", lambda w: run_lab(["confounders"], progress=w.told), at=3),
    Case("assert_compiled graphs", lambda w: _graphs(w), at=2),
    Case("audit compiled", lambda w: ampcheck.audit((w.model, (w.x,)), dtype="bfloat16"), at=7),
    Case("audit calls compiled", lambda w: ampcheck.audit((w.model, [(w.x,), (w.x,)])), at=5),
    Case("audit blocks compiled", lambda w: ampcheck.audit(([w.model, nn.ReLU()], [(w.x,)]))),
    Case("audit training compiled", lambda w: ampcheck.audit(_loop_of_compiled(w), steps=2), at=6),
    Case("assert_compiled", lambda w: _two_steps(w), at=4),
    Case("assert_compiled emulated", lambda w: _compiled_emulated(w), at=4),
    Case("assert_dtypes of ops", lambda w: ampcheck.assert_dtypes(w.model, (w.x,), {"aten::*": None}), at=1),
    Case("blame compiled", lambda w: _blame_compiled(w), at=9),
    Case("watch compiled", _block(lambda w: ampcheck.watch(w.model.compile() or w.model)), own=True, p=0.0),
    Case(
        "assert_property compiled",
        lambda w: ampcheck.assert_property(w.model, inputs=_inputs(), compile=True, options=SearchOptions(examples=4)),
        at=9,
    ),
]
"""Every public name that runs something."""


def _graphs(world: World) -> Any:
    options, limits = CompileOptions("eager"), GraphLimits(max_breaks=9)
    return ampcheck.assert_compiled(world.model, (world.x,), options=options, graphs=limits, checks=GRAPH_CHECKS)


def _blame_compiled(world: World) -> Any:
    return ampcheck.blame((world.model, (world.x,)), dtype="bfloat16", search=BlameOptions(runs=2))


def _two_steps(world: World) -> Any:
    accuracy = AccuracyOptions(steps=2)
    return ampcheck.assert_compiled(world.model, (world.x,), accuracy=accuracy, checks=tuple(ACCURACY_CHECKS))


def _compiled_emulated(world: World) -> Any:
    return ampcheck.assert_compiled(world.model, (world.x,), dtype="float16", device="cuda")


def _locked(world: World) -> Any:
    path, other = world.folder / "ampcheck.lock.json", World(Plan(), world.folder)
    write_lock(LockTarget.of((other.model, (other.x,)), path, "net"), "cpu", "bfloat16")
    return ampcheck.assert_policy((world.model, (world.x,)), lock=path, name="net")


def params(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.fixture(autouse=True)
def chosen() -> Iterator[None]:
    """Settings that somebody chose, unlike those that PyTorch starts with: what is reset to a default is seen."""
    log, mode = logging.getLogger("torch._dynamo"), torch.get_deterministic_debug_mode()
    level, limit = log.level, sys.getrecursionlimit()
    precision = torch.get_float32_matmul_precision()
    inductor = torch._inductor.config
    settings = {"max_fusion_size": 63} | ({"deterministic": False} if hasattr(inductor, "deterministic") else {})
    with torch.random.fork_rng(devices=[]), inductor.patch(settings):
        torch.set_deterministic_debug_mode("warn")  # on, and Inductor's own is off
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        torch.set_printoptions(precision=3)
        log.setLevel(logging.CRITICAL)
        sys.setrecursionlimit(3001)
        torch.manual_seed(11)
        yield
        torch.set_deterministic_debug_mode(mode)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = False
        torch.set_printoptions(profile="default")
        log.setLevel(level)
        sys.setrecursionlimit(limit)


@pytest.fixture(autouse=True, scope="module")
def own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of other processes are none of ours. Inductor keeps its cache."""
    before = tempfile.tempdir
    cache_dir()
    tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))
    yield
    tempfile.tempdir = before


WARM: set[str] = set()


def warmed(case: Case, folder: Path) -> None:
    """Once for each case: imports, and what PyTorch initialises when it is first used."""
    if case.name not in WARM:
        for error in (None, ValueError):
            world = World(Plan(), folder, case.p)
            world.plan.at, world.plan.error = case.at, error
            with contextlib.suppress(AssertionError, ampcheck.UsageError, ValueError):
                case.run(world)
        WARM.add(case.name)
