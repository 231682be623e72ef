"""The examples of the checks: `docs/examples/checks/CHECK/failing.py`, `mended.py` and the finding in `finding.txt`.

The docstring of an example says in a sentence what it shows. That of `failing.py` ends with a line `Run: COMMAND`,
which runs both; COMMAND is `ampcheck audit failing.py:subject ...` or `pytest failing.py ...`. `python
docs/site/examples.py [CHECK ...]` writes the findings.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ampcheck.core.run import Finding, Run, Verdict, describe

HERE = Path(__file__).resolve().parents[1] / "examples" / "checks"
SIDES = ("failing", "mended")


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
    if not run.startswith(("ampcheck audit ", "ampcheck speed ", "ampcheck blame ", "pytest ", "torchrun ")):
        raise ValueError(f"the docstring of {check}/failing.py must end with a line 'Run: ampcheck audit ...'")
    return Example(text, code, run)


def finding_of(check: str) -> str:
    """The finding of the failing example, as it was printed."""
    return (HERE / check / "finding.txt").read_text(encoding="utf-8")


def run(check: str, side: str) -> list[Finding]:
    """Run one side; its failures and warnings by this check. Raises `RuntimeError` where nothing was judged."""
    words = shlex.split(example(check, side).run)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "run.json"
        for source in (HERE / check).glob("*"):
            if source.suffix in (".py", ".json", ".toml") and source.is_file():
                (Path(folder) / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        if words[0] == "pytest":
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--ampcheck-json={written}"]
        elif words[0] == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run"]
            words += ["--json", str(written)]
        else:
            command = [sys.executable, "-m", "ampcheck"]
            words += ["--json", str(written)]
        root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "PYTHONPATH": root, "COLUMNS": "80", "NO_COLOR": "1"}
        done = subprocess.run(
            [*command, *words[1:]],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        if not written.exists():
            raise RuntimeError(f"{check}/{side}.py judged nothing:\n{done.stdout}\n{done.stderr}")
        found = Run.load(written)
    judged = [finding for finding in found.findings if finding.check == check]
    if not judged:
        raise RuntimeError(f"{check}/{side}.py was not judged by {check}:\n{done.stdout}")
    return [finding for finding in judged if finding.verdict in (Verdict.FAIL, Verdict.WARN)]


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
