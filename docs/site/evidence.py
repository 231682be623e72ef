"""Write docs/evidence.md, which claims hold on a CPU and which need a GPU: `python docs/site/evidence.py`.

Every figure is read from the evidence that is named beside it; the site adds the list of all of it (`pages.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "evidence.md"

Row = Mapping[str, Any]

HEAD = """# Evidence

Which claims about speed and compilation hold on a CPU, and which need a GPU: `bash benchmarks/gpu.sh` measures those,
in the parts that the last column names. An interval is at 95 %, of medians of paired, interleaved runs where nothing
else is said. Each table that is linked names its command, versions and hardware; most were measured on two cores.

| claim | on a CPU | figures | what needs `gpu.sh` |
|---|---|---|---|
"""


_SURE = 5
"""Pairs of which the least and the largest are an interval at 94 %."""


def of(name: str) -> dict[str, Any]:
    """The evidence of this name."""
    data: dict[str, Any] = json.loads((ROOT / "reports" / "evidence" / f"{name}.json").read_text(encoding="utf-8"))
    return data


def link(name: str) -> str:
    """To the table of an evidence."""
    return f"[{name}](../reports/evidence/{name}.md)"


def text() -> str:
    """What the page should hold."""
    return HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in _claims()) + "\n" + "\n".join(_baselines()) + "\n"


def _claims() -> Iterator[tuple[str, str, str, str]]:
    """A claim, whether it holds, its figures, and what a GPU is needed for."""
    yield from _of_the_sweep()
    yield from _of_regions()
    yield from _of_ways()
    yield from _of_audits()


def _of_the_sweep() -> Iterator[tuple[str, str, str, str]]:
    tables = {table["title"]: table for table in of("zoo_speed")["run"]["tables"]}
    means = tables["Geometric means"]
    claims = {
        "compiled": ("`torch.compile` makes most models faster, in float32", "the models are small, so that calls "
                     "weigh more than in use", "usual sizes (`matrix`)"),
        "compiled, bfloat16": ("so it does in bfloat16", "small models", "float16, TF32 and CUDA graphs (`matrix`)"),
        "autocast": ("autocast to bfloat16 makes most models faster", "the processor has no units for 16 bits",
                     "the claim itself (`matrix`)"),
    }  # fmt: skip
    for values in means["rows"]:
        row = dict(zip(means["columns"], values, strict=True))
        if (claim := claims.get(row["gain"])) is not None:
            yield (
                claim[0],
                f"{'yes' if row['from'] > 1 else 'no'}; {claim[1]}",
                f"{row['times as fast']:.2f} times as fast ({row['from']:.2f} to {row['to']:.2f} over models); surely "
                f"faster in {row['surely faster']} of {row['models']}, surely slower in {row['surely slower']}: "
                + link("zoo_speed"),
                claim[2],
            )


def _of_regions() -> Iterator[tuple[str, str, str, str]]:
    rows = [row for row in of("compile_cost_cpu")["rows"] if "regional" in row]
    for row in rows:
        regional, medium = row["regional"], row["size"] == "medium"
        kept = regional["part of the speedup that is kept"]
        interval = "" if regional["from"] is None else f" ({regional['from']} to {regional['to']})"
        yield (
            f"compiling the repeated block alone is cheaper and keeps the speed: {regional['subject']}, "
            + ("where kernels dominate" if medium else "where calls dominate"),
            f"cheaper: {regional['compiles so many times faster']:.2f} times, of {row['options']['cold']} cold starts; "
            + (f"of the speedup {kept} is kept{interval}" if interval else f"of the speedup there is {kept}"),
            f"full {regional['full, times eager']}, regional {regional['regional, times eager']} times eager, "
            f"{regional['cycles']} cycles: {link('compile_cost_cpu')}",
            "24 blocks of width 1024 (`compile_cost`)",
        )
    shapes = [shape for row in of("compile_cost_cpu")["rows"] for shape in row.get("shapes", ())]
    varying = {shape["dynamic"]: shape for shape in shapes if shape["subject"] == "varying lengths"}
    yield (
        "`dynamic=True` compiles once what four lengths compile four times",
        "yes; graphs and recompilations are the same on every device",
        ", ".join(
            f"`dynamic={dynamic}` {shape['graphs']} graphs, {shape['times eager']} times eager "
            f"({shape['from']} to {shape['to']})"
            for dynamic, shape in varying.items()
        )
        + f": {link('compile_cost_cpu')}",
        "its cost in large kernels (`compile_cost`)",
    )


def _of_ways() -> Iterator[tuple[str, str, str, str]]:
    data = of("compile_ways_cpu")
    for row in data["rows"][1:]:
        yield (
            f"`{row['way']}` costs more to compile",
            "yes" if row["from"] > 1 and data["rounds"] >= _SURE else f"not surely, of {data['rounds']} pairs",
            f"{row['times the default']} of the default's processor time ({row['from']} to {row['to']} over "
            f"cold starts); {row['times eager']} times eager "
            f"({row['gain from']} to {row['gain to']}): {link('compile_ways_cpu')}",
            "nothing",
        )
    cells = [
        {cell["mode"]: cell for cell in row["stats"]["cells"] if cell["precision"] == "float32"}
        for row in of("matrix_cpu")["rows"]
    ]
    costs = [one["max-autotune"]["compiling"] / one["default"]["compiling"] for one in cells]
    gains = [one["max-autotune"]["ratio"]["median"] / one["default"]["ratio"]["median"] for one in cells]
    yield (
        "`max-autotune` costs more to compile than the default, and is faster",
        "not surely" if min(costs) <= 1 <= max(costs) else "it costs more" if min(costs) > 1 else "it costs less",
        f"{median(costs):.2f} of the default's seconds ({min(costs):.2f} to {max(costs):.2f} over {len(cells)} "
        f"workloads), {median(gains):.2f} of its speed ({min(gains):.2f} to {max(gains):.2f}): {link('matrix_cpu')}",
        "Triton's kernels, and the CUDA graphs of `reduce-overhead`, whose code is the default's on a CPU (`matrix`)",
    )


def _of_audits() -> Iterator[tuple[str, str, str, str]]:
    subjects = of("audit_compile_cost")["subjects"]
    ratios = [one["times torch.compile, CPU"] for one in subjects]
    yield (
        "the compiled audit costs what `torch.compile` costs",
        "yes" if max(ratios) <= 1.1 else "no",
        f"{min(ratios)} to {max(ratios)} times its processor time in {len(subjects)} models: "
        + link("audit_compile_cost"),
        "its telemetry (`telemetry`, `telemetry_cuda_graphs`, `telemetry_max_autotune`)",
    )
    rows = of("zoo_judged")["rows"]
    failed = sum(bool(row["compiled"]["fail"]) for row in rows)
    yield (
        "compiled models compute what float64 does, within the bound",
        f"in all but {failed} of {len(rows)} models, judged one by one",
        link("zoo_judged"),
        "Triton's kernels (`emulated_against_device`)",
    )


def _baselines() -> Iterator[str]:
    data = of("pytorch_baselines")
    paired = [row for row in data["speedups"] if row["of the sweep"]]
    theirs, ours = data["paired"]
    yield "## PyTorch's own baselines\n"
    yield (
        f"PyTorch's nightly job expects a speedup of each of {len(data['speedups'])} models on a server "
        f"(c7i.metal-24xl), {data['expected']:.2f} times in the geometric mean. Of {len(paired)} the sweep has the "
        f"architecture, small and on one thread: {theirs:.2f} times there, {ours:.2f} here, where calls weigh more. "
        f"Neither says what the other would measure ({link('pytorch_baselines')})."
    )
    yield ""
    yield "| PyTorch's model | precision | times eager, expected | of the sweep | times eager | from | to |"
    yield "|---|---|---|---|---|---|---|"
    for row in paired:
        yield "| " + " | ".join(str(value) for value in row.values()) + " |"
    yield ""
    breaks = data["breaks"]
    same = sum(row["graph breaks"] == row["graph breaks, here"] for row in breaks)
    passed = sum(row["accuracy, here"] == "pass" for row in breaks)
    yield (
        f"Of {len(breaks)} models of transformers it expects the graph breaks too: the sweep finds as many in {same}, "
        f"and {passed} pass in float32."
    )


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
