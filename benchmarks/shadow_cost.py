"""What the shadow costs beside other watchers, per step and in memory, all in one interleaved run.

    python benchmarks/shadow_cost.py --evidence reports/evidence/shadow_cost.json [--rounds 7] [--device cuda]
                                     [--base TREE]

`--base` names a checkout of an earlier commit: its shadow runs the same steps, in a process beside this one and in turn
with it, and each ratio of a step to the plain step is compared with the base's of the same round.

The yardstick is one plain float32 forward and backward: a CPU's own 16-bit kernels can be many times slower. Each
watcher runs the step once in every round, in random order; ratios are medians over rounds of the time over that of the
plain step of the same round. Watchers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from _evidence import markdown_table, write_evidence
from torch import nn
from torch.nn import functional as F

from ampcheck.shadow import Shadow

Step = Callable[[], None]
COMPARED = ["plain float32", "shadow, bfloat16", "shadow, float16"]


class Block(nn.Module):
    """A block of a transformer with 4 heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a feed-forward network, each with a residual connection."""
        b, n, w = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, w))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Transformer(nn.Module):
    """A language model of 4 blocks, 256 wide; its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 256)
        self.blocks, self.head = nn.Sequential(*[Block(256) for _ in range(4)]), nn.Linear(256, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of the next token."""
        logits = self.head(self.blocks(self.tokens(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Residual(nn.Module):
    """Two convolutions with batch norm."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.c2, self.b2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        wide = a != b or stride > 1
        self.short = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b)) if wide else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual block of ResNet-18."""
        return F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))) + self.short(x))


class ResNet(nn.Module):
    """ResNet-18 for 10 classes; its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        layers, a = list[nn.Module](), 64
        for index, b in enumerate((64, 128, 256, 512)):
            layers += [Residual(a, b, 2 if index else 1), Residual(b, b, 1)]
            a = b
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(a, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss against class 0."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        logits = self.head(self.layers(x).mean((2, 3)))
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))


SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "transformer 4 x 256, 2 x 64 tokens": (Transformer, lambda: torch.randint(0, 1000, (2, 64))),
    "resnet18, 2 x 3 x 64 x 64": (ResNet, lambda: torch.randn(2, 3, 64, 64)),
}


def watchers() -> dict[str, tuple[torch.dtype | None, Callable[[nn.Module], AbstractContextManager[Any]]]]:
    """By name: the autocast dtype of the step, and the context around it."""
    bf16, fp16 = torch.bfloat16, torch.float16
    known: dict[str, tuple[torch.dtype | None, Callable[[nn.Module], AbstractContextManager[Any]]]] = {
        "plain float32": (None, lambda _: contextlib.nullcontext()),
        "plain bfloat16": (bf16, lambda _: contextlib.nullcontext()),
        "plain float16": (fp16, lambda _: contextlib.nullcontext()),
        "shadow carried, bfloat16": (bf16, lambda model: Shadow(model, judge=False)),
        "shadow, bfloat16": (bf16, Shadow),
        "shadow, float16": (fp16, Shadow),
        "shadow, float32": (None, Shadow),
        "anomaly mode": (None, lambda _: torch.autograd.detect_anomaly(check_nan=True)),
    }
    with contextlib.suppress(ImportError):
        from torch.utils._debug_mode import DebugMode

        known["PyTorch DebugMode"] = (None, lambda _: DebugMode())
    if importlib.util.find_spec("transformers"):
        known["DebugUnderflowOverflow"] = (None, _underflow_overflow)
    return known


@contextlib.contextmanager
def _underflow_overflow(model: nn.Module) -> Any:
    from transformers.debug_utils import DebugUnderflowOverflow

    before = [dict(module._forward_hooks) for module in model.modules()]
    with contextlib.redirect_stdout(None):
        DebugUnderflowOverflow(model)
        try:
            yield
        finally:
            for module, hooks in zip(model.modules(), before, strict=True):
                module._forward_hooks.clear()
                module._forward_hooks.update(hooks)


def made(name: str, device: str) -> tuple[nn.Module, torch.Tensor, Callable[..., float]]:
    """A subject, its input, and a step of it, which returns its seconds."""
    build, make = SUBJECTS[name]
    torch.manual_seed(0)
    model, data = build().to(device), make().to(device)
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step(dtype: torch.dtype | None, around: AbstractContextManager[Any]) -> float:
        model.zero_grad()
        finish()
        start = time.perf_counter()
        with around, torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            model(data).backward()
        finish()
        return time.perf_counter() - start

    return model, data, step


def serve(device: str) -> None:
    """For each subject named on standard input, run the steps that are compared, and print their seconds."""
    subjects = {name: made(name, device) for name in SUBJECTS}
    for line in sys.stdin:
        model, _, step = subjects[line.strip()]
        known = watchers()
        seconds = {key: step(known[key][0], known[key][1](model)) for key in random.sample(COMPARED, len(COMPARED))}
        print(json.dumps(seconds), flush=True)


def compared(base: Path, rounds: int, device: str) -> list[dict[str, Any]]:
    """Of each subject and shadow the ratio to the plain step here, over that of the base; quartiles of the rounds."""

    def started(tree: Path) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--serve", "--device", device]
        paths = os.pathsep.join((str(tree), str(Path(__file__).parent)))
        return subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": paths}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def asked(process: subprocess.Popen[str], name: str) -> dict[str, float]:
        assert process.stdin is not None
        assert process.stdout is not None
        print(name, file=process.stdin, flush=True)
        seconds = json.loads(process.stdout.readline())
        return {key: value / seconds[COMPARED[0]] for key, value in seconds.items()}

    here, there = (started(tree) for tree in (Path(__file__).parents[1], base))
    rows = []
    for name in SUBJECTS:
        pairs = [(asked(here, name), asked(there, name)) for _ in range(rounds + 1)][1:]  # the first warms up
        for key in COMPARED[1:]:
            low, middle, high = statistics.quantiles([own[key] / other[key] for own, other in pairs], n=4)
            row = {"subject": name, "watcher": key, "over the base": round(middle, 3)}
            rows.append({**row, "low": round(low, 3), "high": round(high, 3)})
    for process in (here, there):
        process.communicate()
    return rows


def measure(name: str, rounds: int, device: str) -> dict[str, Any]:
    """Ratios of the step time over the plain float32 step, and bytes of companions over those of the weights."""
    model, data, step = made(name, device)
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None

    def torchlens() -> float:
        import torchlens

        start = time.perf_counter()
        torchlens.trace(model, data)
        finish()
        return time.perf_counter() - start

    runs: dict[str, Callable[[], float]] = {
        key: (lambda dtype=dtype, around=around: step(dtype, around(model)))
        for key, (dtype, around) in watchers().items()
    }
    if importlib.util.find_spec("torchlens"):
        runs["torchlens (forward alone)"] = torchlens
    times: dict[str, list[float]] = {key: [] for key in runs}
    failed: dict[str, str] = {}
    for number in range(rounds + 1):
        for key in random.sample(sorted(runs), len(runs)):
            if key in failed:
                continue
            try:
                elapsed = runs[key]()
            except Exception as error:  # noqa: BLE001  # a watcher of another version must not end the comparison
                failed[key] = f"{type(error).__name__}: {error}"[:120]
                continue
            if number:  # the first round warms up
                times[key].append(elapsed)
    plain = times["plain float32"]
    ratios = {
        key: round(statistics.median(a / b for a, b in zip(values, plain, strict=True)), 2)
        for key, values in times.items()
        if key not in failed
    }
    model.zero_grad()
    with Shadow(model) as shadow, torch.autocast(device, torch.bfloat16):
        model(data).backward()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    own = {key: round(ratios[key] - ratios[f"plain {key.rpartition(' ')[2]}"], 2) for key in ratios if "shadow" in key}
    return {
        "subject": name,
        "plain step in ms": round(1000 * statistics.median(plain), 1),
        "times the plain float32 step": ratios,
        "the same beyond the run itself": own,
        "companions over weights": round(shadow.store.nbytes() / weights, 2),
        "not measured": failed,
    }


def main() -> None:
    """Measure every subject and write the evidence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evidence", type=Path)
    parser.add_argument("--base", type=Path, metavar="TREE")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        serve(options.device)
        return
    beside = compared(options.base, options.rounds, options.device) if options.base is not None else []
    rows = [measure(name, options.rounds, options.device) for name in SUBJECTS]
    table = ["| subject | watcher | times the plain float32 step |", "|---|---|---|"]
    for row in rows:
        table += [
            f"| {row['subject']} | {key} | {value} |" for key, value in row["times the plain float32 step"].items()
        ]
        table.append(f"| {row['subject']} | companions, times the weights | {row['companions over weights']} |")
    if beside:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=options.base, text=True, capture_output=True
        )
        table += ["", f"Beside {commit.stdout.strip()}, step by step in turn (quartiles over the rounds):", ""]
        table += markdown_table(beside)
    print("\n".join(table))
    if options.evidence is not None:
        data = {"rounds": options.rounds, "subjects": rows, "beside": beside}
        write_evidence(options.evidence, data, table, device=options.device)


if __name__ == "__main__":
    main()
