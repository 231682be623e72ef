"""Mistakes of mixed precision and compilation that are visible without running; see `ampcheck lint`."""

from ampcheck.lint.engine import fix as fix
from ampcheck.lint.engine import lint as lint
from ampcheck.lint.engine import rules as rules
