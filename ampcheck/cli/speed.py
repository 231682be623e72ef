"""`ampcheck speed`: against a base revision, against eager mode, at start-up, or as a matrix. No numerics here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ampcheck.cli.output import Commands, add_output, finish, print_report, split_names
from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Progress
from ampcheck.core.run import Run
from ampcheck.core.subject import TARGET_FORMS, load_subject
from ampcheck.report import progress_bar

if TYPE_CHECKING:
    from ampcheck.speed.options import SpeedOptions


_TARGET = TARGET_FORMS

_OPTIONS: dict[str, tuple[Callable[[str], object], str | None, str]] = {
    "mode": (
        str,
        None,
        "torch.compile mode; a comma-separated list except with --base and --startup (default: 'default'; all modes "
        "with --matrix; the unmodified target with --base)",
    ),
    "precision": (
        str,
        None,
        "float32, tf32, float16 or bfloat16; a comma-separated list except with --base and --startup "
        "(default: float32; all four with --matrix)",
    ),
    "budget": (float, "S", "seconds of timed steps at most"),
    "at-least": (
        float,
        "RATIO",
        "minimum speedup over eager mode (without it a slower arm is a warning), or over the base with --base "
        "(default: 1)",
    ),
    "launches": (int, "N", "processes started per side with --base (default: 3)"),
    "launches-max": (int, "N", "maximum number of processes while the result is undecided (default: 8)"),
    "effect": (float, "SHARE", "smallest relative change that can fail (default: 0.03)"),
    "comparisons": (int, "N", "number of comparisons in the CI job; keeps the overall false-failure rate below 1 %%"),
}


def add_command(commands: Commands) -> None:
    """Add `speed` to the parser's commands."""
    speed = commands.add_parser(
        "speed",
        help="does torch.compile pay, and did a change make a model slower?",
        description="Time a target against another git revision (--base), its start (--startup), every mode and "
        "precision (--matrix), or else compiled against eager. All arms take turns block by block, and a verdict "
        "is PASS, FAIL or UNDECIDED with its interval. Exit code 0: nothing failed, UNDECIDED included; 1: something "
        "did; 2: usage error.",
    )
    speed.add_argument("target", nargs="?", metavar="TARGET", help=_TARGET)
    what = speed.add_mutually_exclusive_group()
    base = "compare the working tree with this commit, branch or tag: fails when it is slower"
    what.add_argument("--base", metavar="REV", help=base)
    what.add_argument("--startup", action="store_true", help="cold and warm starts, artifacts, and break-even")
    matrix = "every mode in every precision, with accuracy; all copies of the model are in memory at the same time"
    what.add_argument("--matrix", action="store_true", help=matrix)
    add_speed_options(speed, _OPTIONS)
    speed.add_argument("--device", default="cpu", help="device to run on; not emulated if missing (default: cpu)")
    add_output(speed, kind="speed", verbose="print every finding and every table")
    speed.set_defaults(command=_speed)


def add_speed_options(command: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add these options of a measurement."""
    for name in names:
        kind, metavar, text = _OPTIONS[name]
        command.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)


def speed_options(arguments: argparse.Namespace, names: Iterable[str]) -> SpeedOptions:
    """The options of a comparison with these of the command line. Raises `UsageError` for a value out of range."""
    from ampcheck.speed.options import SpeedOptions

    return SpeedOptions(**{name: value for name in names if (value := getattr(arguments, name)) is not None})


def _speed(arguments: argparse.Namespace) -> int:
    options = _options(arguments)

    with progress_bar() as progress:
        progress("loading torch and the target", 0, 1)
        run = _run(arguments, options, progress)
    tables = run.tables if arguments.verbose or arguments.base is None else (run.tables[0], *run.tables[2:])
    # A comparison of two revisions is short: the reason of an undecided one is printed in full.
    verbose = arguments.verbose or arguments.base is not None
    return finish(run, arguments, lambda: print_report(run, tables, verbose=verbose))


def _options(arguments: argparse.Namespace) -> SpeedOptions:
    """The options of the measurement. Raises `UsageError` for one that has no effect, before anything is loaded."""
    if arguments.target is None:
        what = ", and --matrix has no workloads of its own" if arguments.matrix else ""
        raise UsageError(f"a TARGET is required, {_TARGET}; found none{what}")
    kind = "matrix" if arguments.matrix else "startup" if arguments.startup else "arms"
    kind = kind if arguments.base is None else "base"
    names = ["budget", "effect", "comparisons", "launches", "launches_max"]
    if kind in ("base", "startup"):
        names += ["mode", "precision"]
        for name in ("mode", "precision"):
            if len(split_names(getattr(arguments, name))) > 1:
                raise UsageError(f"--{name} takes one name here; found {getattr(arguments, name)!r}")
    options = speed_options(arguments, names)
    options.require_used(kind)
    if arguments.at_least is not None and kind in ("matrix", "startup"):
        raise UsageError(f"--at-least has no effect with --{kind}: leave it out")
    return options


def _run(arguments: argparse.Namespace, options: SpeedOptions, progress: Progress) -> Run:
    target, device, at_least = arguments.target, arguments.device, arguments.at_least
    if arguments.base is not None:
        from ampcheck.speed.base.judge import judge_base

        limit = 1.0 if at_least is None else at_least
        return judge_base(target, arguments.base, options, at_least=limit, device=device, progress=progress)
    if arguments.startup:
        from ampcheck.speed.startup.judge import judge_startup

        return judge_startup(target, options, device=device, progress=progress)
    from ampcheck.speed.steps import EAGER, PRECISIONS, StepConfig

    modes, precisions = split_names(arguments.mode), split_names(arguments.precision)
    if arguments.matrix:
        from ampcheck.speed.matrix.judge import matrix_run
        from ampcheck.speed.matrix.measure import BUDGET, MATRIX_MODES, measure_matrix

        stats = measure_matrix(
            load_subject(target),
            modes=modes or MATRIX_MODES,
            precisions=precisions or tuple(PRECISIONS),
            device=device,
            budget=options.budget or BUDGET,
            progress=progress,
        )
        return matrix_run(stats)
    from ampcheck.speed.modes import compare_modes

    configs = [
        StepConfig(mode, precision)
        for precision in precisions or ["float32"]
        for mode in (EAGER, *(modes or ["default"]))
    ]
    return compare_modes(load_subject(target), configs, options, at_least=at_least, device=device, progress=progress)
