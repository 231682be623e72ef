"""The test suites of public libraries, as they are, under `pytest --ampcheck-watch`; each finding judged by hand.

    python benchmarks/suites.py                 # every part; writes reports/evidence/suites.json
    python benchmarks/suites.py --only einops
    python benchmarks/suites.py --fetch         # downloads alone, for the parts that are rows of the ledger

A suite comes from the source distribution of its library, which pip downloads into the folder (../suites by default)
where it is not there, and runs from it; nothing is installed. A library that cannot be had, or that needs a package
which is absent, is left out and keeps the rows of an earlier call. `suites_judged.json` has the judgements: real,
arguable or false, and why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "reports" / "evidence" / "suites.json"
JUDGED = Path(__file__).with_name("suites_judged.json")
NIGHTLY = ("pytorch-optimizer", "ema-pytorch")
"""Parts of less than a minute, which are rows of the ledger."""


@dataclass(frozen=True)
class Part:
    """A part of the tests of a library. arguments: of pytest. needs: packages that must be installed. source: the
    folder in the distribution with the library."""

    version: str
    arguments: tuple[str, ...]
    dtype: str = "bfloat16"
    needs: tuple[str, ...] = ()
    source: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    seconds: int = 3600


PARTS = {
    "pytorch-optimizer": Part("4.1.0", ("tests/test_loss_functions.py", "tests/test_gradients.py")),
    "ema-pytorch": Part("0.8.3", ("tests",)),
    "linear-operator": Part("0.6.1", ("test/functions",), needs=("scipy", "jaxtyping", "mpmath")),
    "torchsde": Part(
        "0.2.6",
        ("tests/test_brownian_path.py", "tests/test_brownian_tree.py"),
        needs=("trampoline", "scipy"),
    ),
    "einops": Part(
        "0.8.2",
        tuple(f"einops/tests/test_{name}.py" for name in ("layers", "examples", "packing")),
        environment={"EINOPS_TEST_BACKENDS": "torch,numpy"},
    ),
    "local-attention": Part("1.11.2", ("tests",), needs=("einops", "hyper_connections")),
}


def unpacked(name: str, folder: Path) -> Path:
    """Where the source distribution of a library lies, once it is unpacked."""
    return folder / "src" / f"{name.replace('-', '_')}-{PARTS[name].version}"


def fetched(name: str, folder: Path) -> Path | None:
    """The unpacked source distribution; None where it is not there and cannot be downloaded."""
    source = unpacked(name, folder)
    if source.is_dir():
        return source
    archive = folder / "sdists" / f"{source.name}.tar.gz"
    if not archive.is_file():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name]
        command = [*pip, "-d", str(archive.parent), f"{name}=={PARTS[name].version}"]
        subprocess.run(command, check=False, capture_output=True, timeout=300)
    if not archive.is_file():
        return None
    with tarfile.open(archive) as files:
        files.extractall(folder / "src", filter="data")
    return source


def judgements(name: str) -> dict[str, dict[str, str]]:
    """The judgements of the findings in a library, by check and place."""
    known: dict[str, dict[str, dict[str, str]]] = json.loads(JUDGED.read_text(encoding="utf-8"))
    return known.get(name, {})


def missing(part: Part) -> list[str]:
    """The packages that a part needs and that are not installed."""
    return [name for name in part.needs if importlib.util.find_spec(name) is None]


def run(name: str, source: Path, output: Path) -> tuple[dict[str, Any], str]:
    """Run a part of a suite watched: the run as JSON, and what pytest printed."""
    part = PARTS[name]
    paths = [str(ROOT), str(source / part.source), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **part.environment}
    options = ["--ampcheck-watch", f"--ampcheck-dtype={part.dtype}", f"--ampcheck-json={output}", "-vv"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        *options,
        *part.arguments,
    ]
    output.unlink(missing_ok=True)
    done = subprocess.run(
        command, cwd=source, env=environment, check=False, capture_output=True, text=True, timeout=part.seconds
    )
    if not output.is_file():
        raise SystemExit(f"{name}: pytest wrote no run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(output.read_text(encoding="utf-8")), done.stdout


def row_of(name: str, data: dict[str, Any], printed: str) -> dict[str, Any]:
    """What a part showed."""
    part = PARTS[name]
    watched = re.search(r"^watched (\d+) tests? .*?: ([\d.]+) s beside ([\d.]+) s.*?([\d.]+)x in all", printed, re.M)
    findings = [finding_of(data) for data in data["findings"] if data["verdict"] not in ("pass", "skip")]
    notes = {
        "own failures": r"^fails .*: its own assertion: (.*)$",
        "in part": r"^watched in part.*?: (.*)$",
        "beyond the budget": r"^not watched, beyond.*?: (.*)$",
        "not repeatable": r"^not judged, as.*?: (.*)$",
    }
    return {
        "library": name,
        "version": part.version,
        "part": " ".join(part.arguments),
        "dtype": part.dtype,
        "tests": int(watched[1]) if watched else 0,
        "seconds": float(watched[2]) if watched else 0.0,
        "own seconds": float(watched[3]) if watched else 0.0,
        "cost": float(watched[4]) if watched else 0.0,
        "ops": data["coverage"]["seen"].get("ops", 0),
        "ended": tests_of(r"^watched in part", printed),
        "left out": tests_of(r"^not watched, beyond", printed),
        **{key: re.findall(pattern, printed, re.M) for key, pattern in notes.items()},
        "findings": findings,
    }


def tests_of(kind: str, printed: str) -> int:
    """How many tests the lines of a kind are about: one each, or `N more tests`."""
    lines = [line for line in printed.splitlines() if re.match(kind, line)]
    more = (re.search(r": ([\d,]+) more tests?;", line) for line in lines)
    return sum(int(match[1].replace(",", "")) if match else 1 for match in more)


def finding_of(data: dict[str, Any]) -> dict[str, Any]:
    """A finding as the evidence keeps it."""
    where = data.get("where", {})
    excerpt = data.get("excerpt") or {}
    code = (data.get("code") or next(iter(excerpt.get("code", [])), "")).strip()
    more = re.match(r"in this and in (\d+) more tests?: ", data["message"])
    place = f"{where.get('file', '')}:{where.get('line', '')}" if where.get("file") else ""
    return {
        "check": data["check"],
        "verdict": data["verdict"],
        "place": place,
        "code": code,
        "test": data["subject"],
        "tests": 1 + int(more[1]) if more else 1,
        "message": data["message"],
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The evidence in Markdown."""
    yield "Cost: the time of tests and watches by that of the tests, `s`; the budget is 6 times it, and 30 s."
    yield ""
    columns = "library part tests watched s cost findings real arguable false unjudged own-failures".split()
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        found = Counter(finding["judgement"] for finding in row["findings"])
        counts = " | ".join(str(found[kind]) for kind in ("real", "arguable", "false", "unjudged"))
        left = row["left out"]
        yield (
            f"| {row['library']} {row['version']} | `{row['part']}` | {row['tests'] + left} | {row['tests']} "
            f"({row['ended']} in part) | {row['own seconds']} | {row['cost']}x | {len(row['findings'])} | {counts} "
            f"| {len(row['own failures'])} |"
        )
    for row in rows:
        yield ""
        yield f"## {row['library']} ({row['dtype']})"
        yield ""
        for finding in row["findings"]:
            yield (
                f"- **{finding['judgement']}** {finding['verdict']} `{finding['check']}` {finding['place']} "
                f"({finding['tests']} tests): `{finding['code'][:90]}` {finding['reason']}".rstrip()
            )
        if not row["findings"]:
            yield "Nothing was found."


def main() -> None:
    from _evidence import write_evidence

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT.parent / "suites"
    parser.add_argument("--folder", type=Path, default=default, help="for source distributions and what is unpacked")
    parser.add_argument("--fetch", action="store_true", help="run nothing: download the parts of the ledger")
    parser.add_argument("--only", action="append", choices=PARTS, help="a library; all by default")
    parser.add_argument("--judge", action="store_true", help="run nothing: read the judgements again")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.fetch:
        print(*(f"{name}: {fetched(name, folder) or 'not there'}" for name in NIGHTLY), sep="\n")
        return
    rows = {}
    if EVIDENCE.is_file():
        rows = {row["library"]: row for row in json.loads(EVIDENCE.read_text(encoding="utf-8"))["rows"]}
    for name in () if options.judge else options.only or PARTS:
        source = fetched(name, folder)
        if source is None or (absent := missing(PARTS[name])):
            print(f"{name}: left out, {'no source distribution' if source is None else 'without ' + ', '.join(absent)}")
            continue
        data, printed = run(name, source, folder / f"{name}.json")
        rows[name] = row_of(name, data, printed)
        print(f"{name}: {len(rows[name]['findings'])} findings in {rows[name]['tests']} tests", flush=True)
    for name, row in rows.items():
        for finding in row["findings"]:
            judgement = judgements(name).get(f"{finding['check']} {finding['place']}", {})
            finding["judgement"] = judgement.get("judgement", "unjudged")
            finding["reason"] = judgement.get("reason", "")
    kept = [rows[name] for name in PARTS if name in rows]
    write_evidence(EVIDENCE, {"rows": kept}, table(kept))


if __name__ == "__main__":
    main()
