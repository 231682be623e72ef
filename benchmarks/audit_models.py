"""Audit many models and keep the outcome as evidence.

    python benchmarks/audit_models.py --zoo ../shared/zoo --jobs 2 --resume --judged benchmarks/zoo_judged.json \\
        --json reports/evidence/zoo_eager.json
    python benchmarks/audit_models.py tests/transformers_models.py:gpt2 --compile --json reports/evidence/gpt2.json

A zoo is a folder with a `zoo.py` that has `ZOO` (name to factory) and `META` (name to {"family"}). A Markdown table is
written next to the JSON: every failure and warning with what a person found out about it (`--judged`, a JSON list of
{"model", "check", "judgement", "reason"}), then a row for each model. A crash of ampcheck is a row of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _evidence import write_evidence

from ampcheck import Subject, UsageError, Verdict, audit
from ampcheck.core.subject import load_subject


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


def audited(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one model, built and audited in this process."""
    torch.set_num_threads(options.threads)
    family, build = {name: (family, build) for name, family, build in models(options)}[name]
    return row(name, family, build, compile=options.compile, dtypes=options.dtype.split(","), device=options.device)


def findings(rows: list[dict[str, Any]], judged: list[dict[str, str]]) -> Iterator[str]:
    """Every failure and warning, those of one model and check together, with the judgement of a person."""
    known = {(entry["model"], entry["check"]): entry for entry in judged}
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for found in rows:
        for verdict in ("fail", "warn"):
            for finding in found.get(verdict, ()):
                groups.setdefault((found["name"], finding["check"], verdict), []).append(finding)
    judgements: Counter[str] = Counter()
    lines = []
    for (name, check, verdict), group in sorted(groups.items(), key=lambda item: (item[0][2], item[0])):
        entry = known.get((name, check), {"judgement": "not judged", "reason": ""})
        judgements[entry["judgement"]] += len(group)
        arms = ", ".join(dict.fromkeys(finding["arm"] for finding in group))
        cells = (name, verdict, check, str(len(group)), arms, group[0]["where"], entry["judgement"], entry["reason"])
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    yield "Findings by judgement: " + (", ".join(f"{n} {j}" for j, n in judgements.most_common()) or "none") + "."
    yield ""
    yield "| model | verdict | check | findings | arms | first at | judgement | reason |"
    yield "|---|---|---|---|---|---|---|---|"
    yield from lines
    yield ""


def markdown(rows: list[dict[str, Any]], judged: list[dict[str, str]]) -> Iterator[str]:
    total = Counter({"models": len(rows)})
    for found in rows:
        total["crashes"] += "crash" in found
        total["usage errors"] += "usage error" in found
        total["with a failure"] += bool(found.get("fail"))
        total["with a warning only"] += bool(found.get("warn")) and not found.get("fail")
        total["incomplete"] += bool(found.get("verdicts", {}).get("incomplete"))
    yield ", ".join(f"{count} {what}" for what, count in total.items()) + "."
    yield ""
    yield from findings(rows, judged)
    yield "| model | family | pass | warn | fail | incomplete | skip | ops | gradients | s | first failure |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for found in rows:
        verdicts, seen = found.get("verdicts", {}), found.get("coverage", {})
        first = found.get("crash", "").strip().rpartition("\n")[2] or found.get("usage error", "")
        if found.get("fail"):
            fail = found["fail"][0]
            first = f"{fail['check']} ({fail['arm']}) at {fail['where']}"
        counts = [str(verdicts.get(key, 0)) for key in ("pass", "warn", "fail", "incomplete", "skip")]
        cells = [found["name"], found["family"], *counts, str(seen.get("ops", 0)), str(seen.get("gradients", 0))]
        yield "| " + " | ".join([*cells, str(found["seconds"]), first.replace("|", "/")[:200]]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="path/to/file.py:factory")
    parser.add_argument("--zoo", metavar="FOLDER", help="a folder with zoo.py")
    parser.add_argument("--per-family", type=int, metavar="N", help="at most N models of each family")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these models alone")
    parser.add_argument("--compile", action="store_true", help="also under torch.compile")
    parser.add_argument("--dtype", default="float16,bfloat16", help="separated by commas (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="emulated where it is not there (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="models audited at the same time, each in its process")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further model after that")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the evidence has already")
    parser.add_argument("--judged", type=Path, metavar="PATH", help="what a person found out about the findings")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table next to it")
    options = parser.parse_args()
    kept = options.resume and options.json is not None and options.json.is_file()
    rows: list[dict[str, Any]] = json.loads(options.json.read_text())["rows"] if kept else []
    judged = json.loads(options.judged.read_text()) if options.judged else []
    done = {found["name"] for found in rows}
    order = [name for name, _, _ in models(options)]
    names = [name for name in order if name not in done and (options.only is None or name in options.only)]
    begun, left = time.monotonic(), 0

    def add(found: dict[str, Any]) -> None:
        rows.append(found)
        print(found["name"], found.get("verdicts", found), f"{found['seconds']} s", flush=True)
        if options.json:
            write_evidence(options.json, {"rows": rows}, markdown(rows, judged))

    if options.jobs == 1:
        for name in names:
            if time.monotonic() - begun > 60 * options.minutes:
                left += 1
            else:
                add(audited(name, options))
    else:
        context = multiprocessing.get_context("spawn")
        with context.Pool(options.jobs, maxtasksperchild=25) as pool:  # memory of a hundred models adds up
            for found in pool.imap_unordered(partial(audited, options=options), names):
                add(found)
    rows.sort(key=lambda found: order.index(found["name"]) if found["name"] in order else -1)
    lines = list(markdown(rows, judged))
    if left:
        lines.insert(1, f"\n{left} further models were not begun within {options.minutes:g} minutes.")
    print(lines[0])
    if options.json:
        write_evidence(options.json, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
