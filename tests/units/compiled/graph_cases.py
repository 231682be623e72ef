"""Models with planted breaks, and how the tests of graphs judge them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ampcheck.compiled.assert_compiled import assert_compiled
from ampcheck.compiled.graph.checks import GRAPH_CHECKS
from ampcheck.compiled.graph.judge import judge_graph
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject

X = torch.randn(4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Branching(nn.Module):
    """Branches on a value in each of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        if x.sum() > 0:  # PLANTED: a branch on data
            x = x * 2
        return x + 1


class Indexed(nn.Module):
    """A block that knows its place in the stack, as a Python integer or as a buffer."""

    def __init__(self, place: int, as_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.place: torch.Tensor | int = place
        if as_buffer:
            del self.place
            self.register_buffer("place", torch.tensor(float(place)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (self.place + 1)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as lines:
        return next(number for number, line in enumerate(lines, 1) if text in line and "line_of" not in line)


EAGER = CompileOptions("eager")


def judge(shape: object, **settings: Any) -> Run:
    """Judge a shape under the backend `eager`; settings: of `CompileOptions` and `GraphLimits`."""
    limits = {name: settings.pop(name) for name in ("max_breaks", "max_recompiles", "warmup") if name in settings}
    options = CompileOptions(**{"backend": "eager", **settings})
    return judge_graph(Subject(shape, name="planted"), options=options, limits=GraphLimits(**limits))


def assert_graphs(model: object, calls: object = None, **settings: Any) -> Run:
    """The checks on graphs alone, under the backend `eager`."""
    return assert_compiled(model, calls, **{"checks": GRAPH_CHECKS, "options": EAGER, **settings})


def judge_compiled(shape: object) -> Run:
    return judge_graph(Subject(shape, name="planted"))


def failures(run: Run) -> list[str]:
    return [finding.check for finding in run.of(Verdict.FAIL)]


def only(run: Run, check: str) -> Finding:
    (found,) = [finding for finding in run.of(Verdict.FAIL) if finding.check == check]
    return found


def verdicts(run: Run) -> dict[str, str]:
    return {finding.check: finding.verdict.value for finding in run.findings}


def broken_backend(graph: object, inputs: object) -> object:
    raise RuntimeError("planted")
