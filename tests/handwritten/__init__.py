"""Hand-written half precision: mistakes in low formats, each with its float32 twin, confirmed by plain float64 runs."""

from importlib import import_module

from handwritten.case import CASES as _REGISTERED
from handwritten.case import Case

FAMILIES = (
    "normalisation",
    "losses",
    "metrics",
    "attention",
    "positions",
    "schedules",
    "statistics",
    "geometry",
    "physics",
    "clipping",
    "optimizers",
    "samplers",
    "audio",
    "transforms",
    "mixed",
)

for _family in FAMILIES:
    import_module(f"handwritten.{_family}")

CASES: tuple[Case, ...] = tuple(_REGISTERED)

__all__ = ["CASES", "FAMILIES", "Case"]
