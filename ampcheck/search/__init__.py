"""The search for inputs that break a model: drawn, aimed, climbed to, made small, and written down as a test."""

from ampcheck.records.property import PropertyStats as PropertyStats
from ampcheck.search.invariances import BatchOrder as BatchOrder
from ampcheck.search.invariances import Declared as Declared
from ampcheck.search.invariances import Invariance as Invariance
from ampcheck.search.invariances import Padding as Padding
from ampcheck.search.invariances import Scale as Scale
from ampcheck.search.invariances import Shift as Shift
from ampcheck.search.judge import assert_property as assert_property
from ampcheck.search.loop import SearchOptions as SearchOptions
