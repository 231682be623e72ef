"""`python -m ampcheck`."""

import sys

from ampcheck.cli import main

sys.exit(main())
