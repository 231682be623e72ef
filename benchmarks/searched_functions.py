"""Search functions of PyTorch itself for inputs at which they break in 16 bits, and keep what was found as evidence.

    python benchmarks/searched_functions.py --part 1/2 --resume    # and 2/2 beside it, each on a core of its own

`ampcheck.assert_property` draws inputs from the domain of each function (searched_functions_cases.py), in float16
and in bfloat16, native, on the CPU. Each row is written when it is known; processes that have a part each share
one file. `--resume` leaves out what the file holds of the same options and machine; `--write` searches nothing and
writes the table again. A crash of ampcheck is a row of its own.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _evidence import Row, Rows, is_current, machine_of, options_of, read_rows, write_rows
from searched_functions_cases import CASES, Case

from ampcheck import Run, Verdict, assert_property
from ampcheck.core.formats import format_of
from ampcheck.core.run import collect
from ampcheck.records.property import ACCURACY, DECISION, NONFINITE, RAISES, RANGE
from ampcheck.search import SearchOptions
from ampcheck.speed.paired import fingerprint

EVIDENCE = Path(__file__).resolve().parent.parent / "reports" / "evidence" / "searched_functions.json"
DTYPES = ("float16", "bfloat16")

CHECK_OF = {
    RAISES: "low-precision-error",
    NONFINITE: "property-finite",
    RANGE: "property-finite",
    ACCURACY: "property-accuracy",
    DECISION: "property-accuracy",
}
"""The check that reports each kind of problem."""

SHORT = 160
"""Characters of an example that the table shows; the JSON has all of them."""


def searched(name: str, case: Case, dtype: str, *, examples: int, seconds: float, seed: int) -> dict[str, Any]:
    """The outcome of one search: how much was looked at, and all that breaks with its smallest input."""
    begun = time.perf_counter()
    found: dict[str, Any] = {"domain": case.domain(dtype)}
    try:
        with warnings.catch_warnings(), collect() as runs:
            warnings.simplefilter("ignore")  # PyTorch's, of the functions
            try:
                assert_property(
                    case.function,
                    inputs=case.inputs(dtype),
                    name=name,
                    compile=False,
                    options=SearchOptions(examples=examples, seconds=seconds, seed=seed),
                )
            except AssertionError:
                if not runs:
                    raise
        found |= outcome(runs[-1])
    except Exception:  # noqa: BLE001  # a crash of ampcheck on a plain function is a finding about ampcheck
        found["crash"] = traceback.format_exc()[-2000:]
    found["seconds"] = round(time.perf_counter() - begun, 1)
    return found


def outcome(run: Run) -> dict[str, Any]:
    """What the run says of each property, as data."""
    failures = {check: [f for f in run.of(Verdict.FAIL) if f.check == check] for check in CHECK_OF.values()}
    breaks = []
    for table in run.tables:
        for kind, code, low, wide, limit, after, _ in table.rows:
            finding = failures[CHECK_OF[str(kind)]].pop(0)  # both are in the order in which they were found
            number = {"low precision": low, "float64": wide, "limit": limit}
            breaks.append(
                {
                    "kind": kind,
                    **{title: _plain(value) for title, value in number.items()},
                    "after": after,
                    "input": code,
                    "op": finding.where.op,
                    "message": finding.message,
                }
            )
    ratio = max((f.observed or 0.0 for f in run.findings if f.check == "property-accuracy" and not breaks), default=0.0)
    return {
        "verdicts": {f.check: str(f.verdict) for f in reversed(run.findings)},  # a failure of a check stands first
        "coverage": dict(run.coverage.seen),
        "unseen": dict(run.coverage.unseen),
        "ratio": ratio,
        "breaks": breaks,
        "unjudged": [f.message for f in run.findings if f.check == "coverage" and f.verdict is not Verdict.PASS],
    }


def verdict(found: Mapping[str, Any]) -> str:
    """`holds`, the kinds of what breaks, `not judged`, or `crash`, which is one of ampcheck."""
    if "crash" in found:
        return "crash"
    if found["breaks"]:
        return ", ".join(sorted({one["kind"] for one in found["breaks"]}))
    return "not judged" if found["unjudged"] else "holds"


def few_words(one: Mapping[str, Any], dtype: str) -> str:
    """What failed, from the numbers."""
    low, wide = one["low precision"], one["float64"]
    is_, should = _short(low), _short(wide)
    if one["kind"] in (NONFINITE, RANGE, DECISION):
        return f"is {is_}, should be {should}"
    if one["kind"] != ACCURACY:
        return str(one["message"])
    error = abs(low - wide)
    return f"is {is_}, should be {should}: {error / ulp(wide, dtype):.3g} ULP away"


def ulp(value: float, dtype: str) -> float:
    """The distance of two neighbours of the format at `value`."""
    fmt = format_of(dtype)
    if abs(value) < fmt.smallest_normal:
        return fmt.smallest_subnormal
    return math.ldexp(2 * fmt.unit_roundoff, math.frexp(value)[1] - 1)


def markdown(rows: Rows) -> Iterator[str]:
    held = [rows[dtype, name] for name in CASES for dtype in DTYPES if (dtype, name) in rows]
    for dtype in DTYPES:
        of_it = [row for row in held if row["size"] == dtype]
        count = Counter(what for row in of_it for what in set(verdict(row["found"]).split(", ")))
        text = ", ".join(f"{count[what]} {what}" for what in sorted(count))
        yield f"{dtype}: {len(of_it)} functions; {text}."
        yield ""
    yield "`nonfinite`: infinite or NaN where the true value fits into the format. `accuracy`: further off than"
    yield "rounding explains. `decision`: another integer or bool. `range`: the true value does not fit, which no code"
    yield "can mend."
    yield from _section(
        "What breaks",
        ("function", "format", "domain", "breaks", "smallest input", "op", "what failed"),
        [
            (row["name"], row["size"], row["found"]["domain"], one["kind"], one["input"], one["op"], text)
            for row in held
            for one in row["found"].get("breaks", ())
            for text in [few_words(one, row["size"])]
        ],
    )
    yield from _section(
        "What could not be judged",
        ("function", "format", "why"),
        [
            (row["name"], row["size"], "; ".join(row["found"].get("unjudged", ())) or _last_line(row["found"]["crash"]))
            for row in held
            if verdict(row["found"]) in ("not judged", "crash")
        ],
    )
    yield from _section(
        "What holds",
        ("function", "format", "domain", "examples", "elements", "largest error, of what rounding explains", "s"),
        [
            (
                row["name"],
                row["size"],
                row["found"]["domain"],
                *(row["found"]["coverage"].get(what, 0) for what in ("examples", "elements")),
                f"{row['found']['ratio']:.2f}",
                row["found"]["seconds"],
            )
            for row in held
            if verdict(row["found"]) == "holds"
        ],
    )
    for machine, options in sorted({(machine_of(row), options_of(row)) for row in held}):
        yield from ("", f"Searched on {machine}; {options}.")


def _section(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    if rows:
        yield from ("", f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns))
        yield from ("| " + " | ".join(map(_cell, row)) + " |" for row in rows)


def _cell(value: Any) -> str:
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= SHORT else text[:SHORT] + " ..."


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _plain(value: Any) -> Any:
    """A number as JSON holds it: infinities and NaN by name."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _short(value: Any) -> str:
    return str(value) if isinstance(value, str) else f"{value:.5g}"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other process that asks for the same is inside."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def keep(path: Path, row: Row | None = None) -> Rows:
    """Add a row to what is kept, by this process and others; all of it."""
    with alone(path.parent):
        rows = read_rows(path)
        if row is not None:
            rows[row["size"], row["name"]] = row
        write_rows(path, rows, {}, markdown(rows))
    return rows


def part(text: str) -> Callable[[int], bool]:
    """Which of the functions "2/3" means, by number."""
    try:
        number, of = map(int, text.split("/"))
    except ValueError:
        number, of = 0, 0
    if not 1 <= number <= of:
        raise argparse.ArgumentTypeError(f"a part is I/N with 1 <= I <= N, such as 1/2; found {text}")
    return lambda index: index % of == number - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="functions; by default all")
    parser.add_argument("--part", type=part, default="1/1", metavar="I/N", help="every Nth function, from the Ith on")
    parser.add_argument("--examples", type=int, default=100, help="that each search looks at (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="that each search may take (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="leave out what the evidence holds already")
    parser.add_argument("--write", action="store_true", help="search nothing; write the table again")
    parser.add_argument("--json", type=Path, default=EVIDENCE, metavar="PATH", help="(default: in reports/evidence)")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in CASES]:
        parser.error(f"there is no function {unknown[0]!r}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    asked = {name: getattr(options, name) for name in ("examples", "seconds", "seed")}
    known = fingerprint()
    held = read_rows(options.json)
    chosen = [name for index, name in enumerate(options.names or CASES) if options.part(index)]
    for name in chosen if not options.write else []:
        for dtype in DTYPES:
            mine = held.get((dtype, name))
            if options.resume and mine is not None and is_current(mine, asked, known):
                continue
            found = searched(name, CASES[name], dtype, **asked)
            print(f"{name} [{dtype}]: {verdict(found)}, {found['seconds']} s", flush=True)
            row = {"size": dtype, "name": name, "options": asked, "fingerprint": known, "found": found}
            keep(options.json, row)
    print("\n".join(markdown(keep(options.json))))


if __name__ == "__main__":
    main()
