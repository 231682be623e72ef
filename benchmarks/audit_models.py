"""Audit many models and keep the outcome as evidence.

    python benchmarks/audit_models.py --zoo ../shared/zoo --json reports/evidence/zoo.json
    python benchmarks/audit_models.py tests/transformers_models.py:gpt2 --compile --json reports/evidence/gpt2.json

A zoo is a folder with a `zoo.py` that has `ZOO` (name to factory) and `META` (name to {"family"}). A Markdown table is
written beside the JSON. Nothing is judged here beyond what `ampcheck.audit` says; a crash of ampcheck is a row of
its own.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _evidence import write_evidence

from ampcheck import Subject, UsageError, Verdict, audit
from ampcheck.subject import load_subject


def models(options: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[], Subject]]]:
    for target in options.targets:
        yield target.rpartition(":")[2], "", lambda target=target: load_subject(target)
    if options.zoo:
        sys.path.insert(0, options.zoo)
        import zoo

        names = list(zoo.ZOO)
        families = [zoo.META[name]["family"] for name in names]
        turn = {name: families[:i].count(families[i]) for i, name in enumerate(names)}
        names = sorted(names, key=turn.__getitem__)  # one of each family, then a second: time may run out
        if options.per_family:
            names = [name for name in names if turn[name] < options.per_family]
        for name in names:
            yield name, zoo.META[name]["family"], lambda name=name: Subject(tuple(zoo.ZOO[name]()), name=name)


def row(
    name: str, family: str, build: Callable[[], Subject], *, compile: bool, dtypes: list[str], device: str
) -> dict[str, Any]:
    begun = time.perf_counter()
    found: dict[str, Any] = {"name": name, "family": family}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages of the zoo
            run = audit(build(), device=device, compile=compile, dtype=dtypes)
        found["verdicts"] = {str(verdict): count for verdict, count in run.counts().items()}
        found["coverage"] = dict(run.coverage.seen)
        for verdict in (Verdict.FAIL, Verdict.WARN):
            found[str(verdict)] = [
                {
                    "check": f.check,
                    "arm": f.subject.partition("[")[2].rstrip("]"),
                    "where": str(f.where),
                    "message": f.message,
                }
                for f in run.of(verdict)
            ]
    except UsageError as error:
        found["usage error"] = str(error)
    except Exception:  # noqa: BLE001  # a crash of ampcheck on a real model is what this script looks for
        found["crash"] = traceback.format_exc()[-2000:]
    found["seconds"] = round(time.perf_counter() - begun, 1)
    return found


def _arm(subject: str) -> str:
    return subject.partition("[")[2].rstrip("]")


def markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    total = Counter({"models": len(rows)})
    for found in rows:
        total["crashes"] += "crash" in found
        total["usage errors"] += "usage error" in found
        total["with a failure"] += bool(found.get("fail"))
        total["with a warning only"] += bool(found.get("warn")) and not found.get("fail")
    yield ", ".join(f"{count} {what}" for what, count in total.items()) + "."
    yield ""
    yield "| model | family | pass | warn | fail | skip | ops | gradients | s | first failure |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for found in rows:
        verdicts, seen = found.get("verdicts", {}), found.get("coverage", {})
        first = found.get("crash", "").strip().rpartition("\n")[2] or found.get("usage error", "")
        if found.get("fail"):
            fail = found["fail"][0]
            first = f"{fail['check']} ({fail['arm']}) at {fail['where']}"
        counts = [str(verdicts.get(key, 0)) for key in ("pass", "warn", "fail", "skip")]
        cells = [found["name"], found["family"], *counts, str(seen.get("ops", 0)), str(seen.get("gradients", 0))]
        yield "| " + " | ".join([*cells, str(found["seconds"]), first.replace("|", "/")[:200]]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="path/to/file.py:factory")
    parser.add_argument("--zoo", metavar="FOLDER", help="a folder with zoo.py")
    parser.add_argument("--per-family", type=int, metavar="N", help="at most N models of each family")
    parser.add_argument("--compile", action="store_true", help="also under torch.compile")
    parser.add_argument("--dtype", default="float16,bfloat16", help="separated by commas (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="emulated where it is not there (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further model after that")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    begun, left = time.monotonic(), 0
    for name, family, build in models(options):
        if time.monotonic() - begun > 60 * options.minutes:
            left += 1
            continue
        rows.append(
            row(name, family, build, compile=options.compile, dtypes=options.dtype.split(","), device=options.device)
        )
        print(rows[-1]["name"], rows[-1].get("verdicts", rows[-1]), f"{rows[-1]['seconds']} s", flush=True)
    lines = list(markdown(rows))
    if left:
        lines.insert(1, f"\n{left} further models were not begun within {options.minutes:g} minutes.")
    print(lines[0])
    if options.json:
        write_evidence(options.json, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
