"""Range and precision of a model in low precision, compared with float64. `ampcheck.audit` is the way in."""

from ampcheck.numerics.arm_format import native_format as native_format
from ampcheck.numerics.checks import CHECKS as CHECKS
from ampcheck.numerics.checks import check_numerics as check_numerics
from ampcheck.numerics.measure import Measured as Measured
from ampcheck.numerics.measure import measure_numerics as measure_numerics
from ampcheck.records.numerics import NumericsStats as NumericsStats
