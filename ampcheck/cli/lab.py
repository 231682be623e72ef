"""`ampcheck lab`: the experiments by name, what they saw as text, a page and JSON. No numerics here."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ampcheck.cli.output import Stdout, add_output, finish, require_writable
from ampcheck.core.errors import UsageError
from ampcheck.lab.registry import EXPERIMENTS, Experiment, experiments_of, quiet

if TYPE_CHECKING:
    from ampcheck.core.run import Run

_BEFORE_TORCH = {
    "HF_HUB_OFFLINE": "1",  # a pretrained model is looked at where it lies, never downloaded
    # What writes to stderr past all logging: PyTorch's C++, and Inductor the results of each autotuning.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCHINDUCTOR_AUTOTUNE_NUM_CHOICES_DISPLAYED": "0",
    "TORCHINDUCTOR_MAX_AUTOTUNE_REPORT_CHOICES_STATS": "0",
}
"""Variables that libraries read when they are imported; what somebody else has set stays."""

_NEGATIVE = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
"""argparse knows -1 and -0.5, and takes -1e-5, -inf and -0x1p3 for options."""


def add_command(commands: Any) -> None:
    """Add `lab` to the parser's commands."""
    lab = commands.add_parser(
        "lab",
        help="see what mixed precision does on this machine: the classic experiments",
        description="Run the classic experiments of mixed precision on this machine, all of them or some, and tell "
        "what was expected and what came out. Exit code 0: nothing failed; 1: something did, or nothing was "
        "judged; 2: usage error.",
    )
    lab.add_argument("names", nargs="*", metavar="NAME", help="an experiment, see --list; without names all of them")
    lab.add_argument("--list", action="store_true", help="name the experiments and what they show, and run none")
    lab.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    lab.add_argument(
        "--value",
        action="append",
        metavar="X",
        help="with anatomy: the bits of this number alone, such as 0.1, -1e-5, 0x1.8p3, inf or nan; may be repeated",
    )
    lab._negative_number_matcher = _NEGATIVE  # argparse has no public way to say what a number is
    lab.add_argument("--full", action="store_true", help="longer runs, larger models, more modes")
    add_output(lab, verbose="print every table")
    lab.set_defaults(command=_lab)


def _lab(options: argparse.Namespace) -> int:
    if options.list:
        if options.value or options.full:
            raise UsageError("--list runs no experiment: leave --value and --full out")
        if options.html or options.json:
            raise UsageError("--list runs no experiment and has nothing to write: leave --html and --json out")
        width = max(len(experiment.name) for experiment in EXPERIMENTS) + 2
        with Stdout() as listed:
            for experiment in experiments_of(options.names):
                print(f"{experiment.name:{width}}{experiment.title}")
        return listed.code()
    experiments_of(options.names)  # an unknown name is told before torch is loaded
    values = {text: _number(text) for text in options.value or ()}
    if values and set(options.names) != {"anatomy"}:
        raise UsageError("--value takes a number apart: write ampcheck lab anatomy --value X")
    if values and options.full:
        raise UsageError("--full makes experiments longer, and --value runs none: leave one of them out")
    require_writable(html=options.html, json=options.json)
    if values:
        return _dissect(values, options)
    for name, value in _BEFORE_TORCH.items():
        os.environ.setdefault(name, value)

    from ampcheck.report import print_tables, progress_bar

    out = Stdout()
    with progress_bar() as progress, quiet():
        progress("loading torch", 0, 1)
        from ampcheck.lab.lab import judged, run_lab

        def ended(experiment: Experiment, run: Run) -> None:
            with out:
                _print(_told(experiment, run))
                held = [table for table in run.tables if table.check == experiment.check.slug]
                if not held or not (options.verbose or options.names):
                    return
                print()
                # Of a page the first table says what one sees; here it stands above.
                print_tables([replace(table, note=table.note.removeprefix(experiment.about).strip()) for table in held])

        run = run_lab(options.names, device=options.device, full=options.full, progress=progress, ended=ended)
    from ampcheck.report.sections import headline

    lines = ["", f"{run.title}: {headline(run)}", f"looked at {run.coverage}"]
    if not judged(run):
        lines.append("Nothing passed: every experiment asked for was skipped, for the reasons above (exit code 1).")
    return finish(run, options, lambda: _print(lines), failed=run.failed or not judged(run), out=out)


def _number(text: str) -> float:
    """A number as Python writes it, or in hexadecimal. Raises `UsageError` for what is none, or none of float64's."""
    lower = text.lower()
    hexadecimal = "0x" in lower
    try:
        value = float.fromhex(text) if hexadecimal else float(text)
    except OverflowError:
        value = math.inf
    except ValueError:
        raise UsageError(f"--value is a number, such as 0.1, -1e-5, 0x1.8p3, inf or nan; found {text!r}") from None
    if math.isinf(value) and "inf" not in lower:
        raise UsageError(
            f"--value {text} lies beyond {sys.float_info.max:.4g}, the largest number of float64, from which all "
            "others are made; write inf for infinity"
        )
    digits = lower.partition("0x")[2].partition("p")[0] if hexadecimal else lower.partition("e")[0]
    if value == 0 and any(int(digit, 16) for digit in digits if digit.isalnum()):
        raise UsageError(
            f"--value {text} rounds to zero in float64, from which all others are made: its smallest number is "
            f"{math.ulp(0.0):.4g}; write 0 for zero"
        )
    return value


def _dissect(values: dict[str, float], options: argparse.Namespace) -> int:
    from ampcheck.lab.anatomy import dissect
    from ampcheck.report import print_tables

    run = dissect(values, device=options.device)

    def show() -> None:
        print_tables(run.tables)
        _print(f"{finding.verdict}: {finding.message}" for finding in run.findings)

    return finish(run, options, show)


def _told(experiment: Experiment, run: Run) -> Iterator[str]:
    """Title, what one sees, and each finding."""
    yield ""
    yield f"{experiment.title} ({experiment.name})"
    yield experiment.about
    for finding in run.findings:
        if finding.check == experiment.check.slug:
            word = finding.verdict.upper() if finding.verdict.value == "fail" else finding.verdict.value
            yield f"  {word}: {finding.message}" + (f"; {finding.hint}" if finding.hint else "")


def _print(lines: Iterable[str]) -> None:
    from rich.console import Console

    from ampcheck.report.text import wrap

    width = max(Console().width, 40)
    for line in lines:
        indent = "  " if line.startswith("  ") else ""
        print("\n".join(wrap(line, width, indent=indent, hanging="    " if indent else "")) if line else "", flush=True)
