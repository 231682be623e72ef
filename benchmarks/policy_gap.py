"""Which ops of real models autocast treats otherwise on one device than on another.

    python benchmarks/policy_gap.py ../shared/zoo --minutes 8 --json reports/evidence/policy_gap.json

Every model of the list runs forward and backward under autocast, once as the CPU's policy says and
once as the device's does, emulated; the ops that it sends through autocast are counted by their rules. An op that is
listed was really called by the number of models given. A model that raises counts with what it called before.
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _evidence import write_evidence
from _models import add_models, models

from ampcheck.autocast.calls import measure_calls
from ampcheck.core.subject import name_of_target

WIDTH = {"lower_precision": 0, "promote": 1, "": 1, "fp32": 2, "fp32_set_opt_dtype": 2, "fp32_append_dtype": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--device", default="cuda", help="compared with the CPU (default: %(default)s)")
    parser.add_argument("--dtype", default="float16", help="what autocast casts to (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    callers: dict[str, set[str]] = defaultdict(set)
    rules: dict[str, tuple[str, str]] = {}
    composite: set[str] = set()
    seen: list[str] = []
    raised: dict[str, str] = {}
    left: list[str] = []
    for entry, subject in models(options, left):
        name = name_of_target(entry.target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages of the zoo
            runs = [measure_calls(subject, device=device, dtype=options.dtype) for device in ("cpu", options.device)]
        policies = [run.policy for run in runs]
        seen.append(name)
        for run in runs:
            composite |= run.composite
            if run.raised is not None:
                raised[name] = f"{run.device}: {run.raised.message[:200]}"
            for call in run.calls:
                rules[call.op] = (policies[0].rule(call.op), policies[1].rule(call.op))
                callers[call.op].add(name)
        print(name, flush=True)
    rows = list(_rows(rules, callers, composite))
    lines = [
        f"{len(seen)} models, {len(raised)} of which raised; {len(callers)} ops with a rule on some device were "
        f"called, {len(rows)} of them follow another rule on {options.device} than on the CPU.",
        *left,
        "",
        f"| op | cpu | {options.device} | models | {options.device} is |",
        "|---|---|---|---|---|",
        *(f"| {r['op']} | {r['cpu']} | {r['device']} | {r['models']} | {r['device is']} |" for r in rows),
    ]
    print("\n".join(lines))
    if options.json:
        write_evidence(options.json, {"models": seen, "raised": raised, "ops": rows}, lines)


def _rows(
    rules: dict[str, tuple[str, str]], callers: dict[str, set[str]], composite: set[str]
) -> Iterator[dict[str, Any]]:
    """Left out: what is made of other ops and has no rule of its own on one side, since those ops reach autocast."""
    for op, (cpu, device) in sorted(rules.items(), key=lambda item: (-len(callers[item[0]]), item[0])):
        if cpu != device and not (op in composite and "" in (cpu, device)):
            step = WIDTH.get(device, 0) - WIDTH.get(cpu, 0)
            way = "banned" if device == "banned" else "wider" if step > 0 else "narrower" if step < 0 else "otherwise"
            yield {
                "op": op,
                "cpu": cpu or "as given",
                "device": device or "as given",
                "models": len(callers[op]),
                "device is": way,
                "such as": sorted(callers[op])[:5],
            }


if __name__ == "__main__":
    main()
