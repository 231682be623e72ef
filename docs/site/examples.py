"""The examples of the checks: `docs/examples/checks/CHECK/failing.py`, `mended.py` and the finding in `finding.txt`.

The docstring of an example says in a sentence what it shows. That of `failing.py` ends with a line `Run: COMMAND`,
which runs both; COMMAND is `ampcheck audit failing.py:subject ...` or `pytest failing.py ...`. `python
docs/site/examples.py [CHECK ...]` writes the findings.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ampcheck.core.run import Finding, Run, Verdict, describe

HERE = Path(__file__).resolve().parents[1] / "examples" / "checks"
SIDES = ("failing", "mended")

_STARTS = "it starts fresh processes for minutes"
WITHOUT = {
    "cudagraph": "it needs a CUDA device",
    "speedup": "its verdict is a time of one machine; the guide to speed runs one",
    "regression": "it needs two commits; the guide to speed runs one",
    "start-up": _STARTS,
    "compile-time": _STARTS,
    "peak-memory": _STARTS,
}
"""Checks without an example, and why."""


@dataclass(frozen=True)
class Example:
    """One side of an example. text: what its docstring says. code: the file without its docstring. run: the command
    that runs it."""

    text: str
    code: str
    run: str


def documented() -> list[str]:
    """The checks that have an example."""
    return sorted(path.parent.name for path in HERE.glob("*/failing.py"))


def example(check: str, side: str) -> Example:
    """An example as its page shows it. Raises `ValueError` for a docstring without a command."""
    source = (HERE / check / f"{side}.py").read_text(encoding="utf-8")
    docstring = ast.parse(source).body[0]
    text = (ast.get_docstring(ast.parse(source)) or "").strip()
    code = "\n".join(source.splitlines()[docstring.end_lineno or 0 :]).strip("\n") + "\n"
    if side != "failing":
        return Example(text, code, example(check, "failing").run.replace("failing.py", f"{side}.py"))
    text, _, run = text.partition("\n\nRun: ")
    if not run.startswith(("ampcheck ", "pytest ", "torchrun ")):
        raise ValueError(f"the docstring of {check}/failing.py must end with a line 'Run: ampcheck audit ...'")
    return Example(text, code, run)


def finding_of(check: str) -> str:
    """The finding of the failing example, as it was printed."""
    return (HERE / check / "finding.txt").read_text(encoding="utf-8")


def run(check: str, side: str) -> list[Finding]:
    """Run one side; its failures and warnings by this check. Raises as `judged` does."""
    return [f for f in judged(check, side).findings if f.check == check and f.verdict in (Verdict.FAIL, Verdict.WARN)]


def judged(check: str, side: str) -> Run:
    """Run one side; what was found.

    Raises `RuntimeError` where nothing was judged, and where a mended example fails by whatever check.
    """
    program, *arguments = shlex.split(example(check, side).run)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in (HERE / check).iterdir():
            if source.suffix in (".py", ".json"):
                shutil.copy(source, folder)
            elif source.name == "goldens":
                shutil.copytree(source, folder / source.name)
        written = folder / "run.json"
        start = _in_this_process if program == "ampcheck" else _in_another
        code, printed = start(program, arguments, folder, written)
        if not written.exists() or code > (side == "failing"):
            raise RuntimeError(f"{check}/{side}.py ended with {code}:\n{printed}")
        return Run.load(written)


def _in_this_process(program: str, arguments: list[str], folder: Path, written: Path) -> tuple[int, str]:
    """`ampcheck` itself: to import torch takes longer than most examples run."""
    from ampcheck.cli.main import main as ampcheck

    before, path, printed = Path.cwd(), list(sys.path), io.StringIO()
    os.chdir(folder)
    linecache.clearcache()  # every example is called failing.py
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = ampcheck([*arguments, "--json", str(written)])
    finally:
        os.chdir(before)
        sys.path[:] = path
        for side in SIDES:
            sys.modules.pop(side, None)
    return code, printed.getvalue()


def _in_another(program: str, arguments: list[str], folder: Path, written: Path) -> tuple[int, str]:
    """A run of pytest or torchrun."""
    if program == "pytest":
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--ampcheck-json={written}", *arguments]
    else:
        command = ["-m", "torch.distributed.run", *arguments, "--json", str(written)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def write(check: str) -> str:
    """Write the first finding of the failing example; return what is wrong with the example, or nothing."""
    try:
        failing, mended = run(check, "failing"), run(check, "mended")
    except (RuntimeError, ValueError) as error:
        return f"{check}: {error}"
    if not failing:
        return f"{check}/failing.py yields no failure and no warning of {check}"
    (HERE / check / "finding.txt").write_text(describe(failing[0]) + "\n", encoding="utf-8")
    return f"{check}/mended.py still yields: {describe(mended[0])}" if mended else ""


def main(checks: list[str]) -> int:
    """Write the findings of these checks, or of all; report what goes wrong, and return 1 then."""
    complaints = [complaint for check in checks or documented() if (complaint := write(check))]
    print(*complaints, sep="\n")
    return len(complaints) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
