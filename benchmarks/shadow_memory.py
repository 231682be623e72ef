"""Peak memory of a training step with and without the shadow, one small model per family, each in its own process.

    python benchmarks/shadow_memory.py --evidence reports/evidence/shadow_memory.json [--only embedding] [--device cuda]

Each process runs forward, backward and a step of SGD or Adam under bfloat16 autocast, and reports its largest resident
set, or, on a GPU, the most memory that tensors took.
What the shadow adds is the difference; it is kept beside the bytes of the weights and those of all companions after
the step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _evidence import markdown_table, write_evidence
from shadow_cost import ResNet, Transformer
from torch import nn
from torch.nn import functional as F

from ampcheck.shadow import Shadow

MIB = 2**20


class Recurrent(nn.Module):
    """Two layers of LSTM and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(128, 256, 2, batch_first=True), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of squares of the scores."""
        return self.head(self.lstm(x)[0][:, -1]).square().mean()


class Autoencoder(nn.Module):
    """Convolutions down and transposed convolutions up, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 64, 3, 2, 1)])
        self.norm = nn.GroupNorm(8, 32)
        self.up = nn.ModuleList([nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ConvTranspose2d(32, 3, 4, 2, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The error of the reconstruction."""
        first = F.silu(self.norm(self.down[0](x)))
        return F.mse_loss(self.up[1](F.silu(self.up[0](self.down[1](first))) + first).float(), x)


class Graph(nn.Module):
    """Two rounds of messages along edges, summed at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(128, 128), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of squares of the states of the nodes."""
        source, target = torch.randint(0, len(x), (2, 8 * len(x)), generator=torch.Generator().manual_seed(0)).to(
            x.device
        )
        for _ in range(2):
            sums = torch.zeros_like(x).index_add_(0, target, self.message(x)[source].float())
            x = torch.tanh(self.update(torch.cat([x, sums], 1))).float()
        return x.square().mean()


class Scan(nn.Module):
    """A gated linear recurrence over time, as in state-space models."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Linear(128, 256), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of squares of the results."""
        values, gates = self.gates(x).chunk(2, -1)
        state, states = torch.zeros_like(values[:, 0]), []
        for value, gate in zip(values.unbind(1), torch.sigmoid(gates).unbind(1), strict=True):
            state = gate * state + (1 - gate) * value
            states.append(state)
        return self.out(torch.stack(states, 1)).square().mean()


class Embedding(nn.Module):
    """A table of 256 MiB, of which a batch reads 1,000 rows, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(1 << 20, 64), nn.Linear(64, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean of squares of the scores."""
        return self.head(self.table(ids)).square().mean()


def perceptron() -> nn.Module:
    """Three layers; its output is no loss, the step takes the mean of squares."""
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "perceptron": (perceptron, lambda: torch.randn(64, 256)),
    "convolutional (ResNet-18)": (ResNet, lambda: torch.randn(2, 3, 64, 64)),
    "transformer": (Transformer, lambda: torch.randint(0, 1000, (2, 64))),
    "recurrent (LSTM)": (Recurrent, lambda: torch.randn(8, 32, 128)),
    "autoencoder": (Autoencoder, lambda: torch.randn(4, 3, 64, 64)),
    "graph": (Graph, lambda: torch.randn(1000, 128)),
    "state space": (Scan, lambda: torch.randn(8, 64, 128)),
    "embedding of 256 MiB": (Embedding, lambda: torch.randint(0, 1 << 20, (1000,))),
}


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 1e-3),
}


def measured(family: str, optimizer_name: str, watched: bool, device: str) -> dict[str, float]:
    """Peak memory of this process in bytes, bytes of the weights and of all companions after the step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    build, make = FAMILIES[family]
    model, data = build().to(device), make().to(device)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    shadow = Shadow()
    with shadow if watched else contextlib.nullcontext():
        with torch.autocast(device, torch.bfloat16):
            loss = model(data)
        (loss if loss.dim() == 0 else loss.float().square().mean()).backward()
        optimizer.step()
    return {
        "peak": torch.cuda.max_memory_allocated() if device == "cuda" else _largest_resident_set(),
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "companions": shadow.store.nbytes(),
    }


def _largest_resident_set() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _child(family: str, optimizer: str, watched: bool, device: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", family, "--optimizer", optimizer, "--device", device]
    command += ["--watched"] if watched else []
    child = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return result


def row_of(family: str, optimizer: str, device: str) -> dict[str, Any]:
    """Peak memory of one family without and with the shadow, in MiB."""
    plain, watched = (_child(family, optimizer, watched, device) for watched in (False, True))
    return {
        "family": family,
        "optimizer": optimizer,
        "weights in MiB": round(plain["weights"] / MIB, 2),
        "peak without in MiB": round(plain["peak"] / MIB, 1),
        "peak with in MiB": round(watched["peak"] / MIB, 1),
        "added in MiB": round((watched["peak"] - plain["peak"]) / MIB, 1),
        "companions over weights": round(watched["companions"] / plain["weights"], 2),
    }


def main() -> None:
    """Measure every family and write the evidence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evidence", type=Path)
    parser.add_argument("--only", metavar="TEXT", default="", help="families whose names contain it")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--measure", metavar="FAMILY", help=argparse.SUPPRESS)
    parser.add_argument("--optimizer", default="SGD", help=argparse.SUPPRESS)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options.measure, options.optimizer, options.watched, options.device)))
        return
    rows = [
        row_of(family, optimizer, options.device)
        for family in FAMILIES
        for optimizer in OPTIMIZERS
        if options.only in family
    ]
    table = markdown_table(rows)
    print("\n".join(table))
    if options.evidence:
        write_evidence(options.evidence, {"families": rows}, table, device=options.device)


if __name__ == "__main__":
    main()
