"""Two executions that should agree: compared by bounds that follow from their own roundings."""

from ampcheck.parity.assert_kernel import assert_kernel as assert_kernel
from ampcheck.parity.assert_parity import assert_parity as assert_parity
from ampcheck.parity.circumstances import Batch as Batch
from ampcheck.parity.circumstances import Chunks as Chunks
from ampcheck.parity.circumstances import Circumstance as Circumstance
from ampcheck.parity.circumstances import Microbatches as Microbatches
from ampcheck.parity.circumstances import Permutation as Permutation
from ampcheck.parity.circumstances import Repeat as Repeat
from ampcheck.parity.circumstances import Threads as Threads
from ampcheck.parity.invariances import BatchOrder as BatchOrder
from ampcheck.parity.invariances import Declared as Declared
from ampcheck.parity.invariances import Invariance as Invariance
from ampcheck.parity.invariances import Padding as Padding
from ampcheck.parity.invariances import Scale as Scale
from ampcheck.parity.invariances import Shift as Shift
from ampcheck.parity.tokens import Tokens as Tokens
