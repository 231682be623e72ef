"""The conditions under which two timings are comparable: the hardware, and the versions that generate the code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from ampcheck.core.environment import environment
from ampcheck.core.run import Scalar

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
KEYED = ("device", "threads", *VERSIONS)
"""The parts of the environment on which a time depends, besides the measured code."""


def fingerprint(device: str = "cpu") -> dict[str, Scalar]:
    """The hardware and the versions of this process. Imports torch."""
    known = environment(device)
    return {name: known[name] for name in KEYED if name in known}


def hardware_of(known: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The part of a fingerprint that never changes within a series of the history.

    Of the platform this is the system alone: runners change the kernel's release every week.
    """
    system = str(known.get("platform") or "").partition("-")[0]
    return {"device": known.get("device"), "system": system, "threads": known.get("threads")}


def differences(before: Mapping[str, Scalar], after: Mapping[str, Scalar]) -> list[str]:
    """The differences of two fingerprints, a clause each; empty where timings are comparable."""
    return [
        f"{name}: {before.get(name, 'unknown')} and {after.get(name, 'unknown')}"
        for name in KEYED
        if before.get(name) != after.get(name)
    ]


def key_of(known: Mapping[str, Scalar], precision: str = "float32") -> str:
    """Twelve hex digits of hardware, versions and precision: equal where timings may be compared."""
    return _digest({name: known.get(name) for name in KEYED}, precision)


def hardware_key(known: Mapping[str, Scalar], precision: str = "float32") -> str:
    """The same of the hardware alone, which keeps a series together across releases of torch."""
    return _digest(hardware_of(known), precision)


def _digest(parts: Mapping[str, Scalar], precision: str) -> str:
    text = json.dumps([*([name, value] for name, value in parts.items()), precision])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
