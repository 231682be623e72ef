"""A call leaves the model as it was, and the process alone."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ampcheck import assert_property
from ampcheck.search import SearchOptions
from ampcheck.strategies import tensors
from ampcheck.torchtools import reachable
from ampcheck.torchtools.snapshot import preserved_objects


def over_a_module() -> Callable[[torch.Tensor], torch.Tensor]:
    """What a function that imports inside gives its inner one."""
    import torch

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    return model


def test_a_closure_over_a_module_is_as_quick_as_one_over_nothing() -> None:
    start = time.process_time()
    for _ in range(20):
        with preserved_objects(over_a_module()):
            pass
    assert time.process_time() - start < 0.5


def test_what_a_call_imports_stays_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brought_in.py").write_text("LOADED = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    import torch

    def model(x: torch.Tensor) -> torch.Tensor:
        importlib.import_module("brought_in")
        return torch.tanh(x)

    try:
        assert_property(
            model, inputs=tensors("float16", shape=1, max_value=4), compile=False, options=SearchOptions(examples=3)
        )
        assert "brought_in" in sys.modules
    finally:
        sys.modules.pop("brought_in", None)


@pytest.mark.parametrize(
    "held",
    [sys, vars(torch), sys.modules, logging.getLogger("ampcheck.tests"), os.environ, SimpleNamespace(inside=warnings)],
    ids=["module", "namespace", "modules", "logger", "environment", "attribute"],
)
def test_what_belongs_to_the_process_is_left_alone(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMPCHECK_HELD", raising=False)
    name = "ampcheck_held"
    with preserved_objects([held]):
        sys.modules[name] = torch
        setattr(torch, name, 1)
        warnings.filters.append(rule := ("ignore", None, Warning, None, 123456))  # type: ignore[attr-defined]
        os.environ["AMPCHECK_HELD"] = "1"
        logging.getLogger(name)
    try:
        assert sys.modules[name] is torch
        assert getattr(torch, name) == 1
        assert warnings.filters[-1] is rule
        assert os.environ["AMPCHECK_HELD"] == "1"
        assert name in logging.Logger.manager.loggerDict
    finally:
        del sys.modules[name]
        delattr(torch, name)
        warnings.filters.remove(rule)  # type: ignore[attr-defined]
        del logging.Logger.manager.loggerDict[name]


def test_what_a_model_keeps_is_put_back() -> None:
    count, seen = 0, deque([1])

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(2))
            self.cache: dict[str, Any] = {"inner": SimpleNamespace(calls=[])}

        def forward(self) -> None:
            nonlocal count
            count += 1
            seen.append(2)
            self.total += 1
            self.cache["inner"].calls.append(1)
            self.cache["new"] = 1
            self.cache["inner"].more = 1

    model = Counting()
    with preserved_objects(model, model.forward):
        model()
        assert count == 1
    assert count == 0
    assert list(seen) == [1]
    assert model.total.tolist() == [0, 0]
    assert list(model.cache) == ["inner"]
    assert vars(model.cache["inner"]) == {"calls": []}


def test_generators_and_arrays_of_its_own_are_put_back_and_weights_and_globals_are_not() -> None:
    global called
    own, array, layer = torch.Generator().manual_seed(1), np.zeros(2), torch.nn.Linear(2, 2)

    def model() -> float:
        global called
        called += 1
        array[:] = 1.0
        with torch.no_grad():
            layer.weight.zero_()
        return torch.rand(1, generator=own).item()

    called = 0
    with preserved_objects(model):
        drawn = model()
    assert model() == drawn
    with preserved_objects(model):
        array[:] = 2.0
    assert array.tolist() == [1.0, 1.0]
    assert not layer.weight.any()
    assert called == 2


called = 0


def test_the_walk_ends_and_what_is_near_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "_VALUE_LIMIT", 100)
    far: list[Any] = []
    chain: Any = far
    for _ in range(1000):
        chain = [chain]
    near: list[int] = []
    with preserved_objects(chain, near):
        far.append(1)
        near.append(1)
    assert far == [1]
    assert near == []
