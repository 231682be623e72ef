"""The snippets of the pages and of the guide for agents: found, run in order, and their output compared or written.

A page is a session in a folder of its own. In order of the page, a block with `title="FILE"` writes that file, or
changes it if it is a diff; a Python block runs (by pytest where it defines tests), a shell block runs. Comments before
a block say more:

    <!-- setup ... -->           Python lines that run before a Python block, and that the reader does not see
    <!-- snippet: exit=1 -->     the exit code that a shell block or a block of tests ends with (default: 0)
    <!-- snippet: written -->    the block of a file with tests is written, and run by a later block
    <!-- snippet: not run, R --> the block is not run, for the reason R
    <!-- output -->              the text block after it is what the block before it prints
    <!-- output: from PREFIX --> of that, the first line that starts with PREFIX and the indented lines below it
    <!-- output: lines PREFIX --> of that, the lines that start with PREFIX, without it
    <!-- output: first N -->     of that, the first N lines
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "docs" / "examples" / "project"
"""A small repository with the package `my_package`, which every page starts from."""

PROGRAMS = {
    "ampcheck": "-m ampcheck",
    "pytest": "-m pytest",
    "python": "",
    "torchrun": "-m torch.distributed.run",
}
"""The programs that a shell block may call, as arguments of the Python that runs the tests."""

_COMMENT = re.compile(r"^<!-- (?P<key>snippet|output|setup|\w+ command)(?:: (?P<value>.*?))? ?(?P<end>-->)?$")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?$")
_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Snippet:
    """A fenced block. line: of its first line, from 1. start, end: its lines in the page, fences left out.

    reason: why it is not run. setup: Python that runs first. output: for a text block, what it shows of the output.
    """

    page: Path
    start: int
    end: int
    language: str
    title: str
    code: str
    exit: int = 0
    reason: str = ""
    written: bool = False
    setup: str = ""
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.start + 1}"

    @property
    def runs(self) -> bool:
        """Whether a test runs it as it stands."""
        return not self.reason and self.language in ("python", "sh")

    @property
    def has_tests(self) -> bool:
        """Whether pytest runs it."""
        return re.search(r"^\s*def test_", self.code, re.MULTILINE) is not None


def pages() -> list[Path]:
    """README.md, every page of docs/ and the guide for agents."""
    apart = (ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md", ROOT / "ampcheck" / "cli" / "guide.md")
    return [*apart, *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[Snippet]:
    """The fenced blocks of a page. Raises `ValueError` for a fence or a comment that this module does not know."""
    return list(_snippets(page, page.read_text(encoding="utf-8").splitlines()))


def _snippets(page: Path, lines: list[str]) -> Iterator[Snippet]:
    notes: dict[str, str] = {}
    number = 0
    while number < len(lines):
        line = lines[number].strip()
        if comment := _COMMENT.match(line):
            value = [comment["value"] or ""]
            while not line.endswith("-->"):
                number += 1
                line = lines[number]
                value += [line] if line != "-->" else []
            notes[comment["key"]] = "\n".join(value)
        elif line.startswith("```"):
            fence = _FENCE.match(lines[number])
            if fence is None:
                raise ValueError(f'{page}:{number + 1}: a fence needs a language, and title="FILE" at most: {line}')
            start = number + 1
            while lines[number + 1].strip() != "```":
                number += 1
            number += 1
            indent = len(fence["indent"])
            code = "".join(f"{text[indent:]}\n" for text in lines[start:number])
            snippet = Snippet(page, start, number, fence["language"], fence["title"] or "", code)
            yield _noted(snippet, notes)
            notes = {}
        elif line:
            notes = {}
        number += 1


def _noted(snippet: Snippet, notes: dict[str, str]) -> Snippet:
    for key, value in notes.items():
        if key == "setup":
            snippet = replace(snippet, setup=value.strip("\n") + "\n")
        elif key == "output":
            snippet = replace(snippet, output=value)
        elif value.startswith("not run, "):
            snippet = replace(snippet, reason=value.removeprefix("not run, "))
        elif value == "written":
            snippet = replace(snippet, written=True)
        elif value.startswith("exit="):
            snippet = replace(snippet, exit=int(value.removeprefix("exit=")))
        elif key.endswith(" command"):
            snippet = replace(snippet, reason=f"the {key}, which continuous integration runs")
        else:
            raise ValueError(f"{snippet}: unknown comment {key}: {value}")
    return snippet


@dataclass(frozen=True)
class Result:
    """What a snippet did: its exit code, what it printed, and what it wrote to stderr."""

    snippet: Snippet
    exit: int
    text: str
    errors: str = ""

    @property
    def failed(self) -> bool:
        return self.exit != self.snippet.exit

    def __str__(self) -> str:
        return f"{self.snippet} ended with {self.exit}:\n{self.text}\n{self.errors}"


def run_page(page: Path, folder: Path) -> tuple[list[Result], list[tuple[Snippet, str]]]:
    """Run the snippets of a page in a new repository at `folder`.

    Returns the result of each, up to the first that failed, and each block of output with what it should show.
    """
    session = Session(folder)
    results: list[Result] = []
    shown: list[tuple[Snippet, str]] = []
    for number, snippet in enumerate(snippets(page)):
        if snippet.output is not None:
            shown.append((snippet, excerpt(results[-1].text, snippet.output)))
            continue
        if snippet.language == "diff":
            session.change(snippet)
        elif snippet.title and not snippet.reason:
            session.write(snippet.title, snippet.setup + snippet.code)
        if not snippet.runs or snippet.written or (snippet.title and not snippet.has_tests):
            continue
        results.append(session.run(snippet, number))
        if results[-1].failed:
            break
    return results, shown


class Session:
    """A repository in a folder, with `my_package`, one commit and the branch origin/main, in which snippets run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        programs = folder / "bin"
        programs.mkdir(parents=True)
        python = shlex.quote(sys.executable)
        for name, arguments in (
            ("ampcheck", "-m ampcheck"),
            ("pytest", "-m pytest"),
            ("python", ""),
            ("torchrun", "-m torch.distributed.run"),
        ):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {python} {arguments} "$@"\n', encoding="utf-8")
            program.chmod(0o755)
        author = {f"GIT_{who}_{what}": "docs" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))},
            **author,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]),
            "COLUMNS": "80",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "GIT_CONFIG_GLOBAL": os.devnull,
        }
        for source in sorted(PROJECT.rglob("*.py")):
            self.write(str(source.relative_to(PROJECT)), source.read_text(encoding="utf-8"))
        self._shell("git init -q -b main && git add -A && git commit -q -m start")
        self._shell("git update-ref refs/remotes/origin/main HEAD")

    def write(self, name: str, text: str) -> None:
        """Write a file of the repository."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def change(self, snippet: Snippet) -> None:
        """Apply a diff, whose hunks need no numbers. Raises `ValueError` where the file lacks what it replaces."""
        text = (self.folder / snippet.title).read_text(encoding="utf-8")
        for hunk in re.split(r"^@@\n", snippet.code, flags=re.MULTILINE):
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if not line.startswith("+"))
            if text.count(before) != 1:
                raise ValueError(f"{snippet}: {snippet.title} must contain once:\n{before}")
            text = text.replace(before, "".join(line[1:] for line in lines if not line.startswith("-")))
        self.write(snippet.title, text)

    def run(self, snippet: Snippet, number: int) -> Result:
        """Run a block as its language asks for."""
        if snippet.language == "sh":
            done = self._shell(snippet.code, check=False)
        else:
            name = snippet.title or f"{'test_' if snippet.has_tests else ''}snippet_{number}.py"
            if not snippet.title:
                self.write(name, snippet.setup + snippet.code)
            command = "pytest -q -p no:cacheprovider" if snippet.has_tests else "python"
            done = self._shell(f"{command} {shlex.quote(name)}", check=False)
        text = "\n".join(line.rstrip() for line in done.stdout.splitlines())
        return Result(snippet, done.returncode, text.replace(str(self.folder), "."), done.stderr)

    def _shell(self, code: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        self.folder.mkdir(exist_ok=True)
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=900,
            check=check,
        )


def excerpt(text: str, part: str) -> str:
    """The part of an output that a page shows. Raises `ValueError` where the output lacks it."""
    lines = text.strip("\n").splitlines()
    if part.startswith("first "):
        return "\n".join(lines[: int(part.removeprefix("first "))])
    if part.startswith("lines "):
        prefix = part.removeprefix("lines ") + " "
        return textwrap.dedent("\n".join(line[len(prefix) :] for line in lines if line.startswith(prefix)))
    if part.startswith("from "):
        prefix = part.removeprefix("from ")
        starts = [number for number, line in enumerate(lines) if line.startswith(prefix)]
        if not starts:
            raise ValueError(f"no line starts with {prefix!r} in:\n{text}")
        end = starts[0] + 1
        while end < len(lines) and lines[end].startswith(" "):
            end += 1
        return "\n".join(lines[starts[0] : end])
    return "\n".join(lines)


def in_essence(text: str) -> str:
    """A text without its numbers, wraps and rules: two runs of one command agree in the rest."""
    text = re.sub(r"[─━-]{3,}|…", " ", _NUMBER.sub("#", text))
    return " ".join(text.split())


def with_outputs(page: Path, shown: list[tuple[Snippet, str]]) -> str:
    """The text of a page with its blocks of output replaced."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for snippet, text in sorted(shown, key=lambda pair: -pair[0].start):
        if in_essence(text) != in_essence(snippet.code):
            lines[snippet.start : snippet.end] = text.splitlines()
    return "\n".join(lines) + "\n"
