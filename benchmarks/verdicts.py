"""Store every verdict of the corpus, of models of the zoo and of the demonstration, and compare them with earlier ones.

    python benchmarks/verdicts.py --shared ../shared/corpus --zoo ../shared/zoo --jobs 2 --json before.json
    python benchmarks/verdicts.py --shared ../shared/corpus --zoo ../shared/zoo --jobs 2 --json after.json \\
        --against before.json

The subjects are the cases of `tests/corpus` and of a shared corpus (each defect and its fixed form, each healthy
control), 61 models of the zoo, and `ampcheck.demo`. Stored are check, arm, verdict and location. Compared are
the gravest verdict of each check and arm, and where the failures and warnings are.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _evidence import write_evidence

from ampcheck import Run, UsageError, audit, demo
from ampcheck.core.subject import load_subject
from ampcheck.sweep.listing import read_list

OWN = Path(__file__).resolve().parents[1] / "tests" / "corpus"
SEVERITY = ("fail", "warn", "undecided", "incomplete", "skip", "pass")
LOUD = ("fail", "warn", "undecided", "incomplete")


def subjects(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Each subject by name, with the function that audits it."""
    folders = [OWN, OWN / "training", *([options.shared] if options.shared else [])]
    yield from corpus(folders)
    yield "demo", lambda: audit(demo.subject(), dtype=["float16", "bfloat16"])
    if options.zoo:
        yield from zoo(options.zoo, options.zoo_models)


def zoo(folder: str, count: int) -> Iterator[tuple[str, Callable[[], Run]]]:
    for entry in read_list(folder)[:count]:
        yield (
            f"zoo {entry.name}",
            lambda target=entry.target: audit(load_subject(target), dtype=["float16", "bfloat16"], compile=False),
        )


def corpus(folders: list[Path]) -> Iterator[tuple[str, Callable[[], Run]]]:
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            if path.stem.startswith(("test_", "_", "conftest")):
                continue
            module = load(path)
            for form in ("buggy", "fixed", "healthy"):
                if hasattr(module, form):
                    for mode in modes(module, path):
                        yield (
                            f"{path.stem} {form} {mode}".strip(),
                            partial(audit_case, module, form, mode, path),
                        )


def load(path: Path) -> Any:
    name = f"corpus_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dynamo resumes a broken graph by the module's name
    spec.loader.exec_module(module)
    return module


def modes(module: Any, path: Path) -> list[str]:
    if hasattr(module, "RUNS"):
        return list(module.RUNS)
    if hasattr(module, "RUN"):
        return [module.RUN]
    runs = [line.split()[1] for line in (module.__doc__ or "").splitlines() if line.startswith("run: ")]
    return runs if "\nkind: forward\n" in path.read_text(encoding="utf-8") else [""]


def audit_case(module: Any, form: str, mode: str, path: Path) -> Run:
    torch.manual_seed(0)
    factory = getattr(module, form)
    is_call = getattr(module, "KIND", "") == "call" or "\nkind: call\n" in path.read_text(encoding="utf-8")
    subject = factory if is_call else factory()
    how, _, dtype = mode.partition(":")
    if how == "autocast" or dtype or how in ("float16", "bfloat16"):
        return audit(subject, dtype=dtype or how, autocast=True, compile=False)
    return audit(subject, compile=not mode)


def row(name: str, run: Callable[[], Run]) -> dict[str, Any]:
    start = time.perf_counter()
    verdicts: dict[str, str] = {}
    places: dict[str, list[str]] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            findings = run().findings
        for finding in findings:
            key = f"{finding.check} [{finding.subject.partition('[')[2]}"
            verdicts[key] = min(verdicts.get(key, "pass"), str(finding.verdict), key=SEVERITY.index)
            if str(finding.verdict) in LOUD:
                places.setdefault(key, []).append(f"{finding.verdict} {finding.where}")
    except UsageError as error:
        verdicts["usage error"] = str(error)
    except Exception as error:  # noqa: BLE001  # a crash is a row: the other subjects are still audited
        verdicts["crash"] = f"{type(error).__name__}: {error}"[:500]
    seconds = round(time.perf_counter() - start, 1)
    return {
        "name": name,
        "verdicts": verdicts,
        "places": {key: sorted(found) for key, found in places.items()},
        "seconds": seconds,
    }


def part(number: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of every `parts`-th subject, audited in this process."""
    torch.set_num_threads(1)
    rows = []
    for position, (name, run) in enumerate(subjects(options)):
        if position % options.parts == number and options.only in name:
            rows.append(row(name, run))
            print(name, {k: v for k, v in rows[-1]["verdicts"].items() if v in LOUD}, flush=True)
    return rows


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Iterator[str]:
    """Verdicts that changed, where at least one of the two is neither a pass nor a skip, and locations that changed."""
    rows_after = {row["name"]: row for row in after}
    for old in before:
        name, new = old["name"], rows_after.get(old["name"])
        if new is None:
            yield f"{name}: no longer audited"
            continue
        for key in dict.fromkeys((*old["verdicts"], *new["verdicts"])):
            earlier, later = old["verdicts"].get(key, "nothing"), new["verdicts"].get(key, "nothing")
            if earlier != later and {earlier, later} - {"pass", "skip", "nothing"}:
                yield f"{name}: {key}: {earlier} -> {later}"
            elif old.get("places", {}).get(key) != new.get("places", {}).get(key):
                yield f"{name}: {key}: at {old['places'].get(key)} -> {new['places'].get(key)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, metavar="FOLDER", help="a shared corpus")
    parser.add_argument("--zoo", metavar="FOLDER", help="a folder with zoo.py")
    parser.add_argument("--zoo-models", type=int, default=61, metavar="N", help="the first N models of the zoo")
    parser.add_argument("--only", default="", metavar="TEXT", help="subjects whose name contains TEXT")
    parser.add_argument("--jobs", type=int, default=1, help="processes that audit at the same time")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the verdicts here, and a table next to it")
    parser.add_argument("--against", type=Path, metavar="PATH", help="verdicts to compare with")
    options = parser.parse_args()
    options.parts = 8 * options.jobs  # a new process for each part: memory of a hundred models adds up
    rows = []
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        for found in pool.imap_unordered(partial(part, options=options), range(options.parts)):
            rows += found
    rows.sort(key=lambda row: row["name"])
    if options.json:
        lines = [f"| {found['name']} | {key} | {v} |" for found in rows for key, v in found["verdicts"].items()]
        write_evidence(options.json, {"rows": rows}, ["| case | check | verdict |", "|---|---|---|", *lines])
    if options.against:
        for line in differences(json.loads(options.against.read_text())["rows"], rows):
            print("DIFFERENT", line)


if __name__ == "__main__":
    main()
