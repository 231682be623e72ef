"""What it costs to look inside compiled graphs.

    python benchmarks/bench_telemetry.py [--rounds N] [--threads N] [--device cuda] [--mode MODE] [--json PATH]

A step is forward and backward under autocast, of the demo scaled to 4 layers of width 256 (8 by 64 characters) and of
a GPT-2 of the same size from transformers. Every arm has its own compilation in one process; round by round each arm
runs a block of steps, in random order, and the figure is the median over the rounds of its time by that of the plain
compiled block of the same round. `casts`, `ops` and `all` measure every step, `casts/10` and `all/10` every tenth.
Beside them, by the eager step: module hooks that take two statistics of each output, and a dispatch mode that takes
seven of each result. Compilation is timed with Inductor's caches off. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

import torch
from _evidence import markdown_table, write_evidence
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.demo import CharTransformer, batch
from ampcheck.telemetry.sites import Level
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools import dynamo

BLOCK = 10


def demo(device: str, layers: int) -> tuple[torch.nn.Module, Callable[[Any], torch.Tensor]]:
    torch.manual_seed(0)
    model = CharTransformer(layers=layers, width=256).to(device)
    inputs = tuple(t.to(device) for t in batch(8, 64))
    return model, lambda called: called(*inputs)[1]


def gpt2(device: str, layers: int) -> tuple[torch.nn.Module, Callable[[Any], torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=256, n_layer=layers, n_head=4, n_positions=64, vocab_size=256)
    ids = torch.randint(0, 256, (8, 64), device=device)
    model = GPT2LMHeadModel(config).eval().to(device)
    return model, lambda called: called(input_ids=ids, labels=ids, use_cache=False).loss


SUBJECTS = {"demo": demo, "gpt2": gpt2}


class Arm:
    """One way to run the step. steps: of a block; base: the arm that its time is divided by."""

    def __init__(self, name: str, step: Callable[[], None], *, steps: int = BLOCK, base: str = "plain") -> None:
        self.name, self.step, self.steps, self.base = name, step, steps, base
        self.seconds: list[float] = []

    def run(self, synchronize: Callable[[], None]) -> None:
        synchronize()
        begun = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        synchronize()
        self.seconds.append((time.perf_counter() - begun) / self.steps)


class Statistics(TorchDispatchMode):
    """Seven statistics of every floating result, as a tool without a compiler would take them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel():
                size = one.detach().float().abs()
                tests = (size == 0, size < 2.0**-126, size.isinf(), size.isnan(), size >= 65520.0)
                _ = [size.amax(), torch.where(size > 0, size, torch.inf).amin(), *(test.sum() for test in tests)]
        return result


def hooked(model: torch.nn.Module) -> torch.nn.Module:
    def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            size = output.detach().abs()
            _ = size.amax(), torch.where(size > 0, size, torch.inf).amin()

    for module in model.modules():
        module.register_forward_hook(keep)
    return model


def stepping(model: torch.nn.Module, called: Any, loss: Any, device: str, dtype: torch.dtype) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(device, dtype):
            total = loss(called)
        total.backward()
        model.zero_grad()

    return step


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    dtype = getattr(torch, options.dtype)
    model, loss = SUBJECTS[name](options.device, options.layers)
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    inductor = dynamo.backend("inductor")
    compiles: dict[str, float] = {}
    arms: list[Arm] = []
    seen: dict[str, Any] = {}
    dynamo.reset()
    torch._dynamo.config.recompile_limit = 64

    def compiled(arm: str, watching: Any) -> tuple[torch.nn.Module, Callable[[], None]]:
        twin = copy.deepcopy(model)
        # A backend of its own keeps the arms apart in Dynamo's cache: they share the code of the model's class.
        own = {"backend": lambda graph, inputs: inductor(graph, inputs)} if not options.mode else {"mode": options.mode}
        step = stepping(twin, torch.compile(twin, **own), loss, options.device, dtype)
        begun = time.perf_counter()
        with watching:
            step()
            step()
        synchronize()
        compiles[arm] = time.perf_counter() - begun
        return twin, step

    arms.append(Arm("plain", compiled("plain", nullcontext())[1]))
    arms.append(Arm("plain again", compiled("plain again", nullcontext())[1]))
    for level in options.levels.split(","):
        for every in (1, 10):
            if every == 10 and level == "ops":
                continue
            telemetry = Telemetry((), level=Level(level), every=every)
            arm = level if every == 1 else f"{level}/10"
            step = compiled(arm, telemetry.watching())[1]

            def watched(step: Callable[[], None] = step, telemetry: Telemetry = telemetry) -> None:
                telemetry.on = True
                step()

            arms.append(Arm(arm, watched))
            seen[arm] = telemetry
    eager, with_hooks = copy.deepcopy(model), hooked(copy.deepcopy(model))
    step = stepping(eager, eager, loss, options.device, dtype)

    def dispatched() -> None:
        with Statistics():
            step()

    arms.append(Arm("eager", step))
    arms.append(Arm("eager, module hooks", stepping(with_hooks, with_hooks, loss, options.device, dtype), base="eager"))
    arms.append(Arm("eager, dispatch mode", dispatched, steps=1, base="eager"))
    shuffled = random.Random(0)
    for number in range(options.rounds + 1):
        for arm in shuffled.sample(arms, len(arms)):
            arm.run(synchronize)
            if number == 0:
                arm.seconds.clear()  # the first round warms up
    by_name = {arm.name: arm for arm in arms}
    rows = []
    for arm in arms:
        ratios = sorted(a / b for a, b in zip(arm.seconds, by_name[arm.base].seconds, strict=True))
        stats = seen[arm.name].read() if arm.name in seen else None
        rows.append(
            {
                "arm": arm.name,
                "by": arm.base,
                "ratio": round(statistics.median(ratios), 4),
                "low": round(ratios[len(ratios) // 4], 4),
                "high": round(ratios[-1 - len(ratios) // 4], 4),
                "fastest": round(min(arm.seconds) / min(by_name[arm.base].seconds), 4),
                "ms": round(1e3 * statistics.median(arm.seconds), 2),
                "compile s": round(compiles[arm.name], 1) if arm.name in compiles else None,
                "sites": len(stats.sites) if stats is not None else None,
                "values": sum(s.numel // max(s.calls, 1) for s in stats.sites) if stats is not None else None,
                "perturbation": stats.perturbation if stats is not None else None,
            }
        )
    return {"subject": name, "rows": rows}


def markdown(found: list[dict[str, Any]]) -> Iterator[str]:
    yield "Ratios are medians over the rounds, with the quartiles; `fastest` divides the fastest blocks."
    for one in found:
        yield ""
        yield f"## {one['subject']}"
        yield ""
        columns = ("arm", "by", "ratio", "low", "high", "fastest", "ms", "compile s", "sites", "values", "perturbation")
        yield from markdown_table(one["rows"], columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", default=list(SUBJECTS), help="of: " + ", ".join(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--levels", default="casts,all")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mode", help="of torch.compile, such as reduce-overhead; one arm each")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = [measure(name, options) for name in options.subjects]
    lines = list(markdown(found))
    print("\n".join(lines))
    if options.json:
        write_evidence(options.json, {"subjects": found}, lines, device=options.device)


if __name__ == "__main__":
    main()
