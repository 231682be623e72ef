"""`python -m ampcheck`."""

import os
import sys

from ampcheck.cli.main import main
from ampcheck.core.exit import exit_without_teardown

code = main()
if "RANK" in os.environ:  # under torchrun
    exit_without_teardown(code)
sys.exit(code)
