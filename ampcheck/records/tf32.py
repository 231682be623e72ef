"""Products in float32: the settings that change their precision, and operands that lost bits on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Scalar, Where

UNIT = format_of("float32").unit_roundoff

REFUSED = "set through fp32_precision"


@dataclass(frozen=True, slots=True)
class ProductError:
    """The relative error, in the Euclidean norm, of one float32 product compared with float64.

    name: `matmul`, `convolution` or `gradient of a linear layer`. terms: how many products each element sums.
    error: in unit roundoffs of float32 (2^-24).
    """

    name: str
    terms: int
    error: float

    @property
    def kind(self) -> str:
        """`matmul` or `convolution`."""
        return self.name if self.name in ("matmul", "convolution") else "matmul"


@dataclass(frozen=True, slots=True)
class ConfounderStats:
    """Settings outside the model that change the precision of float32, and the errors that were measured under them.

    flags: by their names in PyTorch. flushes: whether this thread flushes subnormals to zero on the CPU.
    """

    subject: str
    device: str
    flags: Mapping[str, Scalar]
    products: tuple[ProductError, ...]
    flushes: bool = False
    unmeasured: str = ""


def allowed_error(terms: int, limits: Limits) -> float:
    """The error that float32 explains of a product that sums `terms`, in its unit roundoffs.

    Roundings of random sign grow with the square root of their number (Higham, Accuracy and Stability, section 2.8);
    a fast algorithm (Winograd's) has a few times that. TF32 is some 4,000 away, bfloat16 30,000.
    """
    return 2 * limits.precision * math.sqrt(max(terms, 1))


@dataclass(frozen=True, slots=True)
class ReducedProduct:
    """A float32 product, at `where`, whose operands have lost mantissa bits of the float32 tensors that they were made
    from.

    bits: how many trailing mantissa bits are zero in all elements. error: of the product, against float64 of those
    tensors, relative, in the Euclidean norm, in unit roundoffs of float32; None where it was not computed again.
    terms: how many products an element of the result sums. calls: how often this line multiplied such operands.
    """

    where: Where
    bits: int
    terms: int
    error: float | None
    calls: int = 1


@dataclass(frozen=True, slots=True)
class OperandStats:
    """The float32 products of a function. raised: its exception, in one line."""

    subject: str
    products: int
    reduced: tuple[ReducedProduct, ...]
    raised: str = ""
