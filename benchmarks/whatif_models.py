"""What small models of several families lose in twelve recipes, and the fronts of which layers to keep.

    python benchmarks/whatif_models.py [--models NAMES] [--json reports/evidence/whatif.json]

Random weights, one call, forward and backward. A front mixes rowwise, mxfp8 and nvfp4 with 16 bits. It is compared, at
no more bits, with each of these in all layers, and with the habit of keeping the first and the last layer beside nvfp4.

Needs transformers, diffusers and timm; `whatif.md` is written beside the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _evidence import write_evidence

from ampcheck.core.environment import installed
from ampcheck.core.subject import load_subject
from ampcheck.parity.execution import Side, execute
from ampcheck.records.whatif import Point, WhatIf
from ampcheck.torchtools.seeds import seeded
from ampcheck.whatif import RECIPES, Recipe, measure
from ampcheck.whatif.linear import Products
from ampcheck.whatif.measure import Runner

MODELS = (
    "transformers:LlamaForCausalLM",
    "transformers:GPT2LMHeadModel",
    "transformers:BertForMaskedLM",
    "transformers:ViTForImageClassification",
    "timm:vit_base_patch16_224",
    "diffusers:DiTTransformer2DModel",
    "transformers:WhisperForConditionalGeneration",
    "transformers:MixtralForCausalLM",
    "diffusers:UNet2DConditionModel",
)
MIXED = ("rowwise", "mxfp8", "nvfp4")


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the least of two times."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return result, min(times)


def of_habit(every: WhatIf) -> tuple[dict[str, Recipe], float]:
    """Nvfp4 in all layers but the first and the last, and its bits per weight."""
    weights = {layer.module: layer.weights for layer in every.losses[0].layers}
    first, *inner, last = weights
    wide = 16 * (weights[first] + weights[last])
    bits = (wide + RECIPES["nvfp4"].bits * sum(weights[m] for m in inner)) / sum(weights.values())
    return dict.fromkeys(inner, RECIPES["nvfp4"]), bits


def best_within(front: WhatIf, bits: float) -> Point:
    return min((p for p in front.front if p.name == "mixed" and p.bits <= bits + 1e-6), key=lambda p: p.measured)


def of_model(name: str) -> dict[str, Any]:
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(), seeded():
        warnings.simplefilter("ignore")
        subject = load_subject(name)
    call = subject.calls[0]
    _, shadowed = timed(lambda: execute(Side("a", subject.model, call.args, call.kwargs)))
    _, one = timed(lambda: measure(subject, "mxfp8", front=False))
    every, twelve = timed(lambda: measure(subject, RECIPES, front=False))
    choice, bits = of_habit(every)
    start = time.perf_counter()
    front = measure(subject, MIXED, budget=bits)
    searched = time.perf_counter() - start
    runner = Runner(subject)
    ends, own = runner.run(Products(choice)).error(runner.run(Products())), best_within(front, bits)
    beside = {}
    for recipe in MIXED[:2]:  # nothing is narrower than the last
        uniform = next(p for p in front.front if p.name == recipe)
        best = best_within(front, uniform.bits)
        beside[recipe] = {"error": uniform.measured, "mixed_bits": best.bits, "mixed_error": best.measured}
    worst = {loss.recipe: min(loss.layers, key=lambda layer: layer.worst[1].decibels) for loss in every.losses}
    most = {loss.recipe: [m.module for m in sorted(loss.layers, key=lambda m: -m.alone)][:3] for loss in front.losses}
    ratios = [p.measured / p.predicted for p in front.front if p.predicted > 0]
    return {
        "layers": len(every.losses[0].layers),
        "weights": sum(layer.weights for layer in every.losses[0].layers),
        "unseen": dict(every.unseen),
        "seconds": {"shadowed": shadowed, "one recipe": one, "twelve recipes": twelve, "front of three": searched},
        "errors": {loss.recipe: loss.error for loss in every.losses},
        "loss": {loss.recipe: (loss.loss or 0) - (loss.reference or 0) for loss in every.losses},
        "worst": {r: [m.module, m.worst[0], m.worst[1].decibels] for r, m in worst.items()},
        "most_sensitive": most,
        "front": [[p.name, p.bits, p.measured, p.predicted, len(p.choice)] for p in front.front],
        "measured_over_predicted": [min(ratios), max(ratios)],
        "uniform": beside,
        "first_and_last": {"bits": bits, "error": ends, "mixed_bits": own.bits, "mixed_error": own.measured},
    }


def table(models: dict[str, Any]) -> list[str]:
    lines = [(__doc__ or "").split("\n\n")[2].replace("\n", " "), ""]
    lines += ["Error of all gradients, relative, with every linear layer in the recipe:", ""]
    lines += ["| model | layers | " + " | ".join(RECIPES) + " |", "|---|---|" + "---|" * len(RECIPES)]
    for name, one in models.items():
        lines.append(f"| {name} | {one['layers']} | " + " | ".join(f"{one['errors'][r]:.2g}" for r in RECIPES) + " |")
    lines += ["", "At no more bits per weight: a mixture from the front beside one recipe, and beside nvfp4 with the "
              "first and last layer in 16 bits.", ""]  # fmt: skip
    lines += [
        "| model | rowwise, 8 bits | mixed | mxfp8, 8.25 bits | mixed | first and last | mixed |",
        "|---" * 7 + "|",
    ]
    for name, one in models.items():
        cells = [f"{v[key]:.3g}" for v in one["uniform"].values() for key in ("error", "mixed_error")]
        ends = one["first_and_last"]
        cells += [
            f"{ends['error']:.3g} at {ends['bits']:.2f}",
            f"{ends['mixed_error']:.3g} at {ends['mixed_bits']:.2f}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    pairs = {
        **{
            r: [(one["uniform"][r]["mixed_error"], one["uniform"][r]["error"]) for one in models.values()]
            for r in MIXED[:2]
        },
        "first and last": [(o["first_and_last"]["mixed_error"], o["first_and_last"]["error"]) for o in models.values()],
    }
    better = [f"{sum(a < 0.99 * b for a, b in found)} of {len(found)} ({kind})" for kind, found in pairs.items()]
    worse = [f"{sum(a > 1.01 * b for a, b in found)} ({kind})" for kind, found in pairs.items()]
    lines += [
        "",
        f"The mixture's error is smaller by 1 % and more in {', '.join(better)}; larger by that in {', '.join(worse)}.",
    ]
    lines += ["", "| model | layers that cost most in nvfp4 | measured over predicted | shadowed run, s | one recipe | "
              "twelve | front of three |", "|---" * 7 + "|"]  # fmt: skip
    for name, one in models.items():
        low, high = one["measured_over_predicted"]
        times = " | ".join(
            f"{one['seconds'][k]:.2f}" for k in ("shadowed", "one recipe", "twelve recipes", "front of three")
        )
        lines.append(f"| {name} | {', '.join(one['most_sensitive']['nvfp4'])} | {low:.2f} to {high:.2f} | {times} |")
    lines += ["", "Fronts: bits per weight and measured error.", ""]
    for name, one in models.items():
        points = ", ".join(f"{bits:.2f} bits {error:.2g}" for kind, bits, error, *_ in one["front"] if kind == "mixed")
        lines.append(f"- {name}: {points}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path, default=Path("reports/evidence/whatif.json"))
    options = parser.parse_args()
    known = json.loads(options.json.read_text(encoding="utf-8"))["models"] if options.json.exists() else {}
    for name in options.models.split(","):
        start = time.perf_counter()
        known[name] = of_model(name)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        versions = {package: installed(package) for package in ("transformers", "diffusers", "timm")}
        write_evidence(options.json, {"versions": versions, "models": known}, table(known))


if __name__ == "__main__":
    main()
