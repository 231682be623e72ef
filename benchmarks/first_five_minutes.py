"""The first five minutes of a new user: `ampcheck init`, then the command that it prints, in five repositories.

    python benchmarks/first_five_minutes.py --mirror FOLDER [--python PATH] [--only OWNER/NAME]

Clones each repository, runs both commands, and writes what they printed, their CPU seconds and their longest silence to
reports/evidence/first_five_minutes.json and, as a page, to docs/guides/first-five-minutes.md. `--mirror` names a folder
of local clones, `OWNER+NAME/repo`; `--python` is an interpreter of an environment that has what the repositories
import, which is not measured. No repository is one of docs/guides/five-repositories.md.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from first_report import Project, clone

from ampcheck.core.environment import environment
from ampcheck.core.files import write_atomically

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "reports" / "evidence" / "first_five_minutes.json"
PAGE = ROOT / "docs" / "guides" / "first-five-minutes.md"
SILENCE = 5.0
"""Seconds without a line above which the page names the line before."""

PROJECTS = (
    Project("Lightning-AI/litgpt", "", "Lightning (Fabric): language models from a class of configurations"),
    Project("chuanyangjin/fast-DiT", "", "accelerate: a diffusion transformer, trained on features of a VAE"),
    Project("ashleve/lightning-hydra-template", "", "Hydra and Lightning: a model and a trainer from YAML"),
    Project("weiaicunzai/pytorch-cifar100", "", "plain CUDA: `.cuda()` behind an option, a loop below `if __name__`"),
    Project("milesial/Pytorch-UNet", "", "a heavy model: a U-Net of 31 million parameters, with a GradScaler"),
    Project("karpathy/minGPT", "", "a configuration with a documented default, `get_default_config()`"),
)

_BEAT = re.compile(r", \d+ s$")
_PACKAGES = re.compile(r"/\S*?/site-packages/")
_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class Command:
    """A command that ran. cpu: seconds of all its processes. silence: its longest, and the last line before it."""

    command: str
    code: int
    seconds: float
    cpu: float
    silence: float
    after: str
    lines: list[str] = field(default_factory=list)


@dataclass
class Log:
    """What happened in one repository."""

    repository: str
    shape: str
    commit: str = ""
    load: float = 0.0
    commands: list[Command] = field(default_factory=list)
    tests: str = ""
    left: list[str] = field(default_factory=list)


def follow(command: list[str], shown: str, folder: Path) -> Command:
    """Run a command on a terminal and record what it prints, and when."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = last = time.monotonic()
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "COLUMNS": "110"},
    )
    os.close(follower)
    text, silence, after = "", 0.0, ""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:  # the end of a terminal
            data = b""
        now = time.monotonic()
        if now - last > silence:
            silence, after = now - last, (text.strip().splitlines() or [""])[-1]
        if not data:
            break
        last, text = now, text + data.decode(errors="replace")
    process.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    lines = [_COLOR.sub("", line).rstrip() for line in text.splitlines()]
    return Command(shown, process.returncode, time.monotonic() - begin, cpu, silence, _COLOR.sub("", after), lines)


def measured(project: Project, mirror: Path | None, python: str) -> Log:
    """Clone, run `ampcheck init --yes` and the command that it prints."""
    log = Log(project.repository, project.shape, load=os.getloadavg()[0])
    with TemporaryDirectory(prefix="first-five-minutes-") as temporary:
        top = Path(temporary, project.repository.split("/")[1])
        log.commit = clone(project, mirror, top)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(temporary, "inductor"))  # as of a first run
        log.commands.append(follow([python, "-m", "ampcheck", "init", "--yes"], "ampcheck init --yes", top))
        printed = next(line for line in log.commands[0].lines if line.startswith("next: python -m pytest"))
        shown = printed.removeprefix("next: ")
        log.commands.append(follow([python, *shown.split()[1:]], shown, top))
        log.tests = (top / "tests" / "test_amp.py").read_text(encoding="utf-8")
        log.left = [line.removeprefix("note: ") for line in log.commands[0].lines if line.startswith("note: ")]
        for command in log.commands:
            command.lines = [_without_machine(line, top) for line in command.lines]
            command.after = _without_machine(command.after, top)
    return log


def _without_machine(line: str, top: Path) -> str:
    """A line that names no folder of this machine: files of packages begin at `site-packages`."""
    return _PACKAGES.sub("site-packages/", line.replace(str(top), top.name)).replace(gettempdir(), "TMP")


def shortened(lines: list[str]) -> list[str]:
    """The lines of a command without those of progress, warnings and what the repository itself prints at length."""
    kept, skips = [], False
    for line in lines:
        if "warnings summary" in line:
            skips = True
        elif (skips and "= ampcheck =" in line.replace("==", "=")) or re.match(r"=+ ampcheck =+", line):
            skips = False
        if not skips and line.strip() and not (line.startswith("ampcheck: ") and _BEAT.search(line)):
            kept.append(line)
    return kept if len(kept) <= 48 else [*kept[:12], f"[{len(kept) - 46} lines]", *kept[-34:]]


def factories(text: str) -> str:
    """The factories of the generated tests."""
    found = re.findall(r"^def (?!build)(?!test_)\w+\(\):\n(?:    .*\n|\n(?=    ))*", text, re.MULTILINE)
    return "\n\n".join(each.rstrip() for each in found)


_NOT_RUN = "<!-- snippet: not run, of another repository -->"
_INTRODUCTION = """\
`python benchmarks/first_five_minutes.py` wrote this page. In each repository it ran `ampcheck init --yes`, and then the
command that init prints, with an empty cache of the compiler; nothing was edited. None is among the
[five repositories](five-repositories.md) of the earlier log. What the repositories import was installed before; no
weights and no data were downloaded. Lines that only say that a step still runs, and the summary of warnings, are left
out below; tests that are skipped say why."""


def page(logs: list[Log], known: dict[str, object]) -> str:
    """The page about all repositories."""
    low, high = min(log.load for log in logs), max(log.load for log in logs)
    lines = [
        f"# The first five minutes: {len(logs)} repositories",
        "",
        _INTRODUCTION,
        "",
        f"Machine: torch {known['torch']}, {known['device']}, Python {known['python']}. Its load average was {low:.1f} "
        f"to {high:.1f} before each began, so CPU seconds count, of all processes together. Silence is the longest "
        "time without a line.",
        "",
        "| repository | what it is | init, CPU s | pytest, CPU s | both | silence, s | tests |",
        "|---|---|---:|---:|---:|---:|---|",
        *map(_row, logs),
    ]
    for log in logs:
        lines += ["", f"## {log.repository}", "", f"Commit `{log.commit[:10]}`."]
        for command in log.commands:
            lines += ["", _figures(command), "", _NOT_RUN, "```text", *shortened(command.lines), "```"]
        lines += ["", "What init wrote as factories:", "", _NOT_RUN]
        lines += ["```python", factories(log.tests), "```"]
    return "\n".join(lines) + "\n"


def _row(log: Log) -> str:
    init, tests = log.commands
    link = f"[{log.repository}](https://github.com/{log.repository})"
    figures = f"{init.cpu:.0f} | {tests.cpu:.0f} | {init.cpu + tests.cpu:.0f} | {max(init.silence, tests.silence):.1f}"
    return f"| {link} | {log.shape} | {figures} | {_outcome(tests)} |"


def _figures(command: Command) -> str:
    after = f", after `{command.after}`" if command.after and command.silence > SILENCE else ""
    return (
        f"`{command.command}`: exit code {command.code}, {command.cpu:.0f} CPU seconds, {command.seconds:.0f} s; "
        f"longest silence {command.silence:.1f} s{after}."
    )


def _outcome(tests: Command) -> str:
    last = next((line for line in reversed(tests.lines) if re.search(r"\d (passed|failed|skipped)", line)), "")
    return re.sub(r"[= ]*in [\d.]+s.*", "", last.strip("= "))


def main() -> None:
    """Measure the repositories that are named, all by default; keep the other rows of the evidence."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mirror", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", metavar="OWNER/NAME", action="append")
    parser.add_argument("--page", action="store_true", help="only write the page again from the evidence")
    options = parser.parse_args()
    kept = json.loads(EVIDENCE.read_text(encoding="utf-8")) if EVIDENCE.exists() else {"logs": []}
    logs = {
        row["repository"]: Log(**{**row, "commands": [Command(**each) for each in row["commands"]]})
        for row in kept["logs"]
    }
    known = kept.get("environment") if options.page else environment()
    for project in () if options.page else PROJECTS:
        if options.only is None or project.repository in options.only:
            log = logs[project.repository] = measured(project, options.mirror, options.python)
            print(project.repository, *(f"{each.cpu:.0f} CPU s" for each in log.commands), flush=True)
            ordered = [logs[each.repository] for each in PROJECTS if each.repository in logs]
            write_atomically(
                EVIDENCE, json.dumps({"environment": known, "logs": [*map(asdict, ordered)]}, indent=1) + "\n"
            )
    write_atomically(PAGE, page([logs[each.repository] for each in PROJECTS if each.repository in logs], known))


if __name__ == "__main__":
    main()
