"""The numerical health of a tensor: statistics in one pass, read later, merged across tensors, steps and ranks."""

from ampcheck.health.measure import PendingHealth as PendingHealth
from ampcheck.health.measure import health_of as health_of
from ampcheck.health.measure import measure_health as measure_health
from ampcheck.records.health import TensorHealth as TensorHealth
from ampcheck.records.health import Unmeasured as Unmeasured
from ampcheck.torchtools.subnormals import SubnormalSupport as SubnormalSupport
from ampcheck.torchtools.subnormals import measure_subnormal_support as measure_subnormal_support
