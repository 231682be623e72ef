"""Every verdict of every case that this project has, and what became of them since the last ledger.

    python benchmarks/ledger.py --jobs 2 --json reports/evidence/ledger.json
    python benchmarks/ledger.py --quick --jobs 2 --against reports/evidence/ledger.json
    python benchmarks/ledger.py --sources corpus,training --only overflow --json FILE --against FILE

Each case runs in a process of its own. Kept are, of each case, variant and arm, the findings that are no pass and no
skip, as (check, verdict, file:line), and the numbers of the others. `--against` prints each difference to an earlier
ledger, and ends with 1 if `benchmarks/ledger_signed.md` does not accept it. `--quick` runs a sample of the ledger that
it compares with, in which every check speaks. What is not at hand, such as ../shared or a package, is left out, and
its rows of the earlier ledger with it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import random
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _ledger_rows import Arm, Key, Row, cover, differences, read, read_signatures, signed, table

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "reports" / "evidence" / "ledger.json"
SIGNED = ROOT / "benchmarks" / "ledger_signed.md"
QUICK_SECONDS = 160.0
"""Of a processor, for a sample: two of them and the start take two minutes."""

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the order of sets
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",  # instruction sets that the processor names need no trial
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def place(where: Any) -> str:
    """File and line, the same in every checkout: relative to the repository, to ../shared beside it, to the installed
    packages, or the name alone. The lines of ampcheck and of this script's own files say nothing about a case."""
    file, line = where.file, where.line
    if not file:
        return where.module
    _, installed, inside = file.rpartition("site-packages/")
    path = Path(file)
    for base, prefix in ((ROOT, ""), (ROOT.parent / "shared", "../shared/")):
        if path.is_absolute() and path.is_relative_to(base):
            file = f"{prefix}{path.relative_to(base)}"
            break
    else:
        file = inside if installed else path.name if path.is_absolute() else file
    own = file.startswith(("ampcheck/", "benchmarks/", "docs/site/"))
    return file if own or line is None else f"{file}:{line}"


def arms_of(findings: Iterable[Any]) -> dict[str, Arm]:
    """The findings by arm, as it is shown."""
    arms: dict[str, Arm] = {}
    for finding in findings:
        part = arms.setdefault(str(finding.arm), Arm())
        if str(finding.verdict) == "pass":
            part.passes += 1
        elif str(finding.verdict) == "skip":
            part.skips += 1
        else:
            part.findings.append((finding.check, str(finding.verdict), place(finding.where)))
    for part in arms.values():
        part.findings = sorted(set(part.findings))
    return arms


def sentence(error: BaseException) -> str:
    """Type and first line of an exception, without what changes from run to run."""
    text = next(iter(str(error).splitlines()), "")
    text = re.sub(r"(/[\w.+-]+)+/", "", re.sub(r"0x[0-9a-f]+", "0x", text))
    return re.sub(r"\d+", "#", f"{type(error).__name__}: {text}")[:120]


@contextmanager
def switched(without: Collection[str], record: bool) -> Iterator[set[str] | None]:
    """Inside, mechanisms are off in this process and in those that are forked from it.

    record: also note which mechanisms change an outcome, in the set that is yielded.
    """
    if not without and not record:
        yield None
        return
    import mechanisms

    if unknown := set(without) - set(mechanisms.NAMES):
        raise SystemExit(f"--without takes names of tests/mechanisms.py; found {', '.join(sorted(unknown))}")
    with ExitStack() as stack:
        if without:
            stack.enter_context(mechanisms.without(*without))
        yield stack.enter_context(mechanisms.recording()) if record else None


def run(case: Any, acted: set[str] | None = None) -> Row:
    """The row of a case, run in this process. acted: takes the names of mechanisms that change an outcome."""
    import numpy as np
    import torch
    from _ledger_cases import outcome

    from ampcheck import Run, UsageError

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    sys.argv = ["ledger"]
    row = Row(case.source, *case.key)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = case.run()
        findings = result.findings if isinstance(result, Run) else result
        row.arms, row.outcome = arms_of(findings), outcome(case.expected, findings)
    except UsageError as error:
        row = failed(row, "refused", sentence(error))
    except BaseException as error:  # noqa: BLE001  # a crash is a row
        row = failed(row, "crash", sentence(error))
    row.mechanisms = None if acted is None else sorted(acted)
    times = os.times()
    row.seconds = float(f"{sum(times[:4]):.1g}")
    return row


def failed(row: Row, why: str, text: str) -> Row:
    """The row of a run without a verdict."""
    row.outcome, row.arms = why, {"": Arm([(why, text, "")])}
    return row


def rows_of(cases: Iterable[Any], jobs: int, acted: set[str] | None = None) -> Iterator[Row]:
    """The rows of cases, each run in a process of its own, as they come."""
    from _ledger_isolated import EndedError, OutOfTimeError, isolated

    def work(case: Any) -> Row:
        return run(case, acted)

    for case, result in isolated(cases, work, jobs=jobs, seconds=lambda case: int(case.seconds)):
        if isinstance(result, OutOfTimeError):
            yield failed(Row(case.source, *case.key, seconds=float(case.seconds)), "timeout", f"{case.seconds} s")
        elif isinstance(result, EndedError):
            yield failed(Row(case.source, *case.key), "crash", str(result))
        else:
            yield result


def unheard(rows: Iterable[Row]) -> set[str]:
    """The checks that speak in no row."""
    from ampcheck.checks import REGISTRY

    return set(REGISTRY) - {check for row in rows for check in row.checks}


def write(path: Path, rows: dict[Key, Row]) -> None:
    """The ledger at `path`, a row a line, and its table beside it."""
    from _evidence import write_evidence

    kept = list(rows.values())
    write_evidence(path, {"rows": [row.to_json() for row in kept]}, table(kept, unheard(kept)), a_line_each="rows")


def chosen(options: argparse.Namespace) -> tuple[list[Any], set[Key]]:
    """The cases to run, and the keys of cases that are known but left out, as a package is not installed."""
    from _ledger_cases import OUTSIDE, SOURCES, every_case

    names = [name.strip() for name in options.sources.split(",") if name.strip()]
    if unknown := set(names) - set(SOURCES):
        raise SystemExit(f"--sources takes {', '.join(SOURCES)}; found {', '.join(unknown)}")
    cases = [case for case in every_case(names) if options.only in " | ".join(case.key)]
    if repeated := [key for key, count in Counter(case.key for case in cases).items() if count > 1]:
        raise SystemExit(f"cases need names of their own: {repeated}")
    at_hand = [case for case in cases if case.available]
    left_out = {case.key for case in cases if not case.available}
    if options.quick:
        known = options.before or {}
        sample = {case.key for case in at_hand if case.source not in (*OUTSIDE, "found")}
        keys = set(cover((row for key, row in known.items() if key in sample), QUICK_SECONDS))
        at_hand = [case for case in at_hand if case.key in keys]
        at_hand.sort(key=lambda case: -known[case.key].seconds)  # no long one is left for the end
    return at_hand, left_out


def progress(row: Row, number: int, total: int, started: float) -> None:
    loud = sorted({f"{f[0]} {f[1]} {f[2]}".strip() for arm in row.arms.values() for f in arm.findings})
    text = f"{row.outcome:9} {row.case} | {row.variant}: {'; '.join(loud) or 'passes'}"
    print(f"[{number}/{total} {time.monotonic() - started:.0f} s] {text}"[:240], file=sys.stderr, flush=True)


def compare(options: argparse.Namespace, rows: dict[Key, Row], left_out: set[Key]) -> int:
    """Print the differences to an earlier ledger; 1 if one of them is not accepted."""
    before, whole = options.before, not (options.quick or options.only)
    names = {row.source for row in rows.values()}
    expected = {k for k, row in before.items() if row.source in names and k not in left_out} if whole else set()
    reasons, stale = signed(differences(before, rows, expected), read_signatures(SIGNED))
    for difference, reason in reasons:
        print(f"{difference}" + (f"  [{reason}]" if reason else ""))
    new = [row for key, row in rows.items() if key not in before]
    for row in new:
        print(f"new: {row.case} | {row.variant}: {row.outcome or 'nothing expected'}")
    if whole and not options.sources:
        for signature in stale:
            print(f"stale in {SIGNED.name}, nothing matches it: {signature}")
    ignored = len(before) - len(set(before) & set(rows)) - len(expected - set(rows))
    unsigned = sum(not reason for _, reason in reasons)
    print(
        f"{len(rows)} runs, {len(reasons)} differences, {unsigned} of them not accepted; {len(new)} new; "
        f"{ignored} rows of {options.against} were not run"
    )
    return int(unsigned > 0)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sample with every check in it, for 3 minutes at most")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the ledger here, and a table beside it")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --json has already")
    parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier ledger; --quick needs one")
    parser.add_argument(
        "--without", default="", metavar="NAME[,NAME]", help="switch mechanisms off (tests/mechanisms.py)"
    )
    parser.add_argument("--record", action="store_true", help="keep which mechanisms changed an outcome")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name or variant contains it")
    parser.add_argument("--sources", default="", metavar="NAME[,NAME]")
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    options = parser.parse_args(arguments)
    options.without = [name for name in options.without.split(",") if name]
    if options.quick and options.against is None:
        options.against = EVIDENCE
    sys.path.append(str(ROOT / "tests"))
    if (options.without or options.record) and importlib.util.find_spec("mechanisms") is None:
        parser.error("--without and --record need tests/mechanisms.py, which names the mechanisms")
    options.before = read(options.against) if options.against else None
    return options


def imported(cases: Iterable[Any]) -> None:
    """Import here what many processes need: they are forked from this one."""
    import torch

    names = {"torch._dynamo", "torch._inductor.compile_fx"}
    names |= {"transformers.modeling_utils"} if any("transformers" in case.needs for case in cases) else set()
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            __import__(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is imported is not copied to each process by its collections of garbage


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    os.chdir(ROOT)
    cases, left_out = chosen(options)
    kept = read(options.json) if options.resume and options.json and options.json.is_file() else {}
    rows = dict(kept)  # also those of other sources
    todo = [case for case in cases if case.key not in kept]
    print(f"{len(todo)} cases, {len(kept)} kept, {len(left_out)} not at hand", file=sys.stderr)
    if options.list:
        print("\n".join(" | ".join((case.source, *case.key)) for case in todo))
        return 0
    imported(todo)
    started = saved = time.monotonic()
    order = {case.key: number for number, case in enumerate(cases)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes of cases and keeps the rows
    try:
        with switched(options.without, options.record) as acted:
            for number, row in enumerate(rows_of(todo, options.jobs, acted), 1):
                rows[row.key] = row
                progress(row, number, len(todo), started)
                if options.json and time.monotonic() - saved > 20:
                    write(options.json, rows)
                    saved = time.monotonic()
    finally:
        gc.unfreeze()
        rows = dict(sorted(rows.items(), key=lambda item: order.get(item[0], len(order))))
        if options.json:
            write(options.json, rows)
    counts = Counter(row.outcome or "nothing expected" for row in rows.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return compare(options, rows, left_out) if options.before is not None else 0


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    sys.exit(main())
