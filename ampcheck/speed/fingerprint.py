"""What makes two timings comparable: the hardware, and the versions that generate the code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from ampcheck.core.environment import environment
from ampcheck.core.run import Scalar

HARDWARE = ("device", "threads")
VERSIONS = (
    "platform",
    "torch",
    "python",
    "CUDA",
    "triton",
    "float32 matmul precision",
    "TF32 in matmul",
    "TF32 in cuDNN",
)
KEYED = (*HARDWARE, *VERSIONS)
"""What of the environment a time depends on besides the code that is measured."""


def fingerprint(device: str = "cpu") -> dict[str, Scalar]:
    """The hardware and the versions of this process. Imports torch."""
    known = environment(device)
    return {name: known[name] for name in KEYED if name in known}


def differences(one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> list[str]:
    """In what two fingerprints differ, a sentence each; empty where timings are comparable."""
    return [
        f"{name}: {one.get(name, 'unknown')} and {other.get(name, 'unknown')}"
        for name in KEYED
        if one.get(name) != other.get(name)
    ]


def key_of(known: Mapping[str, Scalar], precision: str = "float32", *, only: tuple[str, ...] = KEYED) -> str:
    """Twelve hex digits that timings share when they may be compared: hardware, versions and precision.

    only: which parts of the fingerprint count; `HARDWARE` alone keeps a series together across releases of torch.
    """
    text = json.dumps([[name, known.get(name)] for name in only] + [precision])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
