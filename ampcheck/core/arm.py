"""Arms: the ways in which one subject runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

POLICY = "policy"
"""The mode of an arm in which autocast's rules are judged, and no values."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a subject; `str` gives what findings show in brackets, such as `float16, eager`.

    dtype: of autocast, or of the weights where the model is `native`, kept in 16 bits. mode: `eager`, `compiled` (by
    `backend`, which is empty for Inductor) or `policy`. device: the device type whose policy is emulated or judged;
    release: the PyTorch that has this policy. Each is empty where it is not known, or the subject itself decides it.
    """

    dtype: str = ""
    mode: str = ""
    device: str = ""
    release: str = ""
    native: bool = False
    backend: str = ""

    def __bool__(self) -> bool:
        return self != Arm()

    def __str__(self) -> str:
        if self.mode == POLICY:
            words = [f"{self.device} {self.dtype}", "" if self.device == "cpu" else "emulated"]
        else:
            dtype = f"{self.dtype} native" if self.native else self.dtype
            words = [dtype, self.mode, f"{self.device} emulated" if self.device else ""]
        return ", ".join(filter(None, words)) + (f" by {self.backend}" if self.backend else "")


class ArmedName(str):
    """The name of a subject in one arm, from which findings take their `arm`; `armed` makes it."""

    arm: Arm


def armed(name: str, arm: Arm) -> str:
    """The name of a subject in an arm, as findings show it: `model [float16, eager]`."""
    if not arm:
        return name
    shown = ArmedName(f"{name} [{arm}]")
    shown.arm = arm
    return shown


def joined(arms: Iterable[Arm]) -> str:
    """Several arms as one: `float16 and bfloat16, eager`, or one after the other where they differ in more."""
    texts = tuple(dict.fromkeys(map(str, arms)))
    rows = [text.split(", ") for text in texts]
    columns = [list(dict.fromkeys(column)) for column in zip(*rows, strict=False)]
    aligned = len({len(row) for row in rows}) == 1 and sum(len(column) > 1 for column in columns) <= 1
    return ", ".join(map(" and ".join, columns)) if aligned else "; ".join(texts)
