"""Store every verdict of the corpus, and compare it with an earlier one.

    python benchmarks/verdicts.py --shared ../shared/corpus --json before.json
    python benchmarks/verdicts.py --shared ../shared/corpus --json after.json --against before.json

Audited are the cases of `tests/corpus` and of a shared corpus, each defect and its mended form, each healthy control.
Compared is the gravest verdict of each check and arm: a defect's must not become milder, a healthy model's not graver.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _evidence import write_evidence

from ampcheck import Run, UsageError, audit
from ampcheck.record import SEVERITY

OWN = Path(__file__).resolve().parents[1] / "tests" / "corpus"
LOUD = ("fail", "warn", "undecided", "incomplete")


def cases(folders: list[Path]) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Each case of the folders by name and form, with what audits it."""
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
                            lambda m=module, f=form, o=mode, p=path: judged(m, f, o, p),
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


def judged(module: Any, form: str, mode: str, path: Path) -> Run:
    torch.manual_seed(0)
    made = getattr(module, form)
    is_call = getattr(module, "KIND", "") == "call" or "\nkind: call\n" in path.read_text(encoding="utf-8")
    subject = made if is_call else made()
    how, _, dtype = mode.partition(":")
    if how == "autocast" or dtype or how in ("float16", "bfloat16"):
        return audit(subject, dtype=dtype or how, autocast=True, compile=False)
    return audit(subject, compile=not mode)


def row(name: str, run: Callable[[], Run]) -> dict[str, Any]:
    begun = time.perf_counter()
    verdicts: dict[str, str] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            findings = run().findings
        order = [str(verdict) for verdict in SEVERITY]
        for finding in findings:
            key = f"{finding.check} [{finding.subject.partition('[')[2]}"
            verdicts[key] = min(verdicts.get(key, "pass"), str(finding.verdict), key=order.index)
    except UsageError as error:
        verdicts["usage error"] = str(error)
    return {"name": name, "verdicts": verdicts, "seconds": round(time.perf_counter() - begun, 1)}


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Iterator[str]:
    """What became milder of a defect, graver of a healthy model, or went missing."""
    order = [str(verdict) for verdict in SEVERITY]
    now = {found["name"]: found["verdicts"] for found in after}
    for found in before:
        name, old = found["name"], found["verdicts"]
        new = now.get(name)
        if new is None:
            yield f"{name}: not audited any more"
            continue
        for key in dict.fromkeys((*old, *new)):
            one, other = old.get(key, ""), new.get(key, "")
            if one == other or not {one, other} & {*LOUD, *(v for v in (one, other) if v not in order)}:
                continue
            yield f"{name}: {key}: {one or 'nothing'} -> {other or 'nothing'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, metavar="FOLDER", help="a shared corpus")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the verdicts here, and a table next to it")
    parser.add_argument("--against", type=Path, metavar="PATH", help="verdicts to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, run in cases([OWN, OWN / "training", *([options.shared] if options.shared else [])]):
        if options.only in name:
            rows.append(row(name, run))
            print(name, {k: v for k, v in rows[-1]["verdicts"].items() if v in LOUD}, flush=True)
    if options.json:
        lines = [f"| {found['name']} | {key} | {v} |" for found in rows for key, v in found["verdicts"].items()]
        write_evidence(options.json, {"rows": rows}, ["| case | check | verdict |", "|---|---|---|", *lines])
    if options.against:
        for line in differences(json.loads(options.against.read_text())["rows"], rows):
            print("DIFFERENT", line)


if __name__ == "__main__":
    main()
