"""The changes of autocast's policy that ampcheck knows, found by running models on real wheels of PyTorch.

    python benchmarks/bisect_policies.py [--torch 2.8..2.14] --json reports/evidence/bisect_policies.json

Each case is `ampcheck bisect policy_subjects.py:OP --torch RANGE --device DEVICE --check dtype`, the device emulated.
`expected` is the first release in which the packaged policy of the op differs, `found` the one that the search named.
On MPS conv3d has no `found`: before it had a rule it was made of a convolution that had the same one.
Environments are kept and shared; a wheel of a CUDA build needs CUDA's libraries, or their stand-ins (_cuda_stubs.py).
With --json each case is kept, and an interrupted benchmark goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from _evidence import markdown_table, write_evidence

from ampcheck.autocast.drift import spans
from ampcheck.core.errors import UsageError
from ampcheck.core.settings import Target
from ampcheck.tools.bisect.history import History
from ampcheck.tools.bisect.judge import judge_history
from ampcheck.tools.bisect.releases import Releases
from ampcheck.tools.sweep.results import Allowance, ResultFolder

CASES = (
    ("rms_norm", "cuda"),
    ("conv3d", "mps"),
    ("conv_transpose3d.input", "mps"),
    ("linalg_matrix_sqrth", "cpu"),
    ("rms_norm", "xpu"),
    ("linalg_matrix_sqrth", "cuda"),
    ("rms_norm", "mtia"),
)


def once(op: str, device: str, span: str, results: Path) -> dict[str, Any]:
    """One search."""
    begun = time.perf_counter()
    target = Target(f"policy_subjects.py:{op.partition('.')[0]}", device=device, dtype=("float16",), compile=False)
    history = History(Releases.of(target, "torch", span, "--torch"), ResultFolder(results), Allowance(900.0))
    print(history.versions.estimate(history.looks), flush=True)
    try:
        message = judge_history(history, "dtype").findings[0].message
    except UsageError as error:
        message = str(error)
    named = re.search(r"first changed .* in torch (\d+\.\d+)", message)
    release_pair = [(stretch[0], stretch[2]) for stretch in spans(f"aten::{op}", device)]
    return {
        "op": op,
        "device": device,
        "expected": ", ".join(first for first, _ in release_pair[1:]),
        "found": named[1] if named else "none",
        "explained": f"aten::{op} was" in message,
        "judged": ", ".join(history.versions.known[number].name for number in sorted(history.results)),
        "wall s": round(time.perf_counter() - begun, 1),
        "message": message,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="2.8..2.14", help="the range (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    evidence = options.json.resolve() if options.json else None
    rows: list[dict[str, Any]] = []
    if evidence is not None and evidence.exists():
        rows = json.loads(evidence.read_text(encoding="utf-8"))["rows"]
    os.chdir(Path(__file__).parent)
    with tempfile.TemporaryDirectory(prefix="ampcheck-policies-") as results:
        known = {(row["op"], row["device"]) for row in rows}
        for op, device in (case for case in CASES if case not in known):
            rows.append(once(op, device, options.torch, Path(results)))
            print(rows[-1], flush=True)
            if evidence is not None:
                columns = ("op", "device", "expected", "found", "explained", "judged", "wall s")
                write_evidence(evidence, {"range": options.torch, "rows": rows}, markdown_table(rows, columns))


if __name__ == "__main__":
    main()
