"""Plain data of a speed measurement: seconds of each block, paired ratios, and the record that is stored."""

from __future__ import annotations

from ampcheck.core.environment import environment
from ampcheck.core.run import Scalar
from ampcheck.records.speed import KEYED


def fingerprint(device: str = "cpu") -> dict[str, Scalar]:
    """The hardware and the versions of this process. Imports torch."""
    known = environment(device)
    return {name: known[name] for name in KEYED if name in known}
