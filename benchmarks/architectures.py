"""Builds every architecture of the zoo that a target without code can name, and runs it forward and backward.

    python benchmarks/architectures.py ../shared/zoo --more torchvision timm --json reports/evidence/architectures.json

Each in a process of its own, forked from one with the libraries imported. --more: also every model of torchvision, one
of each module of timm, every model type of transformers. Of those that do not run, the reason is the message that a
user gets.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _evidence import markdown_table, write_evidence
from _ledger_isolated import isolated

from ampcheck.architectures import build_target
from ampcheck.core.errors import UsageError, brief
from ampcheck.torchtools.pytree import tensors

SECONDS = 120
"""Of a processor, for one architecture."""

LIBRARIES = ("transformers", "diffusers", "timm", "torchvision")
SMALL = 20_000_000
"""Weights up to which a model counts as small."""


def of_zoo(folder: Path) -> Iterator[str]:
    with (folder / "results.csv").open(encoding="utf-8") as lines:
        classes = [row["cls"] for row in csv.DictReader(lines)]
    for name in dict.fromkeys(classes):
        library, _, model = name.partition(".")
        if library in LIBRARIES:
            yield f"{library}:{model}"


def of_library(name: str) -> Iterator[str]:
    library = importlib.import_module(name)
    if name == "torchvision":
        names = library.models.list_models()
    elif name == "timm":
        names = [each for module in library.list_modules() for each in library.list_models(module=module)[:1]]
    else:
        names = list(library.CONFIG_MAPPING)
    yield from (f"{name}:{each}" for each in names)


def judged(target: str) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF)
    row: dict[str, Any] = {"target": target, "runs": False, "backward": False, "loss": False, "weights": None}
    try:
        built = build_target(target)
        row["runs"], row["loss"] = True, built.inputs.loss
        row["weights"] = sum(weight.numel() for weight in built.model.parameters())
        row["model"], row["tried"] = type(built.model).__name__, len(built.failures) + 1
        row["inputs"] = built.inputs.words()
        output = built.model(*built.inputs.args, **built.inputs.kwargs)
        floats = [
            tensor.float() for _, tensor in tensors(output) if tensor.requires_grad and tensor.is_floating_point()
        ]
        loss = output.loss if built.inputs.loss else sum(value.square().mean() for value in floats)
        loss.backward()
        row["backward"] = any(weight.grad is not None for weight in built.model.parameters())
    except UsageError as error:
        row["reason"] = str(error)
    except Exception as error:  # noqa: BLE001  # the library's code may raise anything
        row["reason"] = f"backward: {brief(error)}"
    used = resource.getrusage(resource.RUSAGE_SELF)
    row["seconds"] = round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", type=Path, metavar="ZOO", help="the folder with the zoo's results.csv")
    parser.add_argument(
        "--more", nargs="*", default=[], choices=("torchvision", "timm", "transformers"), help="all of these too"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="targets with this text in them")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    for name in LIBRARIES:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    importlib.import_module("transformers.modeling_utils")
    groups = {
        "zoo": list(of_zoo(options.zoo)),
        "more": [target for name in options.more for target in of_library(name)],
    }
    groups["more"] = [target for target in groups["more"] if target not in groups["zoo"]]
    rows: list[dict[str, Any]] = []
    for group, targets in groups.items():
        chosen = [target for target in targets if options.only in target]
        for target, result in isolated(chosen, judged, jobs=1, seconds=lambda _: SECONDS):
            row = result if isinstance(result, dict) else {"target": target, "runs": False, "reason": repr(result)}
            rows.append({"group": group, **row})
            words = [row.get("weights"), row.get("tried"), row.get("seconds"), row.get("inputs"), row.get("reason", "")]
            print(target, "runs" if row["runs"] else "FAILS", *words, flush=True)
    table = list(summary(rows))
    print("\n".join(table))
    if options.json:
        versions = {
            name: importlib.import_module(name).__version__ for name in LIBRARIES if importlib.util.find_spec(name)
        }
        write_evidence(options.json, {"versions": versions, "rows": rows}, table, a_line_each="rows")


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    counts = []
    for key in dict.fromkeys((row["group"], row["target"].partition(":")[0]) for row in rows):
        own = [row for row in rows if (row["group"], row["target"].partition(":")[0]) == key]
        runs = [row for row in own if row["runs"]]
        counts.append(
            {
                "group": key[0], "library": key[1], "architectures": len(own), "run": len(runs),
                "backward": sum(row["backward"] for row in runs), "own loss": sum(row["loss"] for row in runs),
                "up to 20 million weights": sum((row["weights"] or 0) <= SMALL for row in runs),
                "at the first try": sum(row["tried"] == 1 for row in runs),
            }
        )  # fmt: skip
    yield from markdown_table(counts)
    yield ""
    failed = [
        {"target": row["target"], "reason": row.get("reason", "").replace("|", "/")} for row in rows if "reason" in row
    ]
    yield f"What does not run, or not backward ({len(failed)}), and the sentence that says why:"
    yield ""
    yield from markdown_table(failed or [{"target": "none", "reason": ""}])
    yield ""
    kinds = Counter(len((row.get("inputs") or "").split(", ")) for row in rows if row["runs"])
    yield f"Inputs of a call: {', '.join(f'{count} models with {number}' for number, count in sorted(kinds.items()))}."


if __name__ == "__main__":
    main()
