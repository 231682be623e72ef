"""Rules by which companions follow an op that the same op on companions would not follow.

A rule runs once per side, after the real op: `rule(call, side)` returns the companions of the op's results, in the
structure of `call.out`. Those of arguments that the op writes may be returned as new tensors, or written in place. In
place of a result `None` means that it restarts from its real values, or, where the op wrote it, that it is not changed.
An op without a rule runs on companions unchanged.
"""

from ampcheck.shadow.rules import (  # noqa: F401  # importing a module registers its rules
    attention,
    convolution,
    decisions,
    indices,
    matrices,
    normalisation,
    quantized,
    randoms,
    recurrent,
)
from ampcheck.shadow.rules.higher import HIGHER as HIGHER
from ampcheck.shadow.rules.higher import composed as composed
