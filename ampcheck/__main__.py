"""`python -m ampcheck`, and the command `ampcheck`."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from ampcheck.core.supervised import supervised


def run() -> NoReturn:
    """Run one command in a child process and end with its exit code."""
    sys.exit(supervised(_work))


def _work(hand_over: Callable[[int], None]) -> NoReturn:
    from ampcheck.cli.main import main
    from ampcheck.core.exit import exit_without_teardown, run_exit_handlers

    try:
        code = main()
    except SystemExit as end:  # of the parser, before anything else has run
        code = end.code if isinstance(end.code, int) else 0
    hand_over(code)
    if "torch" in sys.modules:
        if "RANK" not in os.environ:  # under torchrun, threads of process groups may abort the process by then
            run_exit_handlers()
        exit_without_teardown(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
