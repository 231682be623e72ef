"""`ampcheck speed`: against a base revision, against eager mode, at start-up, or as a matrix. No numerics here."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ampcheck.cli.output import add_output, finish, require_writable
from ampcheck.core.errors import UsageError

if TYPE_CHECKING:
    from ampcheck.core.progress import Progress
    from ampcheck.core.run import Run
    from ampcheck.speed.verdict import Rule


def add_command(commands: Any) -> None:
    """Add `speed` to the parser's commands."""
    speed = commands.add_parser(
        "speed",
        help="does torch.compile pay, and did a change make a model slower?",
        description="Time a target against another git revision (--base), its start (--startup), the matrix of modes "
        "and precisions (--matrix), or else compiled against eager. All arms take turns block by block, and a verdict "
        "is PASS, FAIL or UNDECIDED with its interval. Exit code 0: nothing failed, UNDECIDED included; 1: something "
        "did; 2: usage error.",
    )
    speed.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="package.module:factory or path/to/file.py:factory; --matrix alone has workloads of its own",
    )
    what = speed.add_mutually_exclusive_group()
    what.add_argument(
        "--base",
        metavar="REV",
        help="compare the working tree with this commit, branch or tag: fails when it is slower",
    )
    what.add_argument("--startup", action="store_true", help="cold and warm starts, artifacts, and break-even")
    what.add_argument(
        "--matrix",
        action="store_true",
        help="every mode in every precision, with the accuracy of each; each has a copy of the model, all at once",
    )
    speed.add_argument(
        "--mode",
        help="of torch.compile; several, separated by commas, without --base (default: default; with --base the "
        "target as it is; with --matrix every mode)",
    )
    speed.add_argument(
        "--precision",
        help="float32, tf32, float16 or bfloat16; several, separated by commas, without --base (default: "
        "float32; with --matrix all four)",
    )
    speed.add_argument("--size", help="of the matrix's own workloads: small (default) or large")
    speed.add_argument("--device", default="cpu", help="where to run; it must be there (default: cpu)")
    speed.add_argument("--budget", type=float, metavar="S", help="seconds of timed steps at most")
    speed.add_argument(
        "--at-least",
        type=float,
        metavar="RATIO",
        help="compiled against eager: fail unless each compiled arm is so many times as fast as eager mode; without "
        "it a slower one is a warning",
    )
    speed.add_argument("--launches", type=int, metavar="N", help="of each side, with --base (default: 3)")
    speed.add_argument(
        "--launches-max", type=int, metavar="N", help="go on to so many while nothing is decided (default: 8)"
    )
    speed.add_argument("--effect", type=float, help="a change below this share counts for nothing (default: 0.03)")
    speed.add_argument(
        "--comparisons",
        type=int,
        metavar="N",
        help="how many such comparisons the whole job makes, so that together 1 %% at most fail without a cause",
    )
    speed.add_argument("--markdown", metavar="PATH", help="write a comment for a pull request")
    add_output(speed, verbose="print every finding and every table")
    speed.set_defaults(command=_speed)


def _speed(options: argparse.Namespace) -> int:
    _require_sense(options)
    require_writable(html=options.html, json=options.json, markdown=options.markdown)

    from rich.console import Console

    from ampcheck.core.files import write_atomically
    from ampcheck.report import print_run, print_tables, progress_bar
    from ampcheck.speed.base.comment import comment_of

    with progress_bar() as progress:
        progress("loading torch and the target", 0, 1)
        run = _measured(options)(options, progress)
    console = Console()

    def show() -> None:
        # Of two revisions there is little to say: why nothing was decided is told in full.
        print_run(run, console, verbose=options.verbose or options.base is not None)
        console.print()
        print_tables(run.tables if options.verbose or options.base is None else [run.tables[0], *run.tables[2:]])

    return finish(run, options, show, more={"markdown": lambda path: write_atomically(path, comment_of(run))})


def _require_sense(options: argparse.Namespace) -> None:
    """Raise `UsageError` for options that the rest of the line leaves without a meaning, before anything is loaded."""
    if options.budget is not None and not 0 < options.budget < math.inf:
        raise UsageError(f"--budget is seconds of measurement, above 0; found {options.budget:g}")
    if options.target is None and not options.matrix:
        raise UsageError("a TARGET is required, package.module:factory or path/to/file.py:factory")
    given = {
        "--launches": options.launches,
        "--launches-max": options.launches_max,
        "--at-least": options.at_least,
        "--effect": options.effect,
        "--comparisons": options.comparisons,
        "--size": options.size,
    }
    plain = options.base is None and not options.startup and not options.matrix
    heeded = {
        "--launches": options.base is not None,
        "--launches-max": options.base is not None,
        "--at-least": plain,
        "--effect": plain or options.base is not None,
        "--comparisons": plain or options.base is not None,
        "--size": options.matrix and options.target is None,
    }
    for name, value in given.items():
        if value is not None and not heeded[name]:
            raise UsageError(f"{name} is not heeded here: leave it out, or ampcheck speed --help says where it belongs")


def _measured(options: argparse.Namespace) -> Callable[[argparse.Namespace, Progress], Run]:
    if options.base is not None:
        return _against_base
    if options.startup:
        return _startup
    return _matrix if options.matrix else _against_eager


def _against_base(options: argparse.Namespace, progress: Progress) -> Run:
    from ampcheck.speed.base.judge import judge_base
    from ampcheck.speed.base.measure import BUDGET, LAUNCHES

    return judge_base(
        options.target,
        options.base,
        rule=_rule(options),
        mode=_one(options.mode, "--mode"),
        precision=_one(options.precision, "--precision"),
        device=options.device,
        budget=BUDGET if options.budget is None else options.budget,
        launches=LAUNCHES if options.launches is None else options.launches,
        launches_max=options.launches_max,
        progress=progress,
    )


def _startup(options: argparse.Namespace, progress: Progress) -> Run:
    from ampcheck.speed.startup.judge import startup_run
    from ampcheck.speed.startup.measure import measure_startup

    given = {
        "mode": _one(options.mode, "--mode"),
        "precision": _one(options.precision, "--precision"),
        "budget": options.budget,
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return startup_run(measure_startup(options.target, device=options.device, progress=progress, **chosen))


def _matrix(options: argparse.Namespace, progress: Progress) -> Run:
    from ampcheck.core.subject import load_subject
    from ampcheck.speed.matrix.judge import matrix_run
    from ampcheck.speed.matrix.measure import measure_matrix

    given = {
        "modes": _several(options.mode) or None,
        "precisions": _several(options.precision) or None,
        "budget": options.budget,
        "size": options.size,
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    subject = load_subject(options.target) if options.target is not None else None
    return matrix_run(measure_matrix(subject, device=options.device, progress=progress, **chosen))


def _against_eager(options: argparse.Namespace, progress: Progress) -> Run:
    """Every mode in every precision against eager mode in the first precision, in this process."""
    from ampcheck.core.subject import load_subject
    from ampcheck.speed.modes import judge_ways
    from ampcheck.speed.paired import BUDGET
    from ampcheck.speed.steps import EAGER, Way
    from ampcheck.speed.verdict import EFFECT

    precisions, modes = _several(options.precision) or ["float32"], _several(options.mode) or ["default"]
    ways = [Way(mode, precision) for precision in precisions for mode in (EAGER, *modes)]
    subject = load_subject(options.target)
    return judge_ways(
        subject,
        ways,
        at_least=options.at_least,
        effect=EFFECT if options.effect is None else options.effect,
        comparisons=options.comparisons,
        device=options.device,
        budget=BUDGET if options.budget is None else options.budget,
        progress=progress,
    )


def _rule(options: argparse.Namespace) -> Rule:
    from ampcheck.speed.verdict import EFFECT, Rule

    effect = EFFECT if options.effect is None else options.effect
    return Rule(1.0, effect, 1 if options.comparisons is None else options.comparisons)


def _several(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _one(text: str | None, option: str) -> str | None:
    parts = _several(text)
    if len(parts) > 1:
        raise UsageError(f"{option} is one here; found {text!r}")
    return parts[0] if parts else None
