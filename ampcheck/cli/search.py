"""`ampcheck search`: inputs at which a model breaks in 16 bits. No numerics here."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from functools import partial

from ampcheck.cli.output import EXIT_CODES, USAGE, Commands, add_output, finish, print_report, split_names
from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Progress
from ampcheck.core.run import FAIL_ON, Finding, Run, merge
from ampcheck.core.settings import Settings, load_settings, resolve_limits
from ampcheck.outcome.accept import accept
from ampcheck.outcome.raising import with_commands
from ampcheck.report import progress_bar
from ampcheck.target import load_placed


def add_command(commands: Commands) -> None:
    """Add `search` to the parser's commands."""
    search = commands.add_parser(
        "search",
        help="search for inputs at which a model breaks in 16 bits",
        description="Draw inputs like those of the target, look for values and errors that 16 bits do not hold, and "
        f"make what breaks the model small. {EXIT_CODES}",
    )
    search.add_argument(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="package.module:function or path/to/file.py:function, which returns (model, args), whose shapes, dtypes "
        "and ranges are kept, or (model, strategy), with a Hypothesis strategy for the arguments",
    )
    search.add_argument(
        "--device",
        help="device to run on (default: cpu, or cuda where the target asks for it); one that this machine lacks is "
        "emulated",
    )
    search.add_argument(
        "--dtype",
        metavar="DTYPES",
        help="dtypes of autocast, separated by commas (default: float16,bfloat16); a 16-bit model is judged in its own",
    )
    search.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="judge compiled code on the inputs too"
    )
    search.add_argument(
        "--domain", metavar="LOW,HIGH", help="draw floating inputs from this range, and climb to large values inside"
    )
    for name, kind, text in (
        ("examples", int, "inputs for each dtype at most (default: 200)"),
        ("seconds", float, "seconds for each dtype; making a failure small may take half as many more (default: 60)"),
        ("seed", int, "the same seed gives the same search, as long as the seconds suffice (default: 0)"),
    ):
        search.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    search.add_argument("--reproduce", metavar="FOLDER", help="write a test there for each failure")
    add_output(search, kind="search")
    search.set_defaults(command=_search)


def _search(arguments: argparse.Namespace) -> int:
    settings = load_settings()
    domain = _domain(arguments.domain)
    with progress_bar() as progress:
        progress("loading torch and the target", 0, 1)
        runs = [_run(target, arguments, domain, settings, progress) for target in arguments.targets]
    run = replace(merge(runs), title=f"search of {len(runs)} targets") if len(runs) > 1 else runs[0]
    failed = any(run.of(verdict) for verdict in FAIL_ON[settings.fail_on])
    code = finish(run, arguments, partial(print_report, run, verbose=arguments.verbose), failed=failed)
    return code or (USAGE if any(finding.unjudged for finding in run.findings) else 0)


def _run(
    target: str,
    arguments: argparse.Namespace,
    domain: tuple[float, float] | None,
    settings: Settings,
    progress: Progress,
) -> Run:
    from ampcheck.autocast.asked import on_cpu_or_cuda
    from ampcheck.search.inputs import inputs_of
    from ampcheck.search.judge import judge_property
    from ampcheck.search.loop import SearchOptions

    given = {name: value for name in _BUDGET if (value := getattr(arguments, name)) is not None}
    options = SearchOptions(domain=domain, **given)  # raises for a value out of range, before anything runs

    def judge(device: str) -> Run:
        subject = load_placed(target, device)
        return judge_property(
            subject.model,
            inputs_of(subject, domain),
            device=device,
            dtype=None if arguments.dtype is None else split_names(arguments.dtype),
            compile=arguments.compile,
            options=options,
            limits=resolve_limits(None).with_(subject.limits, f"the subject {subject.name}"),
            name=subject.name,
            progress=progress,
        )

    run = on_cpu_or_cuda(judge, arguments.device)
    return with_commands(accept(run, settings), partial(_command_of, target, arguments))


_BUDGET = ("examples", "seconds", "seed", "reproduce")


def _domain(text: str | None) -> tuple[float, float] | None:
    """The range of `--domain`. Raises `UsageError` for anything but two numbers."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--domain takes two numbers, such as --domain=-10,10; found {text!r}") from None
    return low, high


def _command_of(target: str, arguments: argparse.Namespace, finding: Finding) -> str:
    """The command that finds this one again: in its dtype alone."""
    words = ["ampcheck", "search", target, *(["--dtype", finding.arm.dtype] if finding.arm.dtype else [])]
    words += ["--device", arguments.device] if arguments.device else []
    words += [] if arguments.compile else ["--no-compile"]
    words += [f"--domain={arguments.domain}"] if arguments.domain is not None else []
    words += [f"--{name}={value}" for name in _BUDGET[:3] if (value := getattr(arguments, name)) is not None]
    return shlex.join(words)
