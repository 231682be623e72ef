"""Records and points such as a year of CI leaves, made of plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from ampcheck.core.run import Scalar
from ampcheck.records.history import History, Point
from ampcheck.records.speed import SpeedRecord

START = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
MACHINE: dict[str, Scalar] = {
    "device": "cpu (Test CPU, 2 logical cores)",
    "platform": "Linux-6.1.0",
    "threads": 2,
    "torch": "2.12.0",
    "python": "3.11.7",
}


def record(ratio: float = 1.25, name: str = "decode", **changed: Any) -> SpeedRecord:
    """A record of this ratio; what stands in `changed` and is no field of a record belongs to the fingerprint."""
    fields = {key: changed.pop(key) for key in ("arm", "reference", "precision", "low", "high") if key in changed}
    kept = {"arm": "compiled", "reference": "eager", "low": ratio * 0.99, "high": ratio * 1.01, **fields}
    return SpeedRecord(
        name=name, ratio=ratio, p05=ratio * 0.9, minimum=ratio * 0.8, noise=0.004, cycles=100,
        fingerprint={**MACHINE, **changed}, **kept,
    )  # fmt: skip


def day(number: int) -> datetime:
    return START + timedelta(days=number)


def commit(number: int) -> str:
    return f"{number:04d}".ljust(40, "a")


def history(ratios: Sequence[float], **changed: Any) -> History:
    """A history of one series, a point a day, each of a commit of its own."""
    return History.of(Point(day(i), record(ratio, **changed), commit(i), False) for i, ratio in enumerate(ratios))
