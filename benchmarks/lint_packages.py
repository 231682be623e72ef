"""What `ampcheck lint` reports of public packages, each report judged by hand, and how long it takes.

    python benchmarks/lint_packages.py FOLDER [--json reports/evidence/lint.json]

FOLDER has a folder for each package, as `pip download --no-deps NAME` and `python -m zipfile -e NAME.whl FOLDER/NAME`
leave it. Judgements are in `lint_judged.json`: of each report `true`, or why it is false. One that is not there is
`open`, and the script ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _evidence import markdown_table, write_evidence

from ampcheck.lint import lint, rules

JUDGED = Path(__file__).with_name("lint_judged.json")


def release(folder: Path) -> str:
    """The version of a package, of the metadata beside it."""
    found = sorted(folder.glob("*.dist-info"))
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else ""


def main() -> int:
    """Read all packages; the number of reports without a judgement decides the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    judged = json.loads(JUDGED.read_text())
    packages, reports = [], []
    for folder in sorted(path for path in options.folder.iterdir() if path.is_dir()):
        start = time.process_time()
        run = lint([folder.resolve()], cached=False)
        packages.append({"package": folder.name, "version": release(folder), "files": run.coverage.seen["files"],
                         "reports": len(run.findings), "seconds": round(time.process_time() - start, 2)})  # fmt: skip
        for finding in run.findings:
            place = f"{folder.name}/{Path(finding.where.file).relative_to(folder.resolve())}:{finding.where.line}"
            key = f"{finding.check} {place}"
            reports.append({"rule": finding.check, "place": place, "code": finding.code.strip()[:90],
                            "judged": judged.get(key, "open")})  # fmt: skip
    told = Counter((report["rule"], report["judged"] == "true") for report in reports)
    precision = [
        {"rule": code, "reports": told[code, True] + told[code, False], "true": told[code, True]} for code in rules()
    ]
    data: dict[str, Any] = {"packages": packages, "precision": precision, "reports": reports}
    data["again"] = again(options.folder / "transformers")
    print(*table(data), sep="\n")
    if options.json:
        write_evidence(options.json, data, table(data), a_line_each="reports")
    return int(any(report["judged"] == "open" for report in reports))


def again(folder: Path) -> dict[str, float]:
    """Seconds of processor time on one package, at first and from the cache."""
    if not folder.exists():
        return {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        times = []
        for _ in range(2):
            start = time.process_time()
            lint([folder.resolve()])
            times.append(round(time.process_time() - start, 2))
    return {"first": times[0], "again": times[1]}


def table(data: dict[str, Any]) -> list[str]:
    reports, packages, again = data["reports"], data["packages"], data["again"]
    true, files = sum(r["judged"] == "true" for r in reports), sum(package["files"] for package in packages)
    return [
        f"{len(packages)} packages, {files:,} files: {len(reports)} reports, {true} of them true.",
        "",
        *markdown_table(data["precision"]),
        "",
        f"Seconds of processor time on transformers: {again.get('first')}; {again.get('again')} from the cache.",
        "",
        *markdown_table(packages),
        "",
        *markdown_table([{**report, "code": f"`{report['code']}`".replace("|", "\\|")} for report in reports]),
    ]


if __name__ == "__main__":
    sys.exit(main())
