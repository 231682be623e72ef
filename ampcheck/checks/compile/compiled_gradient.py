"""Requires: Gradients of weights and inputs of compiled code are as close to float64 as rounding allows, and no op of
the backward pass computes in 16 bits that eager mode computes in float32.

Measured: As compiled-error, each gradient as a whole; of one that the data hardly determine, what is small beside the
norm of the whole gradient is no error. Gradients may differ by the few elements on whose side of a kink (relu) a
rounding decides.

Causes: AOTAutograd traces the backward pass under the autocast of the forward call, which eager mode has left by then:
code that the author runs in float32 is differentiated in 16 bits (pytorch/pytorch#153044, #179804). A counter that
forward changes and uses (#197039).

Fix: Set torch._functorch.config.backward_pass_autocast = 'off' where the finding says that it fixes it; enter autocast
inside the compiled region.
"""

from __future__ import annotations

from ampcheck.checks.compile import (
    GRADIENTS,
    results,
)
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.subject import EVERY
from ampcheck.records.accuracy import AccuracyStats

CHECK = Check(
    "compiled-gradient",
    "compile",
    __doc__,
    subjects=EVERY,
    needs=("AccuracyStats",),
    order=580,
    evidence=("diffusers/AutoencoderKL", "hf/VideoMAEForVideoClassification"),
)


def check(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Gradients are as near to float64 as rounding allows."""
    return results(stats, CHECK, GRADIENTS, limits)
