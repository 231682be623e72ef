"""The table of mechanisms: each can be switched off, comes back, and shows when it acts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mechanisms import MECHANISMS, located, recording, without

from ampcheck.shadow import Shadow, decisions, judge


def _named() -> Iterator[tuple[str, str, object]]:
    """All that modules of the package and its classes name."""
    for path, module in sorted(sys.modules.items()):
        if path.partition(".")[0] == "ampcheck":
            for name, value in vars(module).items():
                yield path, name, dict(value) if isinstance(value, (dict, type(MECHANISMS))) else value
                if isinstance(value, type) and value.__module__.startswith("ampcheck"):
                    yield from ((f"{path}.{name}", part, item) for part, item in vars(value).items())


def _differences(before: list[tuple[str, str, object]]) -> list[tuple[str, str]]:
    known = {(path, name): value for path, name, value in before}
    return [
        (path, name)
        for path, name, value in _named()
        if (path, name) in known and not isinstance(value, dict) and known[path, name] is not value
    ]


def _count_of_ids() -> list[str]:
    torch.manual_seed(0)
    with Shadow() as shadow:
        ids = torch.arange(4096).to(torch.bfloat16)
        assert (ids[None] == ids[:, None]).any()
    return [fault.kind for fault in shadow.faults if fault.reaches]


def _smallest_eps(x: torch.Tensor) -> torch.Tensor:
    return x / (x.abs() + torch.finfo(x.dtype).eps)


def _scaled_by_eps() -> list[str]:
    torch.manual_seed(0)
    with Shadow() as shadow:
        _smallest_eps(torch.rand(256).mul_(0.01).to(torch.bfloat16))
        shadow.reach_ends()
    return [fault.kind for fault in shadow.faults if fault.reaches]


def test_every_mechanism_exists_and_comes_back() -> None:
    for mechanism in MECHANISMS.values():
        assert [located(place) for place in mechanism.places]
    before = list(_named())
    for name, mechanism in MECHANISMS.items():
        places = [located(place) for place in mechanism.places]
        on = [vars(holder)[attribute] for holder, attribute in places]
        with without(name):
            off = [vars(holder)[attribute] for holder, attribute in places]
        assert not any(one is other for one, other in zip(on, off, strict=True)), name
    assert _differences(before) == []


def test_a_stand_in_stands_wherever_the_function_is_named() -> None:
    with without("decisions", "intervals"):
        assert judge.examine_decision is decisions.examine_decision
        assert judge.examine_decision(None, None, None) is None  # type: ignore[arg-type]
        assert decisions._MARGINS["bin"](None, None) is None  # type: ignore[arg-type]
    assert decisions._MARGINS["bin"] is decisions._placed


def test_a_module_that_is_imported_while_a_mechanism_is_off_gets_it_back() -> None:
    path = "ampcheck.shadow.judge"
    module: Any = sys.modules.pop(path, None)
    try:
        with without("decisions"):
            __import__(path)
        assert sys.modules[path].examine_decision is decisions.examine_decision
    finally:
        if module is not None:
            sys.modules[path] = module


@pytest.mark.parametrize(
    ("case", "name", "kind"),
    [(_count_of_ids, "collisions", "collision"), (_scaled_by_eps, "format-constants", "constant")],
)
def test_a_mechanism_that_acts_is_recorded_and_changes_the_verdict(case: Any, name: str, kind: str) -> None:
    found = case()
    assert any(kind in each for each in found)
    with recording() as acted:
        assert case() == found
    assert name in acted
    with without(name):
        assert not any(kind in each for each in case())
    assert case() == found


def test_recording_changes_nothing_and_ends() -> None:
    before = list(_named())
    with recording() as acted:
        torch.ones(2)
    assert _differences(before) == []
    assert all(MECHANISMS[name].unseen for name in acted)
