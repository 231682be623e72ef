"""One optimizer on one small problem: 1,000 steps in each precision beside the same steps in float64, and the audit.

The problem is a network of two layers with a LayerNorm between them that learns a fixed function from 8 batches of 32
rows. Weights and data begin with values that float16 and bfloat16 both represent: whatever parts the runs at the end
comes from the steps.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from optimizer_subjects import OptimizerSubject
from torch import nn

import ampcheck
from ampcheck.core.run import Verdict

STEPS = 1000
ARMS = {
    "float64": torch.float64,
    "master weights": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtype of weights and data in each run; that with master weights runs under autocast to bfloat16."""

PURE = ("float16", "bfloat16")
"""The runs without any float32, which are audited."""

CHECKS = ("stagnation", "optimizer-state", "master-weights", "overflow", "nonfinite-gradient")

OPTIONS = ("weight_decay", "eps")
"""Options that low precision may leave without effect."""

_TRIED = 50
"""Steps after which runs with and without an option are compared."""

_PLAIN = OptimizerSubject("", "torch.optim.SGD")

_BATCHES, _ROWS, _INPUTS, _OUTPUTS = 8, 32, 16, 4


class Problem:
    """Model, data and step of one optimizer in one precision.

    x, y: [batches, rows, features] in the dtype of the weights. Raises whatever the package raises.
    """

    def __init__(self, subject: OptimizerSubject, arm: str) -> None:
        torch.manual_seed(0)
        self.subject, self.arm = subject, arm
        wide = subject.hidden
        self.model = nn.Sequential(nn.Linear(_INPUTS, wide), nn.LayerNorm(wide), nn.Tanh(), nn.Linear(wide, _OUTPUTS))
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(_BATCHES, _ROWS, _INPUTS, generator=generator)
        mixing = torch.randn(_INPUTS, _OUTPUTS, generator=generator)
        self.y = torch.sin(self.x @ mixing) + 0.5 * (self.x @ mixing.flip(0)).tanh()
        with torch.no_grad():
            self.x, self.y = self.x.bfloat16().to(ARMS[arm]), self.y.bfloat16().to(ARMS[arm])
            for parameter in self.model.parameters():
                parameter.copy_(parameter.bfloat16())
        self.model.to(ARMS[arm])
        self.optimizers = subject.build(self.model.parameters())

    def loss(self, number: int) -> torch.Tensor:
        """The loss of a batch, in float32 or wider."""
        wide = torch.float64 if self.arm == "float64" else torch.float32
        autocast = torch.autocast("cpu", torch.bfloat16) if self.arm == "master weights" else nullcontext()
        with autocast:
            return nn.functional.mse_loss(self.model(self.x[number]).to(wide), self.y[number].to(wide))

    def step(self, number: int) -> float:
        """One training step."""
        batch = number % _BATCHES

        def closure() -> torch.Tensor:
            for parameter in self.model.parameters():
                parameter.grad = None
            loss = self.loss(batch)
            loss.backward()
            if self.subject.sparse:
                for parameter in self.model.parameters():
                    parameter.grad = parameter.grad.to_sparse()
            return loss

        if self.subject.closure:
            return float(self.optimizers[0].step(closure))
        value = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return value.item()

    @torch.no_grad()
    def weights(self) -> dict[str, torch.Tensor]:
        """By name, a float64 copy."""
        return {name: parameter.double().clone() for name, parameter in self.model.named_parameters()}

    def mapping(self) -> dict[str, Any]:
        """The training loop as an audit takes it."""
        return {"model": self.model, "optimizer": self.optimizers, "step": self.step}


@torch.no_grad()
def loss_at(subject: OptimizerSubject, weights: dict[str, torch.Tensor]) -> float:
    """The loss over all batches at some weights, in float64."""
    exact = Problem(replace(_PLAIN, hidden=subject.hidden), "float64")
    exact.model.load_state_dict(weights)
    return sum(float(exact.loss(number)) for number in range(_BATCHES)) / _BATCHES


def states_of(optimizers: list[torch.optim.Optimizer]) -> str:
    """The dtypes of the floating-point states, with the names of those that differ from most."""
    kinds: dict[str, list[str]] = {}
    for optimizer in optimizers[:1]:
        for state in optimizer.state.values():
            for key, value in _tensors(state):
                if value.is_floating_point() or type(value) is not torch.Tensor:
                    kind = str(value.dtype).removeprefix("torch.")
                    kind += "" if type(value) in (torch.Tensor, nn.Parameter) else f" ({type(value).__name__})"
                    kinds.setdefault(kind, []).append(key)
                elif value.dtype in (torch.uint8, torch.int8) and value.numel() > 1:
                    kinds.setdefault(str(value.dtype).removeprefix("torch."), []).append(key)
    texts = [f"{kind}: {', '.join(dict.fromkeys(keys))}" for kind, keys in kinds.items()]
    return "; ".join(texts) or "none"


def _tensors(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    named = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    for key, value in named:
        name = path or str(key)
        if isinstance(value, torch.Tensor):
            yield name, value
        else:
            yield from _tensors(value, name)


@contextmanager
def _eagerly() -> Iterator[None]:
    """Without the compilation that some packages ask for inside of `step`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            torch.compiler.set_stance("default")


@torch.no_grad()
def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.to_dense().flatten() if t.layout is not torch.strided else t.flatten() for t in tensors])


def ran(subject: OptimizerSubject, arm: str, steps: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a run came to, and the weights at its end."""
    with _eagerly():
        row: dict[str, Any] = {"exception": "", "nonfinite from": None, "unchanged": None, "states": ""}
        begun = time.process_time()
        try:
            problem = Problem(subject, arm)
            parameters = list(problem.model.parameters())
            before = _flat(parameters)
            unchanged = torch.zeros((), dtype=torch.int64)
            updates = torch.zeros((), dtype=torch.int64)
            for number in range(steps):
                problem.step(number)
                after, moved = _flat(parameters), _flat([p.grad for p in parameters]) != 0
                updates += moved.sum()
                unchanged += (moved & (after == before)).sum()
                before = after
                if not bool(after.isfinite().all()):
                    row["nonfinite from"] = number
                    break
            row["unchanged"] = float(unchanged / updates) if updates else None
            row["states"] = states_of(problem.optimizers)
            weights = problem.weights()
        except Exception as error:  # noqa: BLE001  # a package may refuse by any exception; the row says which
            row["exception"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            weights = {}
        row["seconds"] = round(time.process_time() - begun, 2)
    return row, weights


def without_effect(subject: OptimizerSubject, arm: str) -> list[str]:
    """The options that change no bit of the weights, whether they are set or zero."""
    with _eagerly():
        try:
            idle = []
            for option in OPTIONS:
                ends = []
                for cleared in (False, True):
                    problem = Problem(subject, arm)
                    groups = [group for optimizer in problem.optimizers[:1] for group in optimizer.param_groups]
                    if not all(isinstance(group.get(option), float) and group[option] > 0 for group in groups):
                        break
                    for group in groups if cleared else ():
                        group[option] = 0.0
                    for number in range(_TRIED):
                        problem.step(number)
                    ends.append(_flat(list(problem.model.parameters())))
                if len(ends) == 2 and torch.equal(*(end.nan_to_num(123.0) for end in ends)):
                    idle.append(option)
            return idle
        except Exception:  # noqa: BLE001  # refused: `ran` says so
            return []


def compared(
    subject: OptimizerSubject,
    start: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """How far the end of a run is from that in float64.

    distance: the norm of the difference by that of the way that the float64 run went (1.0 is what weights that never
    move have). arrived: per tensor the projection of the way on that of float64; the least, and the tensor's name.
    """
    if not exact or not weights or not all(bool(w.isfinite().all()) for w in (*weights.values(), *exact.values())):
        return {"distance": None, "arrived": None, "least": "", "loss": None}
    way = {name: exact[name] - start[name] for name in exact}
    length = math.sqrt(sum(float(part.square().sum()) for part in way.values()))
    off = math.sqrt(sum(float((weights[name] - exact[name]).square().sum()) for name in exact))
    parts = {
        name: float(((weights[name] - start[name]) * part).sum() / part.square().sum())
        for name, part in way.items()
        if float(part.norm()) > 1e-3 * length
    }
    least = min(parts, key=lambda name: parts[name], default="")
    return {
        "distance": off / length if length else None,
        "arrived": parts.get(least),
        "least": least,
        "loss": loss_at(subject, weights),
    }


def measured(subject: OptimizerSubject, steps: int) -> dict[str, Any]:
    """All runs of an optimizer, by their names."""
    start = Problem(replace(_PLAIN, hidden=subject.hidden), "float64").weights()
    exact: dict[str, torch.Tensor] = {}
    runs = {}
    for arm in ARMS:
        row, weights = ran(subject, arm, steps)
        exact = weights if arm == "float64" else exact
        runs[arm] = {**row, **compared(subject, start, exact, weights)}
    return runs


def audited(subject: OptimizerSubject, arm: str) -> dict[str, Any]:
    """What the audit of the training mapping says: by check the gravest verdict, and the messages of what fails."""
    begun = time.process_time()
    with _eagerly():
        try:
            problem = Problem(subject, arm)
        except Exception as error:  # noqa: BLE001
            return {"exception": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
        try:
            run = ampcheck.audit(problem.mapping(), checks=CHECKS, name=subject.name)
        except Exception as error:  # noqa: BLE001  # a defect of the audit is a row as well
            return {"exception": f"the audit raised {type(error).__name__}: {error}".splitlines()[0][:160]}
    verdicts: dict[str, list[str]] = {}
    for finding in run.findings:
        verdicts.setdefault(finding.check, []).append(finding.verdict.value)
    loud = [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]
    return {
        "verdicts": verdicts,
        "findings": [[f.check, f.verdict.value, f.message, f.hint] for f in loud],
        "seconds": round(time.process_time() - begun, 2),
    }
