"""Public training scripts that were written for a GPU, unmodified, audited on a CPU; then with planted mistakes.

    python benchmarks/gpu_scripts.py --mirror FOLDER [--older FOLDER] [--only NAME] [--healthy] [--list]

Each script runs as it stands: a driver of `benchmarks/gpu_scripts` gives it a small model, random data of the shape
that it reads and random weights, and changes nothing else. `--mirror` names a folder of local clones,
`OWNER+NAME/repo`; without it git clones from GitHub. What the scripts import must be installed (`--list` names it).
Writes reports/evidence/gpu_scripts.json and .md; scripts that are not named keep their rows. No code of theirs is kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from _evidence import markdown_table, write_evidence
from _gpu_scripts_table import SCRIPTS, Mistake, Script

from ampcheck.core.run import Finding, Verdict

ROOT = Path(__file__).parents[1]
DRIVERS = Path(__file__).with_name("gpu_scripts")
EVIDENCE = ROOT / "reports" / "evidence" / "gpu_scripts.json"
LIMIT = 900
"""Seconds that one audit may take."""

OLDER: list[str] = []
"""The folder of `--older`, with releases of packages that are no longer current."""

SHARED = ("torch", "torchvision", "numpy", "PIL.Image", "ampcheck.audit", "ampcheck.target", "torch._dynamo")
"""What is imported once, before the runs are forked; what asks for a device when it is imported is not among them."""

Row = dict[str, Any]


def clone(script: Script, mirror: Path | None, into: Path) -> None:
    """Clone the repository at the commit of the table; data files that the source lacks are left out."""
    owner, name = script.repository.split("/")
    source = str(mirror / f"{owner}+{name}" / "repo") if mirror else f"https://github.com/{owner}/{name}"
    quiet = {"capture_output": True, "text": True, "check": False}
    if subprocess.run(["git", "clone", "--no-checkout", source, str(into)], **quiet).returncode:
        raise SystemExit(f"{script.repository} cannot be cloned")
    subprocess.run(["git", "checkout", script.commit, "--", script.folder or "."], cwd=into, **quiet)
    if not (into / script.folder / script.path).exists():
        raise SystemExit(f"{script.repository} has no {script.folder}/{script.path} at {script.commit}")
    shutil.rmtree(into / ".git")  # scripts must not ask for what is not in the snapshot


def planted(script: Script, mistake: Mistake, folder: Path) -> list[int]:
    """Write a mistake into a copy of the script; the lines at which it counts as found."""
    path = folder / (mistake.path or script.path)
    text = path.read_text(encoding="utf-8")
    if text.count(mistake.right) != 1:
        raise SystemExit(f"{script.name}: {text.count(mistake.right)} places have {mistake.right!r}")
    before = text[: text.index(mistake.right)].count("\n")
    text = text.replace(mistake.right, mistake.wrong)
    path.write_text(text, encoding="utf-8")
    if mistake.line:
        lines = [number for number, line in enumerate(text.splitlines(), 1) if mistake.line in line]
        return [min(lines, key=lambda number: abs(number - before - 1))]
    return [before + 1 + offset for offset in range(mistake.wrong.count("\n") + 1)]


def audited(script: Script, folder: Path, log: Path) -> Row:
    """Audit the script in a process of its own: its findings, and the CPU seconds."""
    result, begin = log.with_suffix(".json"), time.monotonic()
    result.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            try:
                audit(script, folder, result)
            finally:
                os._exit(1)
    try:
        while True:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() - begin > LIMIT:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.2)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # and the workers of its data loaders
    row = {"cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1), "seconds": round(time.monotonic() - begin, 1)}
    if not result.exists():
        return {**row, "error": f"ended with status {status} after {row['seconds']} s", "findings": []}
    return {**row, **json.loads(result.read_text(encoding="utf-8"))}


def audit(script: Script, folder: Path, result: Path) -> None:
    """`ampcheck audit DRIVER:main --device cuda --fast`, in the folder of the script."""
    from ampcheck.core.errors import UsageError
    from ampcheck.core.settings import Target
    from ampcheck.target import audit_target

    if script.older and OLDER:
        sys.path.insert(0, f"{OLDER[0]}/{script.name}/site-packages")
    os.chdir(folder)
    os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled", **dict(script.environment))
    target = Target(f"{DRIVERS / script.name}.py:main", device="cuda", compile=False, steps=script.steps)
    try:
        run = audit_target(target)
        data: Row = {"findings": [described(f, folder) for f in run.findings if is_named(f)] if run else []}
        data["steps"] = run.coverage.seen.get("steps", 0) if run else 0
    except UsageError as error:
        data = {"findings": [], "error": str(error)}
    result.write_text(json.dumps(data), encoding="utf-8")


def is_named(finding: Finding) -> bool:
    return finding.verdict not in (Verdict.PASS, Verdict.SKIP)


def described(finding: Finding, folder: Path) -> Row:
    """What the evidence keeps of a finding."""
    file = finding.where.file
    with suppress(ValueError):
        file = str(Path(file).resolve().relative_to(folder.resolve()))
    where = {"file": file, "line": finding.where.line or 0}
    message = finding.message.replace(str(folder) + "/", "")
    return {"verdict": str(finding.verdict), "check": finding.check, **where, "message": message}


def outcome(mistake: Mistake, row: Row, script: Script, lines: list[int], healthy: Row) -> str:
    """`line`, `elsewhere` or `missed`. A finding that the healthy script has too does not count."""
    if "error" in row:
        return "error"
    before = {(f["check"], f["message"]) for f in healthy["findings"]}
    found = [f for f in row["findings"] if f["verdict"] in ("fail", "warn") and f["check"] in mistake.checks]
    found = [f for f in found if (f["check"], f["message"]) not in before]
    file = mistake.path or script.path
    if any(f["file"] == file and f["line"] in lines for f in found):
        return "line"
    return "elsewhere" if found else "missed"


def measured(script: Script, mirror: Path | None, logs: Path, *, healthy_alone: bool, known: Row) -> Row:
    """The row of one script: healthy, then with each mistake."""
    with TemporaryDirectory(prefix="gpu-scripts-") as temporary:
        whole = Path(temporary, "whole")
        clone(script, mirror, whole)

        def run(name: str, mistake: Mistake | None = None) -> tuple[Row, list[int]]:
            copy = Path(temporary, name)
            shutil.copytree(whole, copy, symlinks=True)
            lines = planted(script, mistake, copy / script.folder) if mistake else []
            row = audited(script, copy / script.folder, logs / f"{script.name}-{name}.log")
            shutil.rmtree(copy)
            return row, lines

        healthy, _ = (known["healthy"], []) if known.get("healthy") and not healthy_alone else run("healthy")
        show(script.name, "healthy", healthy)
        mistakes = []
        for number, mistake in enumerate(() if healthy_alone else script.mistakes):
            row, lines = run(f"mistake{number}", mistake)
            how = outcome(mistake, row, script, lines, healthy)
            mistakes.append({"kind": mistake.kind, "outcome": how, "lines": lines, **row})
            show(script.name, f"{mistake.kind}: {how}", row)
        kept = known.get("mistakes", []) if healthy_alone else mistakes
    facts = {"repository": script.repository, "commit": script.commit, "script": f"{script.folder}/{script.path}"}
    return {"name": script.name, "kind": script.kind, **facts, "healthy": healthy, "mistakes": kept}


def scrubbed(value: Any, machine: Mapping[str, str]) -> Any:
    """Evidence without the folders of this machine: each is written as its name."""
    if isinstance(value, dict):
        return {name: scrubbed(part, machine) for name, part in value.items()}
    if isinstance(value, list):
        return [scrubbed(part, machine) for part in value]
    if not isinstance(value, str):
        return value
    for folder, name in machine.items():
        value = value.replace(folder, name)
    return re.sub(r"/[^ '\"]*/site-packages/", "", value)


def show(name: str, what: str, row: Row) -> None:
    print(f"{name}: {what}, {row['cpu_seconds']} CPU s, {row['seconds']} s", row.get("error", ""), flush=True)
    for f in row["findings"]:
        print(f"    {f['verdict']} {f['check']} {f['file']}:{f['line']} {f['message'][:160]}", flush=True)


def table(rows: list[Row]) -> Iterator[str]:
    """The lines of the Markdown page."""
    told = {script.name: script for script in SCRIPTS}
    columns = []
    for row in rows:
        fails = [f for f in row["healthy"]["findings"] if f["verdict"] == "fail"]
        judged = told[row["name"]].judged if row["name"] in told else {}
        found = ", ".join(f"{f['check']} {f['file']}:{f['line']}" for f in fails)
        source = f"https://github.com/{row['repository']}"
        columns.append(
            {
                "script": f"[{row['repository']}]({source}) `{row['script'].lstrip('/')}`",
                "kind": row["kind"],
                "commit": row["commit"][:10],
                "healthy": row["healthy"].get("error") or found,
                "judged": "; ".join(judged.get(f["check"], "not judged") for f in fails),
                **{
                    f"mistake {number + 1}": f"{mistake['kind']}: {mistake['outcome']}"
                    for number, mistake in enumerate((*row["mistakes"], *[{"kind": "", "outcome": ""}] * 3)[:3])
                },
                "CPU s": row["healthy"]["cpu_seconds"],
            }
        )
    mistakes = [mistake["outcome"] for row in rows for mistake in row["mistakes"]]
    ran = [row["healthy"] for row in rows if "error" not in row["healthy"]]
    silent = sum(all(f["verdict"] != "fail" for f in healthy["findings"]) for healthy in ran)
    yield f"{len(rows)} scripts, {len(ran)} of them measured; {silent} are silent when healthy. "
    yield f"Of {len(mistakes)} planted mistakes, "
    yield f"{mistakes.count('line')} were found at their line, {mistakes.count('elsewhere')} elsewhere, "
    yield f"{mistakes.count('missed')} not, {mistakes.count('error')} ended the run."
    yield ""
    yield from markdown_table(columns)


def main() -> None:
    """Measure the scripts that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mirror", type=Path)
    parser.add_argument("--older", type=Path, help="older releases: `pip install --target OLDER/NAME/site-packages`")
    parser.add_argument("--only", metavar="NAME", action="append")
    parser.add_argument("--healthy", action="store_true", help="without the mistakes")
    parser.add_argument("--again", action="store_true", help="also run the healthy script where its row is known")
    parser.add_argument("--list", action="store_true", help="name the scripts and what they import, and end")
    options = parser.parse_args()
    if options.list:
        for script in SCRIPTS:
            print(f"{script.name}: {script.repository} {script.commit} {script.folder}/{script.path}; {script.needs}")
        return
    OLDER.extend([str(options.older.resolve())] if options.older else [])
    for name in SHARED:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logs = Path(mkdtemp(prefix="gpu-scripts-logs-"))
    print(f"output of the scripts: {logs}", file=sys.stderr)
    kept = json.loads(EVIDENCE.read_text(encoding="utf-8"))["scripts"] if EVIDENCE.exists() else []
    rows = {row["name"]: row for row in kept}
    machine = {f"{ROOT.resolve()}/": ""}
    machine |= {f"{folder.resolve()}/": "" for folder in (options.older, options.mirror) if folder}
    sys.argv = ["benchmarks/gpu_scripts.py", "--mirror", "MIRROR", "--older", "OLDER"]  # what makes all rows

    def write() -> None:
        ordered = scrubbed([rows[script.name] for script in SCRIPTS if script.name in rows], machine)
        write_evidence(EVIDENCE, {"scripts": ordered}, table(ordered))

    for script in SCRIPTS:
        if options.only is None or script.name in options.only:
            known = rows.get(script.name, {})
            if options.again:
                known = {name: value for name, value in known.items() if name != "healthy"}
            rows[script.name] = measured(script, options.mirror, logs, healthy_alone=options.healthy, known=known)
            write()
    write()


if __name__ == "__main__":
    main()
