"""Floating-point formats: every fact is derived from a format's parameters.

Sources of the parameters: IEEE 754-2019 (float64, float32, float16); Google's bfloat16; NVIDIA's TF32; the OCP 8-bit
Floating Point Specification (OFP8) for float8_e4m3fn and float8_e5m2; Noune et al., arXiv:2206.02915, for the fnuz
formats; the OCP Microscaling Formats (MX) specification for float8_e8m0fnu and float4_e2m1fn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from ampcheck.core.errors import UsageError

if TYPE_CHECKING:
    import torch

Nan = Literal["ieee", "all-ones", "negative-zero", "none"]
Overflow = Literal["inf", "nan", "saturate"]


class Fields(NamedTuple):
    """The bit fields of a code: the exponent is biased, the mantissa lacks its implicit bit."""

    sign: int
    exponent: int
    mantissa: int


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    Values are Python floats (float64), which represent every value of every such format exactly; codes are
    non-negative integers below ``2**bits``, the sign bit on top.

    ``nan`` says which codes are NaN: ``"ieee"`` (exponent all ones, mantissa not zero; the format then has infinities
    too), ``"all-ones"`` (exponent and mantissa all ones), ``"negative-zero"`` (the code of -0) or ``"none"``.

    A format without mantissa bits (float8_e8m0fnu) has neither subnormals nor zero: its exponent field 0 is another
    power of two. Raises ``UsageError`` for parameters that contradict each other or reach beyond float64.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_inf: bool
    nan: Nan
    signed: bool = True

    def __post_init__(self) -> None:
        if self.nan not in get_args(Nan):
            raise UsageError(f"{self.name}: nan must be one of {', '.join(get_args(Nan))}; got {self.nan!r}.")
        if self.has_inf != (self.nan == "ieee"):
            raise UsageError(f"{self.name}: a format has infinities if and only if its nan is 'ieee'.")
        if self.nan == "negative-zero" and not self.signed:
            raise UsageError(f"{self.name}: an unsigned format has no negative zero to encode nan.")
        if self.exponent_bits < 1 or self.mantissa_bits < 0 or (self.nan == "ieee" and self.mantissa_bits == 0):
            raise UsageError(f"{self.name}: too few exponent or mantissa bits.")
        largest = self.fields(self._max_code).exponent - self.bias
        if self.mantissa_bits > 52 or self.min_exponent - self.mantissa_bits < -1074 or largest > 1023:
            raise UsageError(f"{self.name}: every value must fit in a float64.")

    @cached_property
    def bits(self) -> int:
        """Width of a code in bits: 19 for TF32, though it is stored in 32."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def has_subnormals(self) -> bool:
        """True if exponent field 0 encodes subnormals and zero, which takes mantissa bits."""
        return self.mantissa_bits > 0

    @property
    def has_nan(self) -> bool:
        """True if any code is NaN."""
        return self.nan != "none"

    @cached_property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value: ``smallest_normal == 2**min_exponent``."""
        return (1 if self.has_subnormals else 0) - self.bias

    @cached_property
    def _sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @cached_property
    def _inf_code(self) -> int:
        return self._sign_bit - (1 << self.mantissa_bits)

    @cached_property
    def _max_code(self) -> int:
        if self.has_inf:
            return self._inf_code - 1
        return self._sign_bit - (2 if self.nan == "all-ones" else 1)

    @property
    def _nan_code(self) -> int:
        if self.nan == "ieee":
            return self._inf_code | 1 << (self.mantissa_bits - 1)  # quiet, no payload: IEEE 754-2019, 6.2.1
        return self._sign_bit if self.nan == "negative-zero" else self._sign_bit - 1

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        return self.decode(self._max_code)

    @cached_property
    def smallest_normal(self) -> float:
        """Smallest positive value with full precision (``torch.finfo.tiny``)."""
        return math.ldexp(1.0, self.min_exponent)

    @cached_property
    def smallest_subnormal(self) -> float:
        """Smallest positive value; equal to ``smallest_normal`` where there are no subnormals."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @cached_property
    def eps(self) -> float:
        """Distance from 1 to the next larger value: the ULP at 1."""
        return self.ulp(1.0)

    @cached_property
    def unit_roundoff(self) -> float:
        """Bound on the relative error of rounding to nearest in the normal range: ``eps / 2`` (Higham 2002, 2.2)."""
        return self.eps / 2

    @property
    def decimal_digits(self) -> int:
        """Decimal digits that always survive a round trip from text to the format: ``FLT_DIG`` of ISO C11 5.2.4.2.2."""
        return math.floor(self.mantissa_bits * math.log10(2.0))

    @property
    def largest_exact_integer(self) -> int:
        """Largest n such that every integer from 1 to n is a value of the format."""
        return 1 << (self.mantissa_bits + 1)

    # Rounding to nearest is monotone, so the result of a cast is decided by thresholds on the wide value's magnitude.

    @cached_property
    def flushes_at(self) -> float:
        """Largest magnitude that rounds to zero; 0.0 where no other value does (float64, and a format without zero)."""
        return self.smallest_subnormal / 2 if self.has_subnormals else 0.0

    @property
    def subnormal_below(self) -> float:
        """Magnitudes strictly below round to a subnormal or to zero; 0.0 where the format has neither.

        The tie goes to the smallest normal value, whose significand is even.
        """
        return self.smallest_normal - self.smallest_subnormal / 2 if self.has_subnormals else 0.0

    @cached_property
    def overflows_at(self) -> float:
        """Smallest float64 magnitude that rounds beyond ``max``; infinity for float64.

        It is ``max`` plus half an ULP where ``max`` is odd, and the next float64 where ``max`` is even (float8_e4m3fn).
        Compare in float64: a float32 cannot represent the latter.
        """
        tie = self.max + self.ulp(self.max) / 2
        return tie if self._magnitude_code(tie) > self._max_code else math.nextafter(tie, math.inf)

    @property
    def overflow(self) -> Overflow:
        """The result for a value that rounds beyond ``max``: infinity, else NaN, else ``max`` ("saturate").

        IEEE 754-2019, 7.4, for formats with infinities; the non-saturating mode of OFP8 for the other 8-bit formats.
        PyTorch and ml_dtypes do the same, except that PyTorch's casts to float8_e4m3fn saturate since
        pytorch/pytorch#178817: ``encode`` and ``round`` with ``saturate=True``.
        """
        if self.has_inf:
            return "inf"
        return "saturate" if self.nan == "none" else "nan"

    def ulp(self, x: float) -> float:
        """Return the unit in the last place at ``x``, any float64: the spacing of the values in the binade of ``|x|``.

        At zero and below ``smallest_normal`` it is ``smallest_subnormal``; beyond ``max`` the spacing that more
        exponents would give; infinity at infinity and NaN at NaN, as in ``math.ulp``.
        """
        if not math.isfinite(x):
            return abs(x)
        return math.ldexp(1.0, self._exponent(x) - self.mantissa_bits)

    def fields(self, code: int) -> Fields:
        """Split a code into sign, biased exponent and mantissa. Raises ``UsageError`` for an invalid code."""
        code = index(code)  # a numpy integer would wrap around in the sums to come
        if not 0 <= code < 1 << self.bits:
            raise UsageError(f"A code of {self.name} is an integer from 0 to {(1 << self.bits) - 1}; got {code}.")
        exponent = code >> self.mantissa_bits & ((1 << self.exponent_bits) - 1)
        return Fields(int(code >= self._sign_bit), exponent, code & ((1 << self.mantissa_bits) - 1))

    def decode(self, code: int) -> float:
        """Return the exact value of a code; of a NaN only its sign. Raises ``UsageError`` for an invalid code."""
        sign, exponent, mantissa = self.fields(code)
        magnitude = exponent << self.mantissa_bits | mantissa
        if magnitude > self._max_code or (self.nan == "negative-zero" and code == self._nan_code):
            value = math.inf if self.has_inf and magnitude == self._inf_code else math.nan
        elif exponent == 0 and self.has_subnormals:
            value = math.ldexp(mantissa, self.min_exponent - self.mantissa_bits)
        else:
            value = math.ldexp(mantissa + (1 << self.mantissa_bits), exponent - self.bias - self.mantissa_bits)
        return -value if sign else value

    def encode(self, x: float, *, saturate: bool = False) -> int:
        """Return the code of a float64, rounded once, to nearest, ties to the even significand.

        Values that round beyond ``max``, infinities included, become what ``overflow`` says, or with ``saturate=True``
        ``max``, as in the saturating mode of OFP8. NaN becomes the quiet NaN of its sign; -0 becomes 0 where it has no
        code. A format without zero takes 0 to its smallest value (as PyTorch; ml_dtypes gives NaN); an unsigned format
        takes negative values to NaN (as ml_dtypes; PyTorch drops the sign).

        PyTorch and ml_dtypes cast a float64 through float32, so they can round twice, and to float8_e8m0fnu they round
        values between 2**-127 and 2**-126 up, where this rounds to the nearest.

        Raises ``UsageError`` for NaN where the format has none.
        """
        negative = math.copysign(1.0, x) < 0
        if math.isnan(x) or (x < 0 and not self.signed):
            if self.nan == "none":
                raise UsageError(f"{self.name} has no NaN: give it numbers only, or choose another format; got {x}.")
            code = self._nan_code
        else:
            code = self._magnitude_code(abs(x))
            if code > self._max_code:
                beyond = {"inf": self._inf_code, "nan": self._nan_code, "saturate": self._max_code}
                code = beyond["saturate" if saturate else self.overflow]
        if negative and self.signed and (code or self.nan != "negative-zero"):
            code |= self._sign_bit
        return code

    def round(self, x: float, *, saturate: bool = False) -> float:
        """Return the value of the format nearest to a float64: ``decode(encode(x))``.

        Hardware may round TF32 otherwise (PTX ``cvt.rna`` breaks ties away from zero).
        """
        return self.decode(self.encode(x, saturate=saturate))

    def _exponent(self, x: float) -> int:
        """Exponent e of the binade ``[2**e, 2**(e + 1))`` of finite ``|x|``, at least ``min_exponent``."""
        return max(math.frexp(x)[1] - 1, self.min_exponent) if x else self.min_exponent

    def _magnitude_code(self, magnitude: float) -> int:
        """Code of a magnitude with an unbounded exponent: a code beyond ``_max_code`` is an overflow."""
        if math.isinf(magnitude):
            return self._sign_bit
        exponent = self._exponent(magnitude)
        # Scaling by a power of two is exact, so this is the only rounding; Python's is to nearest even.
        significand = round(math.ldexp(magnitude, self.mantissa_bits - exponent))
        # Codes are in the order of the values: a significand that rounds up to 2.0 carries into the exponent.
        code = (exponent - self.min_exponent << self.mantissa_bits) + significand
        return code if self.has_subnormals else max(code - 1, 0)


FORMATS: Mapping[str, FloatFormat] = MappingProxyType(
    {
        f.name: f
        for f in (
            FloatFormat("float64", 11, 52, 1023, has_inf=True, nan="ieee"),
            FloatFormat("float32", 8, 23, 127, has_inf=True, nan="ieee"),
            FloatFormat("tf32", 8, 10, 127, has_inf=True, nan="ieee"),
            FloatFormat("bfloat16", 8, 7, 127, has_inf=True, nan="ieee"),
            FloatFormat("float16", 5, 10, 15, has_inf=True, nan="ieee"),
            FloatFormat("float8_e4m3fn", 4, 3, 7, has_inf=False, nan="all-ones"),
            FloatFormat("float8_e5m2", 5, 2, 15, has_inf=True, nan="ieee"),
            FloatFormat("float8_e4m3fnuz", 4, 3, 8, has_inf=False, nan="negative-zero"),
            FloatFormat("float8_e5m2fnuz", 5, 2, 16, has_inf=False, nan="negative-zero"),
            FloatFormat("float8_e8m0fnu", 8, 0, 127, has_inf=False, nan="all-ones", signed=False),
            FloatFormat("float4_e2m1fn", 2, 1, 1, has_inf=False, nan="none"),
        )
    }
)

_ALIASES = {
    "double": "float64",
    "fp64": "float64",
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    **{name.partition("_")[2]: name for name in FORMATS if "_" in name},  # "e4m3fn"
    "float4_e2m1fn_x2": "float4_e2m1fn",  # the dtype in which PyTorch packs two codes into a byte
}


def format_of(dtype: torch.dtype | str | FloatFormat) -> FloatFormat:
    """Return the format of a torch dtype, of a name ("float16", "torch.float16") or alias ("half", "bf16", "e4m3fn").

    Raises ``UsageError``, listing the valid names, for everything else.
    """
    if isinstance(dtype, FloatFormat):
        return dtype
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in FORMATS:
        raise UsageError(f"A floating-point format is one of {', '.join(FORMATS)}; got {dtype!r}.")
    return FORMATS[name]


_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def format_of_values(dtype: str) -> FloatFormat:
    """Return the format of the numbers that a tensor of a dtype holds: of a complex dtype, that of its parts."""
    return format_of(_PARTS.get(dtype, dtype))


_COLUMNS = {
    "name": "name",
    "bits": "bits",
    "exponent": "exponent_bits",
    "mantissa": "mantissa_bits",
    "max": "max",
    "smallest normal": "smallest_normal",
    "smallest subnormal": "smallest_subnormal",
    "eps": "eps",
    "decimal digits": "decimal_digits",
    "inf": "has_inf",
    "nan": "has_nan",
    "overflow": "overflow",
}


def table() -> list[dict[str, str | int | float | bool]]:
    """Return one row of derived facts for each format, keyed by column heading, widest format first."""
    return [
        {heading: getattr(format_, attribute) for heading, attribute in _COLUMNS.items()}
        for format_ in FORMATS.values()
    ]
