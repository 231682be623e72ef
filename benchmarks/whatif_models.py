"""What small models of several families lose in twelve recipes, and the fronts of which layers to keep.

    python benchmarks/whatif_models.py [--models NAMES] [--json reports/evidence/whatif.json]

Random weights, one call, forward and backward. A front mixes rowwise, mxfp8 and nvfp4 with 16 bits. It is compared, at
no more bits, with each of these in all layers, and with the habit of keeping the first and the last layer beside nvfp4.
Seconds are of a processor, the least of two runs.

Needs transformers, diffusers and timm; `whatif.md` is written beside the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from _evidence import write_evidence

from ampcheck.core.environment import installed
from ampcheck.core.subject import Subject, load_subject
from ampcheck.parity.execution import Side, execute
from ampcheck.records.whatif import Point, WhatIf
from ampcheck.torchtools.seeds import seeded
from ampcheck.whatif import RECIPES, Recipe, measure
from ampcheck.whatif.linear import Products
from ampcheck.whatif.measure import Runner
from ampcheck.whatif.recipes import PRODUCTS, Operand

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
OUTLIERS = "transformers:LlamaForCausalLM"
"""The model in which one channel before each down projection is made so many times as large, and its weights there as
many times as small: the same function."""
TIMES = 1e5


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the least of two times, of a processor."""
    times = []
    for _ in range(2):
        start = time.process_time()
        result = function()
        times.append(time.process_time() - start)
    return result, min(times)


def of_habit(every: WhatIf) -> tuple[dict[str, Recipe], float]:
    """Nvfp4 in all layers but the first and the last, and its bits per weight."""
    weights = {layer.module: layer.weights for layer in every.losses[0].layers}
    first, *inner, last = weights
    wide = 16 * (weights[first] + weights[last])
    bits = (wide + RECIPES["nvfp4"].bits * sum(weights[m] for m in inner)) / sum(weights.values())
    return dict.fromkeys(inner, RECIPES["nvfp4"]), bits


def alone(operand: Operand) -> Operand:
    return replace(operand, scale="e4m3 alone")


def of_one_level() -> Recipe:
    """Nvfp4 whose scales of blocks stand alone."""
    recipe = RECIPES["nvfp4"]
    products = {name: tuple(map(alone, recipe[name] or ())) for name in PRODUCTS}
    return replace(recipe, name="nvfp4 of one level", **products)


def with_outliers() -> dict[str, Any]:
    """The layers whose forward product loses most, without outliers and with them."""
    recipes, found = ("tensorwise", "nvfp4"), {}
    for times in (1.0, TIMES):
        subject = loaded(OUTLIERS)
        for name, module in subject.model.named_modules():
            if name.endswith("up_proj"):
                module.weight.data[0] *= times
            if name.endswith("down_proj"):
                module.weight.data[:, 0] /= times
        for loss in measure(subject, recipes, front=False).losses:
            layers = sorted(loss.layers, key=lambda layer: layer.products["forward"].decibels)
            found[f"{loss.recipe}, {times:g}"] = [[m.module, m.products["forward"].decibels] for m in layers[:3]]
    return found


def loaded(name: str) -> Subject:
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(), seeded():
        warnings.simplefilter("ignore")
        return load_subject(name)


def best_within(front: WhatIf, bits: float) -> Point:
    return min((p for p in front.front if p.name == "mixed" and p.bits <= bits + 1e-6), key=lambda p: p.measured)


def of_model(name: str) -> dict[str, Any]:
    subject = loaded(name)
    call = subject.calls[0]
    _, shadowed = timed(lambda: execute(Side("a", subject.model, call.args, call.kwargs)))
    _, one = timed(lambda: measure(subject, "mxfp8", front=False))
    every, twelve = timed(lambda: measure(subject, RECIPES, front=False))
    choice, bits = of_habit(every)
    start = time.process_time()
    front = measure(subject, MIXED, budget=bits)
    searched = time.process_time() - start
    runner = Runner(subject)
    ends, own = runner.run(Products(choice)).error(runner.run(Products())), best_within(front, bits)
    beside = {}
    for recipe in MIXED[:2]:  # nothing is narrower than the last
        uniform = next(p for p in front.front if p.name == recipe)
        best = best_within(front, uniform.bits)
        beside[recipe] = {"error": uniform.measured, "mixed_bits": best.bits, "mixed_error": best.measured}
    worst = {loss.recipe: min(loss.layers, key=lambda layer: layer.worst[1].decibels) for loss in every.losses}
    most = {loss.recipe: [m.module for m in sorted(loss.layers, key=lambda m: -m.alone)][:3] for loss in front.losses}
    products = Counter(layer.worst[0] for loss in every.losses if loss.recipe == "tensorwise" for layer in loss.layers)
    (one_level,) = measure(subject, of_one_level(), front=False).losses
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
        "ends": [every.losses[0].layers[0].module, every.losses[0].layers[-1].module],
        "worst products, tensorwise": dict(products),
        "one level": one_level.error,
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


def lessons(models: dict[str, Any], outliers: dict[str, Any]) -> list[str]:
    """What is commonly said of narrow formats, and how often it is so here."""
    count = len(models)
    ends = sum(not set(one["ends"]).isdisjoint(one["most_sensitive"]["nvfp4"]) for one in models.values())
    both = [one["worst products, tensorwise"] for one in models.values()]
    weights = sum(max(products, key=products.get) == "grad_weight" for products in both)
    lines = ["", "What is commonly said, and how often it is so:", ""]
    lines.append(f"- The first or the last layer is among the three that cost most in nvfp4: {ends} of {count}.")
    lines.append(f"- The gradient of the weight is what most layers lose most of, tensorwise: {weights} of {count}.")
    cells = ", ".join(f"{one['errors']['nvfp4']:.2g} and {one['one level']:.2g}" for one in models.values())
    lost = sum(one["one level"] > 1.5 * one["errors"]["nvfp4"] for one in models.values())
    lines.append(
        f"- Nvfp4 without its scale of the tensor: 1.5 times the error and more in {lost} of {count} ({cells})."
    )
    for key, layers in outliers.items():
        recipe, _, times = key.partition(", ")
        worst = ", ".join(f"{name} ({decibels:.1f} dB)" for name, decibels in layers)
        what = "no outliers" if times == "1" else f"one channel before each down projection {times} times as large"
        lines.append(f"- {OUTLIERS}, {what}, {recipe}: the forward products that lose most are {worst}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path, default=Path("reports/evidence/whatif.json"))
    options = parser.parse_args()
    known = json.loads(options.json.read_text(encoding="utf-8"))["models"] if options.json.exists() else {}
    outliers = with_outliers()
    for name in options.models.split(","):
        start = time.perf_counter()
        known[name] = of_model(name)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        versions = {package: installed(package) for package in ("transformers", "diffusers", "timm")}
        data = {"versions": versions, "models": known, "outliers": outliers}
        write_evidence(options.json, data, [*table(known), *lessons(known, outliers)])


if __name__ == "__main__":
    main()
