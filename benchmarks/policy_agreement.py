"""Compare the probed autocast policy with what autocast really does, op by op, and keep the outcome as evidence.

    python benchmarks/policy_agreement.py --json reports/evidence/policy_agreement.json

Needs no GPU: the CPU's ops run for real, those of other devices on fake tensors. The calls and the comparisons are
those of tests/units/autocast/op_samples.py; `tests/units/autocast/test_agreement.py` asserts what is tabled here.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _evidence import write_evidence

from ampcheck.autocast.probe import DTYPES, measure_policy
from ampcheck.autocast.state import registered

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "units" / "autocast")]
import op_oracle  # noqa: E402  # the oracle stands with the tests
import op_samples  # noqa: E402

QUESTIONS = {
    "rule": (op_oracle.compare_rule, "autocast itself against casts by the rule and no autocast"),
    "emulation": (op_oracle.compare_emulation, "emulated on the CPU against casts by the rule and no autocast"),
    "device": (op_oracle.compare_devices, "emulated on the CPU against fake tensors of the device"),
}


def compared(question: str, device: str, low: torch.dtype, calls: op_samples.Calls) -> dict[str, Any]:
    rows = QUESTIONS[question][0](measure_policy(device, low), low, calls)
    ran = {row.op for row in rows if not row.one.raised}
    seen = {row.op for row in rows if row.looked_at}
    parted = [row for row in rows if row.difference]
    return {
        "question": question,
        "device": device,
        "dtype": str(low).removeprefix("torch."),
        "overloads": len(registered(device)),
        "without a call": sorted(set(registered(device)) - set(calls)),
        "ran": len(ran),
        "only dtypes below seen": sorted(seen - ran),
        "not seen": {row.op: row.one.raised[:120] for row in rows if row.op not in seen},
        "calls": len(rows),
        "agree": len(rows) - len(parted),
        "of these both raise": sum(not row.difference and bool(row.one.raised) for row in rows),
        "kernels part without autocast": [described(row, row.kernel) for row in parted if row.kernel],
        "disagree": [described(row, row.difference) for row in parted if not row.kernel],
    }


def described(row: op_oracle.Row, why: str) -> dict[str, str]:
    return {"op": row.op, "rule": row.rule, "given": row.given, "how": row.difference, "why": why[:120]}


def markdown(found: list[dict[str, Any]], sources: Counter[str]) -> Iterator[str]:
    told_of = ", ".join(f"{count} from {source}" for source, count in sources.items())
    yield f"{sum(sources.values())} calls of {len({op for row in found for op in row['ops']})} overloads: {told_of}."
    yield ""
    for question, (_, says) in QUESTIONS.items():
        yield f"- {question}: {says}."
    yield ""
    columns = ("question", "device", "dtype", "overloads", "ran", "calls", "agree", "of these both raise")
    lists = ("without a call", "only dtypes below seen", "not seen", "kernels part without autocast", "disagree")
    yield "| " + " | ".join((*columns, *lists)) + " |"
    yield "|" + "---|" * len((*columns, *lists))
    for row in found:
        yield "| " + " | ".join([*(str(row[c]) for c in columns), *(str(len(row[c])) for c in lists)]) + " |"
    yield ""
    for title in ("only dtypes below seen", "not seen"):
        yield f"{title[0].upper()}{title[1:]}: " + ("; ".join(sorted(_named(found, title))) or "none") + "."
        yield ""
    yield "What the kernels do otherwise on the two sides, autocast or not:"
    yield ""
    yield "| op | rule | given | why |"
    yield "|---|---|---|---|"
    for part in kernels(found):
        given = ", ".join(part["given"])
        yield f"| {part['op']} | {part['rule'] or 'none'} | {given} | {part['why'].replace('|', '/')} |"


def kernels(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where the kernels of the two sides part without autocast, of all devices and dtypes together."""
    held: dict[tuple[str, str, str], set[str]] = {}
    for row in found:
        for one in row["kernels part without autocast"]:
            held.setdefault((one["op"], one["rule"], one["why"]), set()).add(one["given"])
    return [{"op": o, "rule": r, "why": why, "given": sorted(given)} for (o, r, why), given in sorted(held.items())]


def _named(found: list[dict[str, Any]], title: str) -> set[str]:
    return {f"{op} ({row['device']}, {row['question']})" for row in found for op in row[title]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu,cuda,xpu,mps", help="separated by commas (default: %(default)s)")
    parser.add_argument(
        "--each", type=int, default=3, metavar="N", help="calls of each overload (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    calls = op_samples.harvest(each=options.each)
    sources = Counter(call.source for held in calls.values() for call in held)
    found = []
    for device in options.devices.split(","):
        for low in DTYPES:
            for question in QUESTIONS:
                if device == "cpu" and question == "device":
                    continue  # the CPU is its own device
                found.append({**compared(question, device, low, calls), "ops": sorted(calls)})
                last = found[-1]
                print(question, device, last["dtype"], last["agree"], "of", last["calls"], last["disagree"], flush=True)
    lines = list(markdown(found, sources))
    parted = kernels(found)
    for row in found:
        del row["ops"]
        row["kernels part without autocast"] = len(row["kernels part without autocast"])
    if options.json:
        write_evidence(options.json, {"sources": sources, "rows": found, "kernels": parted}, lines)


if __name__ == "__main__":
    main()
