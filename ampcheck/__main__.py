"""`python -m ampcheck`."""

import os
import sys
from contextlib import suppress

from ampcheck.cli.main import main

code = main()
if "RANK" in os.environ:  # under torchrun; threads of a process group that is still open may abort Python at its end
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
sys.exit(code)
