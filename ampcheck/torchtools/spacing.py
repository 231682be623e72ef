"""The distance between neighbouring values of a format."""

from __future__ import annotations

import torch

from ampcheck.core.formats import FloatFormat


def spacing(values: torch.Tensor, form: FloatFormat) -> torch.Tensor:
    """The distance between neighbours of a format at float64 `values`, element by element.

    At zero and among subnormals it is the smallest subnormal number.
    """
    _, exponent = torch.frexp(values)  # of a mantissa in [0.5, 1); 0 for zero itself
    least = form.min_exponent + 1
    exponent = torch.where(values == 0, least, exponent).clamp(min=least)
    return torch.ldexp(torch.ones_like(values), exponent - 1 - form.mantissa_bits)
