"""PyTorch's own baselines of single models beside what the sweep measured of the same architectures.

    python benchmarks/pytorch_baselines.py COMMIT/SPEEDUPS.csv COMMIT/BREAKS.csv
        [--sweep reports/evidence/zoo_speed.json] [--json reports/evidence/pytorch_baselines.json]

The files are those of PyTorch's repository under `benchmarks/dynamo`, of the commits that their folders are named by:
`expected_ci_speedup_inductor_torchbench_cpu.csv`, the speedups that its nightly job expects of whole models on a server
(c7i.metal-24xl), and `ci_expected_accuracy/cpu_inductor_huggingface_inference.csv`, verdicts and graph breaks of each
model. The sweep has small models on two cores, in which calls weigh more: a speedup is no reproduction of another.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from _evidence import markdown_table, write_evidence

SAME = {
    "basic_gnn_gcn": "pyg/GCN",
    "hf_Bert_large": "hf/BertForMaskedLM",
    "hf_GPT2": "hf/GPT2DoubleHeadsModel",
    "llama": "hf/ArceeForCausalLM",
    "llama_v2_7b_16h": "hf/MistralForCausalLM",
    "timm_regnet": "hf/RegNetForImageClassification",
    "timm_vision_transformer": "vit-pytorch/SimpleViT",
    "GPT2ForSequenceClassification": "hf/GPT2DoubleHeadsModel",
    "MBartForCausalLM": "hf/MBartForConditionalGeneration",
    "MegatronBertForCausalLM": "hf/MegatronBertForMaskedLM",
    "RobertaForCausalLM": "hf/RobertaForMaskedLM",
}
"""The model of the sweep with the architecture of a baseline, where it has another name."""


def of_file(file: Path) -> Iterator[dict[str, str]]:
    """The rows of a table; those that PyTorch's job leaves out for now begin with a `#`."""
    lines = [line.removeprefix("#") for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    yield from csv.DictReader(lines)


def swept(file: Path) -> dict[str, dict[str, Any]]:
    """What the sweep says of the compilation of each model."""
    tables = json.loads(file.read_text(encoding="utf-8"))["run"]["tables"]
    table = next(table for table in tables if table["title"] == "Compilation")
    rows = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    return {row["target"]: row for row in rows}


def speedup(row: dict[str, str], ours: dict[str, Any] | None) -> dict[str, Any]:
    """An expected speedup beside that of the sweep, with its interval."""
    gain = "compiled" if row["data_type"] == "float32" else "compiled, bfloat16"
    found = [round(ours[gain + end], 3) if ours else None for end in ("", " low", " high")]
    return {
        "PyTorch's": row["name"],
        "precision": row["data_type"],
        "times eager": round(float(row["perf_speedup_target_c7i_metal_24xl"]), 3),
        "of the sweep": ours["target"] if ours else None,
        **dict(zip(("times eager, here", "from", "to"), found, strict=True)),
    }


def broken(row: dict[str, str], ours: dict[str, Any]) -> dict[str, Any]:
    """The expected verdict and graph breaks beside those of the sweep."""
    return {
        "PyTorch's": row["name"],
        "accuracy": row["accuracy"],
        "graph breaks": int(row["graph_breaks"]),
        "of the sweep": ours["target"],
        "accuracy, here": ours["accuracy, float32"],
        "graph breaks, here": ours["breaks"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speedups", type=Path)
    parser.add_argument("breaks", type=Path)
    parser.add_argument("--sweep", type=Path, default=Path("reports/evidence/zoo_speed.json"))
    parser.add_argument("--json", type=Path, default=Path("reports/evidence/pytorch_baselines.json"))
    options = parser.parse_args()
    models = swept(options.sweep)
    speedups = [speedup(row, models.get(SAME.get(row["name"], ""))) for row in of_file(options.speedups)]
    named = [(row, models.get(SAME.get(row["name"], f"hf/{row['name']}"))) for row in of_file(options.breaks)]
    breaks = [broken(row, ours) for row, ours in named if ours]
    paired = [row for row in speedups if row["of the sweep"]]
    sources = ["/".join(file.parts[-2:]) for file in (options.speedups, options.breaks)]
    data = {
        "sources": sources,
        "expected": geometric_mean(row["times eager"] for row in speedups),
        "paired": [geometric_mean(row[key] for row in paired) for key in ("times eager", "times eager, here")],
        "speedups": speedups,
        "breaks": breaks,
    }
    prose = " ".join((__doc__ or "").split("\n\n")[2].split())
    table = [prose, "", *markdown_table(speedups), "", *markdown_table(breaks), "", f"Sources: {', '.join(sources)}."]
    write_evidence(options.json, data, table)


if __name__ == "__main__":
    main()
