"""The suite, or a part of it, on the releases of PyTorch and Python that the README promises, one after the other.

    python benchmarks/versions.py [--torch 2.6,2.9,2.13,2.15] [--pythons python3.10,python3.13] [--tests tests/units] \\
        --json reports/evidence/versions.json

A release of PyTorch for this Python is an environment over the packages of this one, as `ampcheck bisect` makes it; for
another Python everything is installed. The newest patch of each release is used. Tests that need a newer PyTorch, or an
older one, say so by the markers `needs_torch` and `until_torch`; what they say is the second table. With --json each
pair is kept, and an interrupted script goes on from there; --again runs the pairs named in it once more. A whole suite
replaces what parts of it gave. --prune removes each environment after its use.
--stubs takes no libraries of CUDA, which need several gigabytes, and writes stand-ins: for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _cuda_stubs import make_stubs
from _evidence import markdown_table, write_evidence

from ampcheck.core.errors import UsageError
from ampcheck.tools.bisect.environments import Environments, published

ROOT = Path(__file__).parent.parent
TORCH = "2.6,2.9,2.13,2.15"
TESTS = "tests"
COLUMNS = ("torch", "python", "tests", "passed", "failed", "skipped", "minutes", "why")


def newest_patch(release: str, known: list[str]) -> str:
    """The newest release of the index, or of this machine, that starts with these numbers."""
    patches = [number for number in known if f"{number}.".startswith(f"{release}.")]
    return max(patches, key=lambda number: [int(part) for part in number.split(".")], default=release)


def interpreter(release: str, python: str, folder: Path, stubs: Path | None) -> str:
    """The interpreter with a release of PyTorch and all that the tests need."""
    shared = Environments("torch")
    if python == sys.executable:
        made = shared.python(release)
        if stubs is not None and release != shared.installed():
            without_cuda(made, stubs)
        return made
    made, complete = str(folder / "bin" / "python"), folder / "complete"
    if complete.exists():
        return made
    found = shutil.which(python)
    if found is None:
        raise UsageError(f"there is no {python} on this machine")
    installed([found, "-m", "venv", str(folder)])
    install = [made, "-m", "pip", "install", "--quiet"]
    installed([*install, *["--no-deps"] * (stubs is not None), f"torch=={release}"])
    if stubs is not None:
        without_cuda(made, stubs)
    installed([*install, f"{ROOT}[test]"], {"PIP_NO_DEPS": "0"})
    complete.touch()
    return made


def installed(command: list[str], settings: dict[str, str] | None = None) -> None:
    environment = {**os.environ, **(settings or {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no reason"]
        reasons = [line for line in lines if line.startswith(("ERROR", "The user requested"))] or lines[-1:]
        raise UsageError(f"{' '.join(command[1:4])} failed: {'; '.join(dict.fromkeys(reasons))[:300]}")


def without_cuda(python: str, stubs: Path) -> None:
    """Write stand-ins for the libraries of CUDA, install the Triton of this PyTorch, and take the rest off its list."""
    library = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(library, capture_output=True, text=True, check=True).stdout.strip())
    make_stubs(packages / "torch", stubs)
    (record,) = packages.glob("torch-*.dist-info/METADATA")
    text = record.read_text(encoding="utf-8")
    for needed in re.findall(r"^Requires-Dist: (triton==\S+)", text, re.MULTILINE):
        installed([python, "-m", "pip", "install", "--quiet", "--no-deps", needed.rstrip(";")])
    record.write_text(re.sub(r"^Requires-Dist: (nvidia|cuda)-.*\n", "", text, flags=re.MULTILINE), encoding="utf-8")


def tested(python: str, tests: list[str], minutes: float, workers: int) -> dict[str, Any]:
    """Counts of the tests, the first lines of what failed, and the reasons of `needs_torch` and `until_torch`."""
    with tempfile.TemporaryDirectory(prefix="ampcheck-versions-") as folder:
        outcomes = Path(folder) / "outcomes.jsonl"
        command = [python, "-m", "pytest", "-n", str(workers), "-q", "-p", "no:cacheprovider", "-p", "_outcomes"]
        command += ["--dist", "worksteal", *tests]
        path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
        environment = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": folder, "OUTCOMES": str(outcomes)}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60 * minutes, check=False
            )
        except subprocess.TimeoutExpired:
            return {"why": f"not finished after {minutes:g} minutes"}
        if not outcomes.exists():
            lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
            return {"why": f"pytest ended with {done.returncode}: {lines[-1][:200]}"}
        return counts([json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()])


def counts(lines: list[dict[str, str]]) -> dict[str, Any]:
    seen, failures, needs = Counter[str](), {}, Counter[str]()
    for line in lines:
        seen[line["outcome"]] += 1
        if line["outcome"] == "failed":
            failures[line["test"]] = short(line["message"])
        if reason := re.match(r"(Skipped: )?((needs|until) torch [\d.]+: [^;]+)", line["message"]):
            needs[reason[2]] += 1
    return {**{name: seen[name] for name in ("passed", "failed", "skipped")}, "failures": failures, "needs": needs}


def short(message: str) -> str:
    """The first line of a message, without folders of this machine."""
    return (re.sub(r"(?<![\w.])/[\w./+-]*/", "", message).splitlines() or ["no message"])[0][:200]


def table(rows: list[dict[str, Any]]) -> list[str]:
    shown = [{name: row.get(name) for name in COLUMNS} for row in rows]
    needs = sorted({reason for row in rows for reason in row.get("needs", {})})
    lines = markdown_table(shown, COLUMNS)
    if needs:
        columns: dict[str, Counter[str]] = {}
        for row in rows:  # of a release, the suite and what was run again of it
            column = f"{row['torch']}, Python {row['python']}"
            columns[column] = columns.get(column, Counter[str]()) | Counter[str](row.get("needs", {}))
        lines += ["", "Tests that a release is too old, or too new, for:", ""]
        lines += markdown_table(
            [{"what": reason, **{c: n[reason] or None for c, n in columns.items()}} for reason in needs]
        )
    for row in rows:
        alike: dict[str, list[str]] = {}
        for name, message in row.get("failures", {}).items():
            alike.setdefault(short(message), []).append(name)
        for message, names in sorted(alike.items(), key=lambda item: -len(item[1])):
            more = f" and {len(names) - 1} more" if names[1:] else ""
            lines += ["", f"- torch {row['torch']}, Python {row['python']}: `{names[0]}`{more}: {message}"]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=TORCH, help="releases (default: %(default)s)")
    parser.add_argument("--pythons", default=sys.executable, help="interpreters by commas (default: this one)")
    parser.add_argument("--tests", default=TESTS, help="paths below the root, by commas (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=240.0, help="that one run may take (default: %(default)g)")
    parser.add_argument("--workers", type=int, default=2, help="processes of tests (default: %(default)s)")
    parser.add_argument("--stubs", type=Path, metavar="FOLDER", help="of stand-ins for CUDA's libraries")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="environments of other Pythons, for the next time")
    parser.add_argument("--again", action="store_true", help="run the pairs once more that the evidence has")
    parser.add_argument("--prune", action="store_true", help="remove each environment after its use")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write evidence here, and a table beside it")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs ignore
    if options.stubs is not None:  # also of the environments that `ampcheck bisect` makes
        os.environ |= {"PIP_NO_DEPS": "1", "LD_LIBRARY_PATH": str(options.stubs.resolve())}
    rows: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        row["failures"] = {name: short(message) for name, message in row.get("failures", {}).items()}
    shared = Environments("torch")
    known = [*published("torch"), *shared.kept(), shared.installed()]
    for python in options.pythons.split(","):
        for release in options.torch.split(","):
            number = newest_patch(release, known)
            own = ".".join(map(str, sys.version_info[:2]))
            version = own if python == sys.executable else python.rpartition("python")[2]
            pair = {"torch": number, "python": version}
            key = {**pair, "tests": options.tests}
            earlier = [row for row in rows if key.items() <= row.items()]
            if earlier and not options.again:
                continue
            begin = time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="ampcheck-python-", ignore_cleanup_errors=True) as folder:
                try:
                    place = (options.keep or Path(folder)) / f"{version}-{number}"
                    made = interpreter(number, python, place.resolve(), options.stubs)
                    row = tested(made, options.tests.split(","), options.minutes, options.workers)
                except UsageError as error:
                    row = {"why": str(error)}
            if options.prune:
                shared.remove(number)
            replaced = pair if options.tests == TESTS else key  # the whole suite says all that its parts said
            rows = [row for row in rows if not replaced.items() <= row.items()]
            rows.append({**key, **row, "minutes": round((time.perf_counter() - begin) / 60, 1)})
            print({name: rows[-1].get(name) for name in COLUMNS}, flush=True)
            if options.json is not None:
                write_evidence(options.json, {"rows": rows}, table(rows))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
