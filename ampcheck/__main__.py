"""`python -m ampcheck`."""

import sys

from ampcheck.cli.main import main

sys.exit(main())
