"""The parser of the command line, and its exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

from ampcheck.cli import (
    audit,
    baseline,
    bisect,
    blame,
    doctor,
    explain,
    history,
    init,
    known,
    lab,
    lint,
    parity,
    policy,
    report,
    search,
    show,
    speed,
    sweep,
    whatif,
)
from ampcheck.cli.interrupts import ending_of, sigterm_interrupts
from ampcheck.cli.output import EXIT_CODES, UNABLE, USAGE, outputs_of, require_writable
from ampcheck.core.errors import UsageError, brief, is_for_the_runner
from ampcheck.core.exit import kept_open, open_standard_files
from ampcheck.core.text import clean


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return one of `EXIT_CODES`."""
    open_standard_files()
    words = sys.argv[1:] if argv is None else list(argv)
    own = words.index("--") if words[:1] in (["audit"], ["baseline"]) and "--" in words else len(words)
    parser = _parser()
    options = parser.parse_args(words[:own], argparse.Namespace(arguments=tuple(words[own + 1 :])))
    if options.command is None:
        parser.print_help()
        return USAGE
    try:
        with sigterm_interrupts(), kept_open():
            if hasattr(options, "kind"):  # before anything is loaded
                require_writable(**outputs_of(options))
            code: int = options.command(options)
        return code
    except UsageError as error:
        print("ampcheck:", clean(str(error)).replace("\n", "\n  "), file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # `ampcheck explain | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as error:
        stopped, status = ending_of(error)
        print(f"ampcheck: {stopped}; nothing was written", file=sys.stderr)
        return status
    except BaseException as error:  # noqa: BLE001  # a crash must not read as findings, nor `sys.exit(0)` as a pass
        return _crashed(error)


def _crashed(error: BaseException) -> int:
    """Report an unexpected exception as one of the user's code or as a defect of ampcheck."""
    if is_for_the_runner(error):  # pytest.skip() and the like
        print(f"ampcheck: the subject raises {brief(error)}, which only a test runner understands", file=sys.stderr)
        return USAGE
    try:
        from ampcheck.torchtools.source import users_error

        print(f"ampcheck: {users_error(error, 'the subject')}", file=sys.stderr)
        return USAGE
    except BaseException:  # noqa: BLE001  # not the user's
        traceback.print_exception(error)
        text = "this is a defect of ampcheck, and nothing was judged: please report it with the traceback above"
        print(f"ampcheck: {brief(error)}; {text}", file=sys.stderr)
        return UNABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ampcheck",
        description="Is this model numerically safe under autocast and torch.compile?",
        epilog=EXIT_CODES,
    )
    parser.set_defaults(command=None)
    parser.add_argument("--version", action="version", version=f"ampcheck {version('ampcheck')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (
        *(init, doctor, audit, baseline, sweep, report, show, explain),
        *(parity, whatif, lint, known, blame, search, bisect, policy, speed, history, lab),
    ):
        command.add_command(commands)
    return parser
