"""How companions follow an op that the same op on companions would not follow.

A rule runs once per side, after the real op: `rule(call, side)` returns the companions of the op's results, in the
structure of `call.out`, and writes those of the arguments that the op writes. In place of a result `None` means that
it restarts from its real values. An op without a rule runs on companions as it is.
"""

from ampcheck.shadow.rules import (  # noqa: F401  # importing a module registers its rules
    attention,
    decisions,
    foreach,
    indices,
    kinks,
    matmul,
    normalisation,
    randoms,
)
from ampcheck.shadow.rules.registry import RULES as RULES
from ampcheck.shadow.rules.registry import Rule as Rule
