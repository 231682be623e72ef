"""`ampcheck lab`: run experiments by name; show their results as text, as a page and as JSON."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ampcheck.cli.output import Commands, Stdout, add_output, finish, outputs_of
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run
from ampcheck.report import print_tables, progress_bar
from ampcheck.report.sections import headline
from ampcheck.report.text import wrap
from ampcheck.tools.lab.registry import EXPERIMENTS, Experiment, experiments_of, quiet

_BEFORE_TORCH = {
    "HF_HUB_OFFLINE": "1",  # pretrained models are read from the cache, never downloaded
    # Output to stderr that no logging filters: of PyTorch's C++, and of Inductor for each autotuning.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCHINDUCTOR_AUTOTUNE_NUM_CHOICES_DISPLAYED": "0",
    "TORCHINDUCTOR_MAX_AUTOTUNE_REPORT_CHOICES_STATS": "0",
}
"""Variables that libraries read when they are imported; values of the user stay."""

_NEGATIVE = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
"""argparse accepts -1 and -0.5 as numbers, and takes -1e-5, -inf and -0x1p3 for options."""


def add_command(commands: Commands) -> None:
    """Add `lab` to the parser's commands."""
    lab = commands.add_parser(
        "lab",
        help="run the classic experiments of mixed precision on this machine",
        description="Run the classic experiments of mixed precision on this machine, all or some of them, and compare "
        "the results with the expected ones. Exit code 0: nothing failed; 1: an experiment failed, or nothing was "
        "judged; 2: usage error.",
    )
    lab.add_argument("names", nargs="*", metavar="NAME", help="an experiment, see --list; default: all of them")
    lab.add_argument("--list", action="store_true", help="list the experiments and run none")
    lab.add_argument("--device", default="cpu", help="device to run on (default: cpu)")
    lab.add_argument(
        "--value",
        action="append",
        metavar="X",
        help="with anatomy: the bits of this number only, such as 0.1, -1e-5, 0x1.8p3, inf or nan; may be repeated",
    )
    lab._negative_number_matcher = _NEGATIVE  # argparse has no public way to define negative numbers
    lab.add_argument("--full", action="store_true", help="longer runs, larger models, more modes")
    add_output(lab, kind="lab", verbose="print every table")
    lab.set_defaults(command=_lab)


def _lab(options: argparse.Namespace) -> int:
    if options.list:
        if options.value or options.full or outputs_of(options):
            raise UsageError("--list runs no experiment: leave --value, --full and the options of files out")
        width = max(len(experiment.name) for experiment in EXPERIMENTS) + 2
        with Stdout() as out:
            for experiment in experiments_of(options.names):
                print(f"{experiment.name:{width}}{experiment.title}")
        return out.code()
    experiments_of(options.names)  # an unknown name is reported before torch is loaded
    if values := {text: _number(text) for text in options.value or ()}:
        return _dissect(values, options)
    for name, value in _BEFORE_TORCH.items():
        os.environ.setdefault(name, value)

    out = Stdout()
    with progress_bar() as progress, quiet():
        progress("loading torch", 0, 1)
        from ampcheck.tools.lab.lab import judged, run_lab

        def print_experiment(experiment: Experiment, run: Run) -> None:
            with out:
                _print(_summary(experiment, run))
                tables = [table for table in run.tables if table.check == experiment.check.slug]
                if tables and (options.verbose or options.names):
                    print()
                    # The note of the first table repeats the experiment's description.
                    print_tables([replace(t, note=t.note.removeprefix(experiment.about).strip()) for t in tables])

        run = run_lab(
            options.names, device=options.device, full=options.full, progress=progress, ended=print_experiment
        )

    lines = ["", f"{run.title}: {headline(run)}", f"looked at {run.coverage}"]
    if not judged(run):
        lines.append("Nothing passed: every requested experiment was skipped, for the reasons above (exit code 1).")
    return finish(run, options, lambda: _print(lines), failed=run.failed or not judged(run), out=out)


def _number(text: str) -> float:
    """A number as in Python, or in hexadecimal. Raises `UsageError` for any other text and beyond float64's range."""
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
            f"--value {text} lies beyond {sys.float_info.max:.4g}, the largest number of float64, from which the "
            "other formats are rounded; write inf for infinity"
        )
    digits = lower.partition("0x")[2].partition("p")[0] if hexadecimal else lower.partition("e")[0]
    if value == 0 and any(int(digit, 16) for digit in digits if digit.isalnum()):
        raise UsageError(
            f"--value {text} rounds to zero in float64, from which the other formats are rounded: its smallest number "
            f"is {math.ulp(0.0):.4g}; write 0 for zero"
        )
    return value


def _dissect(values: dict[str, float], options: argparse.Namespace) -> int:
    if set(options.names) != {"anatomy"}:
        raise UsageError("--value dissects a number: write ampcheck lab anatomy --value X")
    if options.full:
        raise UsageError("--full makes experiments longer, and --value runs none: leave one of them out")
    from ampcheck.tools.lab.anatomy import dissect

    run = dissect(values, device=options.device)

    def show() -> None:
        print_tables(run.tables)
        _print(f"{finding.verdict}: {finding.message}" for finding in run.findings)

    return finish(run, options, show)


def _summary(experiment: Experiment, run: Run) -> Iterator[str]:
    """Title, description, and each finding."""
    yield from ("", f"{experiment.title} ({experiment.name})", experiment.about)
    for finding in run.by(experiment.check.slug):
        verdict = "FAIL" if finding.verdict.value == "fail" else finding.verdict.value
        yield f"  {verdict}: {finding.message}" + (f"; {finding.hint}" if finding.hint else "")


def _print(lines: Iterable[str]) -> None:
    from rich.console import Console

    width = max(Console().width, 40)
    for line in lines:
        indent = "  " if line.startswith("  ") else ""
        print("\n".join(wrap(line, width, indent=indent, hanging="    " if indent else "")) if line else "", flush=True)
