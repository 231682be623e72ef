"""Where something runs is told for the thread in which it runs, and for models that take no hooks."""

from __future__ import annotations

import sysconfig
import threading
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampcheck import audit
from ampcheck.stream.trace import Trace
from ampcheck.torchtools.source import Scopes, is_users, users_place


class Branches(nn.Module):
    """Two branches that run in two threads, each in step with the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())
        self.seen: dict[str, str] = {}


def test_modules_of_two_threads_are_told_apart() -> None:
    model = Branches()
    scopes = Scopes(model)
    barrier = threading.Barrier(2, timeout=20)

    def note(name: str) -> None:
        barrier.wait()
        model.seen[name] = scopes.current
        barrier.wait()

    for name in ("one", "two"):
        relu = getattr(model, name)[0]
        relu.register_forward_hook(lambda *_, name=name: note(name))
    with scopes.watched():
        threads = [threading.Thread(target=branch, args=(torch.ones(2),)) for branch in (model.one, model.two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert model.seen == {"one": "one.0", "two": "two.0"}
    assert scopes.current == ""


def test_a_model_with_a_part_of_torchscript_is_judged() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that TorchScript is deprecated
        scripted = torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4))
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    run = audit((model, torch.ones(2, 4)), dtype="bfloat16", compile=False)
    assert not run.failed
    assert run.coverage.seen["16-bit ops"] > 0


def test_a_model_with_a_higher_order_op_is_followed() -> None:
    class Either(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) * 2

    with Trace() as trace:
        Either()(torch.ones(2))
    assert "aten::mul.Tensor" in {event.where.op for event in trace.events}


def test_the_scripts_of_the_environment_are_no_users_code() -> None:
    assert not is_users(str(Path(sysconfig.get_path("scripts")) / "ampcheck"))
    assert is_users(str(Path.cwd() / "train.py"))


def test_an_error_that_a_compiled_extension_raises_is_at_the_line_of_python_that_called_it() -> None:
    with pytest.raises(ValueError, match="sum to 1") as caught:
        np.random.default_rng(0).choice(2, p=[0.5, 0.6])
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename.endswith(".pyx")
    path, line = users_place(caught.value)
    assert path.endswith("test_source.py")
    assert "choice(2" in Path(__file__).read_text(encoding="utf-8").splitlines()[(line or 0) - 1]
