"""`python -m ampcheck`, and the command `ampcheck`."""

import os
import sys
from typing import NoReturn

from ampcheck.cli.main import main
from ampcheck.core.exit import exit_without_teardown, run_exit_handlers


def run() -> NoReturn:
    """Run one command and end the process with its exit code."""
    code = main()
    if "torch" in sys.modules:
        if "RANK" not in os.environ:  # under torchrun, threads of process groups may abort the process by then
            run_exit_handlers()
        exit_without_teardown(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
