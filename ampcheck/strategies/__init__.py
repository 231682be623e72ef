"""Hypothesis strategies for the numbers, tensors and batches at which low precision breaks.

    from hypothesis import given
    from ampcheck.strategies import tensors

    @given(tensors("float16", min_value=-10, max_value=10))
    def test_softmax(x): ...

What fails shrinks to few and readable numbers, and is printed as code to paste: `torch.tensor([12.0], dtype=...)`.
"""

from ampcheck.strategies.literals import as_code as as_code
from ampcheck.strategies.literals import print_tensors_as_code
from ampcheck.strategies.realistic import cancelling_pairs as cancelling_pairs
from ampcheck.strategies.realistic import heavy_tails as heavy_tails
from ampcheck.strategies.realistic import log_uniform as log_uniform
from ampcheck.strategies.realistic import masks as masks
from ampcheck.strategies.realistic import outlier_channels as outlier_channels
from ampcheck.strategies.realistic import token_batches as token_batches
from ampcheck.strategies.tensors import LAYOUTS as LAYOUTS
from ampcheck.strategies.tensors import broadcastable as broadcastable
from ampcheck.strategies.tensors import shapes as shapes
from ampcheck.strategies.tensors import tensors as tensors
from ampcheck.strategies.values import values as values

print_tensors_as_code()
