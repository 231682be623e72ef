"""Pairs of executions from real code: honest ones must agree, and what is planted is named at its op.

    python benchmarks/parity_pairs.py --json reports/evidence/parity.json [--only TEXT] [--resume]

Needs transformers, diffusers, timm and x-transformers; models are small and have random weights. A comparison is one
pair in one dtype. `named` tells whether the ops at which both sides part, or the op that is wrong, are those of what
was planted (a regular expression of the pair).
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import _parity_models  # noqa: F401  # registers its pairs
import _parity_parts  # noqa: F401
import _parity_threads  # noqa: F401
import torch
from _evidence import markdown_table, write_evidence
from _parity_pair import DTYPES, PAIRS, Pair

from ampcheck.parity.assert_parity import sides_of
from ampcheck.parity.compare import compare
from ampcheck.records.parity import AGREE, Parity

PACKAGES = ("transformers", "diffusers", "timm", "x-transformers")


def run_pair(pair: Pair, dtype: str) -> dict[str, Any]:
    """The row of one comparison."""
    row: dict[str, Any] = {"name": pair.name, "group": pair.group, "dtype": dtype, "planted": pair.planted}
    row |= {"link": pair.link, "expected": pair.outcome}
    a, b, args, *options = pair.make(DTYPES[dtype])
    begun = time.perf_counter()
    try:
        parity = compare(*sides_of(a, b, args, **(options[0] if options else {})))
    except Exception as error:  # noqa: BLE001  # a comparison that raises is a row that is wrong
        return row | {"outcome": "raised", "message": f"{type(error).__name__}: {error}"[:400], "right": False}
    row |= {"seconds": round(time.perf_counter() - begun, 2), "outcome": parity.outcome, "op": op_of(parity)}
    row |= {"roundings": float(f"{parity.roundings:.2g}"), "results": parity.compared, "message": parity.message[:600]}
    row |= {"notes": [note[:200] for note in parity.notes]}
    return row | judged(pair, row)


def judged(pair: Pair, row: dict[str, Any]) -> dict[str, Any]:
    """Whether the outcome is right, and the ops are those of what was planted."""
    right = row["outcome"] == pair.outcome
    names = None if not pair.planted else right and bool(re.search(pair.names, row.get("op") or row["message"]))
    return {"right": right, "named": names}


def op_of(parity: Parity) -> str:
    """The ops that the comparison names, without places of this machine."""
    ops = [str(where) for where in parity.at if where is not None]
    return "; ".join(re.sub(r"\S*/", "", op) for op in dict.fromkeys(ops))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of what was right."""
    pairs = [row for row in rows if not row["link"]]
    threads = [row for row in rows if row["link"]]
    alike, changed = ([r for r in pairs if bool(r["planted"]) is bad] for bad in (False, True))
    seconds = sorted(row["seconds"] for row in rows if "seconds" in row)
    return {
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "pairs": len({row["name"] for row in pairs}),
        "honest comparisons": len(alike),
        "false alarms": sum(row["outcome"] not in (AGREE, "undecided") for row in alike),
        "honest and undecided": sum(row["outcome"] == "undecided" for row in alike),
        "planted comparisons": len(changed),
        "missed": sum(not row["right"] for row in changed),
        "named at the op": sum(bool(row["named"]) for row in changed),
        "threads": len({row["name"] for row in threads}),
        "threads judged as expected": sum(row["right"] for row in threads),
        "seconds, median and largest": [seconds[len(seconds) // 2], seconds[-1]] if seconds else [],
    }


def table(rows: list[dict[str, Any]], counts: dict[str, Any]) -> list[str]:
    """The page of the evidence."""
    shown = {name: value for name, value in counts.items() if name != "packages"}
    packages = ", ".join(f"{name} {version}" for name, version in counts["packages"].items())
    lines = [packages, "", *markdown_table([shown]), ""]
    titles = (
        ("Planted", lambda r: r["planted"] and not r["link"], ("name", "dtype", "planted", "outcome", "op", "seconds")),
        ("Threads", lambda r: r["link"], ("link", "name", "dtype", "outcome", "says", "seconds")),
        ("Honest", lambda r: not r["planted"] and not r["link"], ("name", "dtype", "outcome", "roundings", "seconds")),
    )
    for title, chosen, columns in titles:
        of_title = [dict.fromkeys(columns) | cells(row) for row in rows if chosen(row)]
        lines += [f"## {title}", "", *(markdown_table(of_title, columns) if of_title else ["none"]), ""]
    return lines


def cells(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a table shows it: what is not right is marked."""
    wrong = not row["right"] or row.get("named") is False
    outcome = row["outcome"] + (f" (**expected {row['expected']}**)" if not row["right"] else "")
    says = row.get("op") or row.get("message", "")
    text = {"outcome": outcome, "op": says + (" **not the op**" if wrong and row["right"] else "")}
    text["says"] = row.get("message", "")
    return row | {name: value.replace("|", "/").replace("\n", " ") for name, value in text.items()}


def main() -> None:
    """Compare the pairs, print each, and write every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the evidence has already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kept = json.loads(options.json.read_text())["rows"] if options.resume and options.json.is_file() else []
    rows = {(row["name"], row["dtype"]): row | judged(PAIRS[row["name"]], row) for row in kept if row["name"] in PAIRS}
    for pair in PAIRS.values():
        for dtype in pair.dtypes if options.only in f"{pair.group} {pair.name}" else ():
            if (pair.name, dtype) in rows:
                continue
            row = rows[pair.name, dtype] = run_pair(pair, dtype)
            good = row["right"] and row.get("named") is not False
            print("ok " if good else "BAD", json.dumps(row if not good else {k: row.get(k) for k in SHORT}), flush=True)
            gc.collect()
        if not len(rows) % 5:
            write(options.json, rows)  # what was compared is kept
    print(json.dumps(write(options.json, rows), indent=1))


def write(path: Path, rows: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Write the evidence of these rows, in the order of the pairs."""
    ordered = [rows[p.name, d] for p in PAIRS.values() for d in p.dtypes if (p.name, d) in rows]
    counts = summary(ordered)
    write_evidence(path, counts | {"rows": ordered}, table(ordered, counts), a_line_each="rows")
    return counts


SHORT = ("name", "dtype", "outcome", "roundings", "op", "seconds")


if __name__ == "__main__":
    main()
