"""The search for inputs that break a model: drawn, aimed, climbed to, made small, and written down as a test."""

from ampcheck.parity.invariances import BatchOrder as BatchOrder
from ampcheck.parity.invariances import Declared as Declared
from ampcheck.parity.invariances import Invariance as Invariance
from ampcheck.parity.invariances import Padding as Padding
from ampcheck.parity.invariances import Scale as Scale
from ampcheck.parity.invariances import Shift as Shift
from ampcheck.records.property import PropertyStats as PropertyStats
from ampcheck.search.judge import assert_property as assert_property
from ampcheck.search.loop import SearchOptions as SearchOptions
