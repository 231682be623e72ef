"""A small GPT trained in five precisions, eager and compiled: what it learns, and what the audit says of each loop.

    python benchmarks/training_modes.py [--steps N] [--only MODE ...] [--json PATH]

The model has nanoGPT's size for a CPU (4 layers, 4 heads, width 128, 64 characters, batches of 12) and learns the
demo's corpus with AdamW. After N steps (200) the loop is audited where it stands. Rows that the file holds are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _evidence import markdown_table, write_evidence

import ampcheck
from ampcheck.demo import CharTransformer, batch

MODES = ("float32", "autocast float16", "autocast bfloat16", "pure bfloat16", "naive float16")
COLUMNS = ("mode", "compiled", "loss 0", "loss 50", "loss 100", "last loss", "step ms", "failed", "warned", "audit s")


def loop(mode: str, compiled: bool) -> ampcheck.Subject:
    """A training loop; naive float16 casts everything and scales nothing."""
    torch.manual_seed(0)
    model = CharTransformer(layers=4)
    cast = {"pure bfloat16": torch.bfloat16, "naive float16": torch.float16}.get(mode)
    if cast is not None:
        model.to(cast)
    dtype = {"autocast float16": torch.float16, "autocast bfloat16": torch.bfloat16}.get(mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=mode == "autocast float16")
    run = torch.compile(model) if compiled else model

    def step(number: int) -> float:
        characters, targets = batch(12, 64, seed=number)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = run(characters, targets)[1]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    shape = {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}
    return ampcheck.Subject(shape, name=f"{mode}{', compiled' if compiled else ''}")


def row(mode: str, compiled: bool, steps: int) -> dict[str, Any]:
    """Train, then audit where the loop stands."""
    torch.compiler.reset()
    subject = loop(mode, compiled)
    step = subject.shape["step"]
    losses = [step(number) for number in range(2)]
    began = time.perf_counter()
    losses += [step(number) for number in range(2, steps)]
    each = (time.perf_counter() - began) / max(1, steps - 2)
    began = time.perf_counter()
    run = ampcheck.audit(subject)
    taken = time.perf_counter() - began
    facts = {
        verdict: sorted({finding.check for finding in run.of(ampcheck.Verdict(verdict))})
        for verdict in ("fail", "warn")
    }
    at = [round(losses[number], 4) if number < len(losses) else None for number in (0, 50, 100, steps - 1)]
    rest = (round(1000 * each, 1), ", ".join(facts["fail"]), ", ".join(facts["warn"]), round(taken, 1))
    messages = [f"{f.check}: {f.message}" for f in run.findings if f.verdict.value in ("fail", "warn")]
    return {**dict(zip(COLUMNS, (mode, compiled, *at, *rest), strict=True)), "messages": messages}


def markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from markdown_table(rows, COLUMNS)
    for one in rows:
        if one["messages"]:
            yield ""
            yield f"**{one['mode']}{', compiled' if one['compiled'] else ''}**"
            yield ""
            yield from (f"- {message}" for message in one["messages"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=list(MODES))
    parser.add_argument("--json", default="reports/evidence/training_modes.json")
    options = parser.parse_args()
    path = Path(options.json)
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    for mode in options.only:
        for compiled in (False, True):
            rows = [one for one in rows if (one["mode"], one["compiled"]) != (mode, compiled)]
            rows.append(row(mode, compiled, options.steps))
            order = {name: place for place, name in enumerate(MODES)}
            rows.sort(key=lambda one: (order[one["mode"]], one["compiled"]))
            print(next(one for one in rows if (one["mode"], one["compiled"]) == (mode, compiled)), flush=True)
            write_evidence(path, {"steps": options.steps, "rows": rows}, markdown(rows))


if __name__ == "__main__":
    main()
