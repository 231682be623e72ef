"""From a clone to the first report: `ampcheck init --yes && pytest` in five repositories of other people.

    python benchmarks/first_report.py --mirror FOLDER [--only NAME]

Clones each repository, runs both commands as a new user would, and writes what happened to
reports/evidence/first_report.json and, as a page, to docs/guides/five-repositories.md. `--mirror` names a folder of
local clones, `OWNER+NAME/repo`; without it git clones from GitHub. What the repositories import must be installed; that
is not measured. Nothing of them is kept but counts, verdicts and messages.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ampcheck.core.environment import environment
from ampcheck.core.files import write_atomically
from ampcheck.core.run import Run, Verdict
from ampcheck.core.settings import load_settings

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "reports" / "evidence" / "first_report.json"
PAGE = ROOT / "docs" / "guides" / "five-repositories.md"
LIMIT = 300.0
"""Seconds from the clone to the report that the page promises."""


@dataclass(frozen=True)
class Project:
    """A repository. folder: in which the commands run. shape: what it is an example of."""

    repository: str
    folder: str
    shape: str


PROJECTS = (
    Project("karpathy/nanoGPT", "", "a model file and scripts without functions"),
    Project("lucidrains/x-transformers", "", "a library with examples in its README, tests and training scripts"),
    Project("huggingface/pytorch-image-models", "", "a library of 700 model classes and its training script (timm)"),
    Project("pytorch/examples", "imagenet", "a training script for the models of torchvision"),
    Project("huggingface/accelerate", "examples", "training scripts for checkpoints of transformers"),
)


@dataclass
class Report:
    """What happened in one repository. Seconds are wall time; cpu: seconds of all processes."""

    repository: str
    folder: str
    shape: str
    commit: str = ""
    clone_seconds: float = 0.0
    init_seconds: float = 0.0
    pytest_seconds: float = 0.0
    cpu_seconds: float = 0.0
    load: float = 0.0
    files: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outcome: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.clone_seconds + self.init_seconds + self.pytest_seconds


def clone(project: Project, mirror: Path | None, into: Path) -> str:
    """Clone the newest commit; data files that the source lacks are left out. Returns the commit."""
    owner, name = project.repository.split("/")
    source = str(mirror / f"{owner}+{name}" / "repo") if mirror else f"https://github.com/{owner}/{name}"
    quiet = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(["git", "clone", "--no-checkout", source, str(into)], **quiet)
    if done.returncode:
        raise SystemExit(f"{project.repository} cannot be cloned: {done.stderr.strip()}")
    subprocess.run(["git", "checkout", "HEAD", "--", "."], cwd=into, **quiet)
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=into, **quiet).stdout.strip()


def measured(project: Project, mirror: Path | None) -> Report:
    """Clone, run `ampcheck init --yes` and `pytest`, and read what they wrote."""
    report = Report(project.repository, project.folder, project.shape, load=os.getloadavg()[0])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory(prefix="first-report-") as temporary:
        top = Path(temporary, project.repository.split("/")[1])
        begin = time.monotonic()
        report.commit = clone(project, mirror, top)
        report.clone_seconds = time.monotonic() - begin
        folder = top / project.folder
        init, report.init_seconds = run(["-m", "ampcheck", "init", "--yes"], folder)
        if init.returncode:
            raise SystemExit(f"ampcheck init failed in {project.repository}: {init.stderr}")
        found = Path(temporary, "run.json")
        tests = ["tests/test_amp.py", "--ampcheck", f"--ampcheck-json={found}", "-q", "-p", "no:cacheprovider"]
        done, report.pytest_seconds = run(["-m", "pytest", *tests], folder)
        report.outcome = done.stdout.strip().splitlines()[-1].strip("= ")
        report.files = subprocess.run(
            ["git", "status", "--short", "--untracked-files=all"], cwd=top, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        report.files = [line[3:] for line in report.files if "ampcheck" in line or "test_amp" in line or "toml" in line]
        report.targets = [target.target for target in load_settings(folder).targets]
        report.models = [
            line.strip().strip('"').rstrip(".")
            for line in (folder / "tests" / "test_amp.py").read_text(encoding="utf-8").splitlines()
            if line.endswith(' parameters."""')
        ]
        report.notes = [line.removeprefix("note: ") for line in init.stdout.splitlines() if line.startswith("note: ")]
        judged = Run.load(str(found))
        report.counts = {str(verdict): len(judged.of(verdict)) for verdict in Verdict if judged.of(verdict)}
        problems = [*judged.of(Verdict.FAIL), *judged.of(Verdict.WARN)]
        report.findings = [
            f"{each.verdict} `{each.check}` of {each.subject}, {each.where}: {each.message}".replace(str(top) + "/", "")
            for each in problems
            if not each.cause
        ]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    report.cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return report


def run(arguments: list[str], folder: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run Python in a folder; what it printed, and the seconds that it took."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    return done, time.monotonic() - begin


def page(reports: list[Report], known: dict[str, Any]) -> str:
    """The page about all repositories."""
    rows = [
        f"| [{each.repository}](https://github.com/{each.repository}){f', `{each.folder}`' if each.folder else ''} "
        f"| {each.shape} | {each.seconds:.0f} | {each.cpu_seconds:.0f} | {len(each.models)} "
        f"| {', '.join(f'{count} {name}' for name, count in each.counts.items())} |"
        for each in reports
    ]
    slowest = max(each.seconds for each in reports)
    kept = "Each took less than five minutes" if slowest <= LIMIT else f"The slowest took {slowest:.0f} seconds"
    unmeasured = [each.repository for each in PROJECTS if each.repository not in {row.repository for row in reports}]
    lines = [
        f"# From clone to first report: {len(reports)} of {len(PROJECTS)} repositories",
        "",
        *([f"Not measured yet: {', '.join(unmeasured)}.", ""] if unmeasured else []),
        "`python benchmarks/first_report.py` wrote this page. In each repository it ran",
        "",
        "<!-- snippet: not run, tests/units/cli/test_init.py runs it -->",
        "```sh",
        "ampcheck init --yes && python -m pytest tests/test_amp.py --ampcheck",
        "```",
        "",
        f"{kept}, and nothing was edited. What the repositories import was installed before. No weights and no data "
        "were downloaded: models have random weights, as the generated factories show.",
        "",
        f"Machine: torch {known['torch']}, {known['device']}, Python {known['python']}. Its load average was "
        f"{min(each.load for each in reports):.1f} to {max(each.load for each in reports):.1f} before each began: "
        "seconds include waiting for other programs. CPU seconds, of all processes together, do not.",
        "",
        "| repository | what it is | seconds | CPU seconds | models | verdicts |",
        "|---|---|---:|---:|---:|---|",
        *rows,
    ]
    for each in reports:
        lines += ["", f"## {each.repository}", ""]
        lines += [f"Commit `{each.commit[:10]}`{f', folder `{each.folder}`' if each.folder else ''}.", ""]
        lines += [
            f"- clone {each.clone_seconds:.0f} s, init {each.init_seconds:.0f} s, pytest {each.pytest_seconds:.0f} s: "
            f"{each.outcome}",
            f"- written: {', '.join(f'`{name}`' for name in each.files)}",
            f"- targets: {', '.join(f'`{name}`' for name in each.targets)}",
            *(f"- model: {name}" for name in each.models),
            *(f"- note of init: {note}" for note in each.notes),
            "- edited: nothing",
        ]
        lines += ["", "Found:", "", *(f"- {finding}" for finding in each.findings or ["no failure and no warning"])]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the repositories that are named, all by default; keep the other rows of the evidence."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mirror", type=Path)
    parser.add_argument("--only", metavar="OWNER/NAME", action="append")
    parser.add_argument("--page", action="store_true", help="only write the page again from the evidence")
    options = parser.parse_args()
    kept = json.loads(EVIDENCE.read_text(encoding="utf-8")) if EVIDENCE.exists() else {"reports": []}
    reports = {row["repository"]: Report(**row) for row in kept["reports"]}
    known = kept.get("environment") if options.page else environment()
    for project in () if options.page else PROJECTS:
        if options.only is None or project.repository in options.only:
            report = reports[project.repository] = measured(project, options.mirror)
            print(f"{project.repository}: {report.seconds:.0f} s, {report.outcome}", flush=True)
            ordered = [reports[each.repository] for each in PROJECTS if each.repository in reports]
            data = {"environment": known, "reports": [asdict(each) for each in ordered]}
            write_atomically(EVIDENCE, json.dumps(data, indent=1) + "\n")
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(PAGE, page([reports[each.repository] for each in PROJECTS if each.repository in reports], known))


if __name__ == "__main__":
    main()
