"""What findings say of results beside their exact values, of eager and of compiled runs alike."""

from __future__ import annotations

from collections.abc import Sequence

from ampcheck.core.text import at_scale, counted
from ampcheck.records.results import ResultError


def lost_text(error: ResultError) -> str:
    """An output or loss with infinities or NaN that exact does not have."""
    name = "the loss" if error.kind == "loss" else f"output {error.name or '(the only one)'}"
    return (
        f"outputs must be finite where float64's are; {error.nonfinite:,} elements of {name} are inf or NaN in "
        f"{error.dtype}"
    )


def lost_gradients_text(bad: Sequence[ResultError], gradients: Sequence[ResultError], scale: float) -> str:
    """Gradients with infinities or NaN that exact does not have; backward runs from the last one to the first."""
    return (
        f"gradients must be finite where float64's are; {len(bad)} of {len(gradients)} are not, {at_scale(scale)}, "
        f"nearest to the loss {bad[-1].name}"
    )


def finite_gradients_text(count: int, scale: float) -> str:
    """All gradients are finite."""
    return f"{counted(count, 'gradients')} are finite where float64's are, {at_scale(scale)}"


def beyond_text(worst: ResultError, beyond: Sequence[ResultError], judged: Sequence[ResultError], limit: float) -> str:
    """Results of one kind that lie further from exact than rounding explains."""
    return (
        f"{worst.kind}s must lie within {limit:.2g} of float64; {worst} lies {worst.error:.2g} away, and {len(beyond)} "
        f"of {len(judged)} are beyond their limits; the data's own rounding explains {worst.seen.spread:.2g}"
    )


def within_text(worst: ResultError) -> str:
    """All results lie within their limits."""
    return f"at most {worst.error:.2g} from float64, in {worst}"
