"""What is promised of two executions: honest ones agree, and what is planted is named at its op."""

from __future__ import annotations

import parity.usual_pairs  # noqa: F401  # registers its pairs
import pytest
from parity.pairs import PAIRS

from ampcheck.parity.calls import Side
from ampcheck.parity.compare import compare


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_judged_and_named(name: str) -> None:
    expected = PAIRS[name]
    a, b, args = expected.make()
    found = compare(Side("a", a, args), Side("b", b, args))
    assert found.outcome == expected.outcome, found
    assert expected.names in found.message, found
