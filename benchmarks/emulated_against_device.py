"""The same models audited under emulation on the CPU and for real on the device: are the same ops to blame?

    python benchmarks/emulated_against_device.py ../shared/zoo --json reports/evidence/zoo_h200.json

Needs the device. For each model the producers of overflow, flush to zero and silent zeros (check, phase, module) are
compared, and the share of values that overflow or flush by the coverage of both. Eager mode, float16 by default.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from _evidence import write_evidence
from _models import add_models, models

from ampcheck import Run, UsageError, Verdict, audit, emulate
from ampcheck.core.environment import environment
from ampcheck.core.subject import name_of_target

CHECKS = ("overflow", "nonfinite-gradient", "flush", "silent-zero")


def producers(run: Run) -> set[tuple[str, str, str]]:
    found = (finding for finding in run.findings if finding.verdict in (Verdict.FAIL, Verdict.WARN))
    return {(f.check, f.where.phase, f.where.module) for f in found if f.check in CHECKS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    if not getattr(torch, torch.device(options.device).type).is_available():
        sys.exit(f"this compares with a real {options.device}, which this machine does not have")
    rows: list[dict[str, Any]] = []
    left: list[str] = []
    for entry, subject in models(options, left):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages of the zoo
            try:
                real = producers(audit(subject, device=options.device, dtype=options.dtype, compile=False))
                with emulate(torch.device(options.device).type):
                    emulated = producers(audit(subject, device="cpu", dtype=options.dtype, compile=False))
            except UsageError as error:
                rows.append({"model": name_of_target(entry.target), "error": str(error)})
                continue
        rows.append(
            {
                "model": name_of_target(entry.target),
                "both": len(real & emulated),
                "device alone": sorted(map(list, real - emulated)),
                "emulation alone": sorted(map(list, emulated - real)),
            }
        )
        print(rows[-1], flush=True)
    compared = [row for row in rows if "both" in row]
    same = sum(not row["device alone"] and not row["emulation alone"] for row in compared)
    device = environment(options.device)["device"]
    lines = [
        f"On {device}: {same} of {len(compared)} models have the same producers on both sides.",
        *left,
        "",
        "| model | producers on both sides | on the device alone | under emulation alone |",
        "|---|---|---|---|",
        *(f"| {r['model']} | {r['both']} | {r['device alone']} | {r['emulation alone']} |" for r in compared),
    ]
    print("\n".join(lines))
    if options.json:
        write_evidence(options.json, {"device": device, "rows": rows}, lines, device=options.device)


if __name__ == "__main__":
    main()
