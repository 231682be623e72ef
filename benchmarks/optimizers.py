"""What optimizers do in pure float16, pure bfloat16 and with master weights, and what an audit says of them beforehand.

    python benchmarks/optimizers.py --evidence reports/evidence/optimizers.json

Each optimizer takes 1,000 steps on the problem of `optimizer_runs.py`, in float64 and in each precision. Then the
training mapping of each pure run is audited (24 steps), and the verdict stands beside what became of the 1,000. Rows
that the evidence holds already, of this machine and these versions, are not measured again; `--judge` audits again.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _evidence import Row, Rows, is_current, read_rows, write_rows
from optimizer_runs import ARMS, PURE, STEPS, audited, measured, without_effect
from optimizer_subjects import SUBJECTS

from ampcheck.speed.paired import fingerprint

_LATER = re.compile(r"after about \d+,\d+ more steps")
"""In the words of `stagnation`, a stop that these steps do not reach."""

SHOWN = [arm for arm in ARMS if arm != "float64"]


def damage(row: Row, arm: str) -> str:
    """What 1,000 steps in a precision lost, in words; empty where they ended as those in float64 did."""
    runs = row["runs"]
    run, exact, control = runs[arm], runs["float64"], runs["master weights"]
    if run["nonfinite from"] is not None:
        return f"not finite from step {run['nonfinite from']} on"
    if run["distance"] is None or exact["loss"] is None:
        return ""
    parts = []
    if run["arrived"] < 0.25 and (control["arrived"] or 0.0) > 0.8:
        parts.append(f"{100 * max(0.0, run['arrived']):.0f} % of the way of {run['least']} arrived")
    if run["distance"] > max(0.5, 3.0 * (control["distance"] or 0.0)):
        parts.append(f"ended {run['distance']:.2f} of the way off")
    if run["loss"] > 1.25 * max(exact["loss"], control["loss"] or 0.0):
        parts.append(f"loss {run['loss']:.3g}, not {exact['loss']:.3g}")
    if "weight_decay" in row["without effect"][arm]:
        parts.append("weight decay without effect")
    return "; ".join(parts)


def verdict(audit: dict[str, Any]) -> str:
    """The checks that fail in an audit, or else those that warn."""
    if "exception" in audit:
        return "refused"
    for word in ("fail", "warn"):
        slugs = [slug for slug, words in audit["verdicts"].items() if word in words]
        if slugs:
            return f"{word}: {', '.join(slugs)}"
    return "pass"


def agreement(row: Row, arm: str) -> str:
    """Whether the audit said of 24 steps what the 1,000 showed; empty where there is nothing to compare."""
    run, audit = row["runs"][arm], row["audits"][arm]
    refused = bool(run["exception"])
    if refused or row["runs"]["float64"]["loss"] is None:
        return ""
    lost, said = damage(row, arm), verdict(audit)
    if bool(lost) == said.startswith("fail"):
        return "yes"
    if said.startswith("warn"):
        return "warned"
    messages = [message for _, word, message, _ in audit.get("findings", ()) if word == "fail"]
    if not lost and messages and all(_LATER.search(m) for m in messages):
        return "later"
    if not lost and messages and all(m.startswith("a constant that guards") or _LATER.search(m) for m in messages):
        return "guard"
    return "missed" if lost else "alarm"


def _number(value: float | None, form: str = ".2g") -> str:
    return "" if value is None else format(value, form)


def markdown(rows: Rows) -> Iterator[str]:
    found = sorted(
        rows.values(), key=lambda row: (row["size"] != "torch", row["size"], list(SUBJECTS).index(_key(row)))
    )
    yield "## 1,000 steps beside float64"
    yield ""
    yield (
        "Distance: of the weights at the end to those of the float64 run, by the way that these went (1 is what "
        "weights that never move have). Arrived: of the tensor that fell behind most, the projection of its way on "
        "that in float64. Unchanged: the share of elements with a gradient, over all steps, that stayed the same. "
        "The loss is that of the weights at the end, computed in float64. Without effect: options that "
        "change no bit of the weights in 50 steps, set or zero."
    )
    yield ""
    columns = (
        *("package", "optimizer", "run", "finite", "unchanged", "distance", "arrived", "loss", "in float64"),
        *("without effect", "states"),
    )
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in found:
        name = f"{row['size']} {row['options']['version']}", row["name"]
        if not row["options"]["version"]:
            yield f"| {row['size']} | {row['name']} | not installed |" + " |" * 8
            continue
        for arm in SHOWN:
            run = row["runs"][arm]
            if run["exception"]:
                cells = [run["exception"].replace("|", "/"), *[""] * 7]
            else:
                step = run["nonfinite from"]
                numbers = _number(run["unchanged"]), _number(run["distance"]), _number(run["arrived"], ".2f")
                losses = _number(run["loss"], ".3g"), _number(row["runs"]["float64"]["loss"], ".3g")
                cells = ["yes" if step is None else f"no, from step {step} on", *numbers, *losses]
                cells += [", ".join(row["without effect"].get(arm, ())), run["states"]]
            yield "| " + " | ".join([*name, arm, *cells]) + " |"
    yield ""
    yield from _judged(found)


def _judged(found: list[Row]) -> Iterator[str]:
    yield "## The audit of 24 steps beside what 1,000 steps lost"
    yield ""
    counts = Counter(agreement(row, arm) for row in found if row["audits"] for arm in PURE)
    said = (f"{counts[word]} {text}" for word, text in WORDS.items() if counts[word])
    yield f"{sum(counts[word] for word in WORDS)} runs: {', '.join(said)}."
    yield ""
    columns = ("package", "optimizer", "dtype", "1,000 steps", "audit", "agree")
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in found:
        for arm in PURE if row["audits"] else ():
            refused = row["runs"][arm]["exception"]
            lost = "refused" if refused else damage(row, arm) or "as in float64"
            cells = row["size"], row["name"], arm, lost, verdict(row["audits"][arm]), agreement(row, arm)
            yield "| " + " | ".join(cells) + " |"


WORDS = {
    "yes": "agree",
    "warned": "only warned",
    "missed": "missed",
    "later": "foresee a stop after more than 1,000 steps",
    "guard": "name an eps that is zero in the format, which these steps did not need",
    "alarm": "alarms without a loss",
}


def _key(row: Row) -> tuple[str, str]:
    return row["size"], row["name"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="optimizers whose package or name contains it")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth optimizer, from the Ith on")
    parser.add_argument("--judge", action="store_true", help="audit again, also where the runs are kept")
    parser.add_argument("--write", action="store_true", help="measure nothing; write the tables again")
    parser.add_argument(
        "--evidence", type=Path, default=Path("reports/evidence/optimizers.json"), metavar="PATH", help="%(default)s"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    known, rows = fingerprint(), read_rows(options.evidence)
    rows = {key: row for key, row in rows.items() if key in SUBJECTS}
    first, every = map(int, options.part.split("/"))
    for key, subject in list(SUBJECTS.items())[first - 1 :: every]:
        if options.write or not any(options.only in part for part in key):
            continue
        asked = {"steps": STEPS, "version": subject.version}
        row = rows.get(key)
        current = row is not None and is_current(row, asked, known)
        if row is None or not current:
            row = {"size": key[0], "name": key[1], "options": asked, "fingerprint": known, "runs": {}, "audits": {}}
            row["runs"] = measured(subject, STEPS) if subject.version else {}
        if subject.version and (options.judge or not current):
            row["without effect"] = {arm: without_effect(subject, arm) for arm in PURE}
            row["audits"] = {arm: audited(subject, arm) for arm in PURE}
        rows[key] = row
        print(*key, *(f"{arm}: {agreement(row, arm) or '-'}" for arm in PURE if row["audits"]), flush=True)
        write_rows(options.evidence, rows, {}, markdown(rows))
    write_rows(options.evidence, rows, {}, markdown(rows))


if __name__ == "__main__":
    main()
