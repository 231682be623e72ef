"""One launch in a real process: eager and compiled arms, graphs and breaks, and code from the wrong checkout."""

from __future__ import annotations

import os

import pytest

from ampcheck.core.errors import UsageError
from ampcheck.core.worker import Worker
from ampcheck.speed.base.stats import Signals

BREAKS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.layer(x))
        torch._dynamo.graph_break()
        return self.layer(x)

def make(): return Model().eval(), torch.ones(2, 8)
"""


def launched(folder, **settings):
    return Worker(
        "ampcheck.speed.base.child_process:Launch", name="head", cwd=folder, env={"OMP_NUM_THREADS": "1"}, **settings
    )


def load(worker, root, target="model.py:make", repository=None, mode=None):
    given = {"target": target, "root": str(root), "repository": str(repository or root), "device": "cpu"}
    return worker.ask("load", **given, mode=mode, precision=None)


def test_a_compiled_launch_reports_its_graphs_and_breaks_and_times_both_arms(tmp_path):
    (tmp_path / "model.py").write_text(BREAKS)
    with launched(tmp_path) as worker:
        loaded = load(worker, tmp_path, mode="default")
        assert (loaded["subject"], loaded["arms"]) == ("model.py:make", ["eager", "compiled"])
        calls = worker.ask("warm_up")
        assert set(calls) == {"eager", "compiled"}
        taken = worker.ask("block", order=["compiled", "eager"], calls={"compiled": 2, "eager": 3})
        assert list(taken) == ["compiled", "eager"]
        assert all(0 < seconds < 60 for seconds in taken.values())
        told = worker.ask("signals")
    assert told.graphs == 2
    assert [place for place, _ in told.breaks] == ["model.py:12"]
    assert told.recompiles == ()


def test_a_plain_launch_compiles_nothing_and_keeps_to_as_many_cores_as_it_has_threads(tmp_path):
    (tmp_path / "model.py").write_text(BREAKS)
    with launched(tmp_path) as worker:
        assert load(worker, tmp_path)["arms"] == ["target"]
        chosen = worker.ask("pin", number=1)
        if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1:
            assert len(chosen) == 1
            assert os.sched_getaffinity(worker.pid) == set(chosen)
        else:
            assert chosen == []
        assert worker.ask("signals") == Signals()


def test_a_package_that_is_installed_from_the_head_is_refused_in_the_base(tmp_path):
    head, base = tmp_path / "head", tmp_path / "base"
    for side in (head, base):
        (side / "lib" / "pack").mkdir(parents=True)
        (side / "lib" / "pack" / "__init__.py").write_text(BREAKS)
    # As an editable install does: the head's folder is on the path of every Python, the base's is not.
    with (
        launched(base, pythonpath=[head / "lib"]) as worker,
        pytest.raises(UsageError, match="pack must be imported from the checkout that is measured"),
    ):
        load(worker, base, "pack:make", head)
    with launched(base, pythonpath=[base / "lib", head / "lib"]) as worker:
        assert load(worker, base, "pack:make", head)["subject"] == "pack:make"
