"""The values of a model place by place, as data, in a `Run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampcheck.core.charts import Band
from ampcheck.core.errors import UsageError

_EXPONENTS = 1100
"""Beyond the exponents of float64."""


@dataclass(frozen=True, slots=True)
class Site:
    """The values at one place of a model: the results of a module or op, or the gradients of a module's parameters.

    phase, module, op, file, line: as in `Where`; without `op` the module as a whole. amax, amin: largest finite and
    smallest nonzero magnitude; inputs, exact: largest magnitudes of the inputs, and of the same result in float64.
    nonfinite: elements that are inf or NaN. flushed: the share of elements that are zero and are not in float64.
    error, limit: relative to the norm in float64. bins: elements per power of two, from 2**first on. lost: the sort of
    damage that began here, empty where none did. What was not measured is None or empty.
    """

    phase: str
    module: str = ""
    op: str = ""
    file: str = ""
    line: int | None = None
    dtype: str = ""
    amax: float | None = None
    amin: float | None = None
    inputs: float | None = None
    exact: float | None = None
    nonfinite: int = 0
    flushed: float | None = None
    error: float | None = None
    limit: float | None = None
    first: int = 0
    bins: Sequence[int] = ()
    lost: str = ""


@dataclass(frozen=True, slots=True)
class ModelMap:
    """The sites of one run of a model, its modules in order of execution; `subject` is that of the findings about it.

    bands: intervals of exponents of two, such as the normal range of float16. Raises `UsageError` for bins of an
    exponent that no format has, and for negative counts.
    """

    subject: str
    sites: Sequence[Site]
    bands: Sequence[Band] = ()
    note: str = ""

    def __post_init__(self) -> None:
        for site in self.sites:
            last = site.first + len(site.bins)
            if not -_EXPONENTS <= site.first <= last <= _EXPONENTS or any(count < 0 for count in site.bins):
                place = f"the module {site.module!r:.40} in the map of {self.subject!r:.40}"
                raise UsageError(f"{place} must count elements of exponents between -{_EXPONENTS} and {_EXPONENTS}")
