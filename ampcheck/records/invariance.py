"""Record of the dependence of training on the loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Place: TypeAlias = "tuple[str, int | None]"

RETURNED = "what the step returns"


@dataclass(frozen=True, slots=True)
class Dependence:
    """Value that depends on the loss scale. what: it in words. name: of the parameter, if any. powers: those of each
    scale by which it is multiplied, empty for a sum of different degrees. place: the line that made it so."""

    what: str
    name: str
    step: int
    powers: tuple[float, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class InvarianceStats:
    """Dependence of training on the loss scale, as one run shows it.

    gradients: how many were judged. found: what depends on it. skipped: why nothing is judged; place: the line that
    prevents it; hint: what to change. penalty: the line where `torch.autograd.grad` gives gradients of a scaled loss
    for a penalty, if one does.
    """

    subject: str
    gradients: int = 0
    found: tuple[Dependence, ...] = ()
    skipped: str = ""
    place: Place = ("", None)
    hint: str = ""
    penalty: str = ""

    @property
    def invariant(self) -> bool | None:
        """True if gradients are equal at every scale; None where that was not seen."""
        if self.skipped or not self.gradients:
            return None
        return all(found.what == RETURNED for found in self.found)
