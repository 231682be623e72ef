"""What is left of the format inside a run: over every example, per op, in the op's own dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from searches import look, search

from ampcheck import assert_property
from ampcheck.core.run import Finding, Verdict, collect
from ampcheck.search import SearchOptions
from ampcheck.strategies import tensors

HALF = torch.float16


LARGEST: list[float] = []


def weighted(p: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Notes its probabilities where no copy is made of what it notes."""
    LARGEST.append(float(p.detach().amax()))
    return p * logits


def headroom(function: Any, inputs: Any, **kwargs: Any) -> Finding:
    """What the search says of the headroom."""
    run = search(function, inputs, examples=12, **kwargs)
    (found,) = (f for f in run.findings if f.check == "headroom")
    return found


def test_the_largest_value_inside_counts_where_the_output_is_small() -> None:
    inputs = tensors("float16", shape=1, min_value=-250, max_value=250)
    found = headroom(lambda x: torch.tanh(x * x), inputs, domain=(-250, 250))
    assert found.verdict is Verdict.WARN
    assert "the largest value found is 62,496 at mul; 1x below the maximum of float16" in found.message


def test_memory_that_nothing_was_written_to_is_no_value() -> None:
    def filled(x: torch.Tensor) -> torch.Tensor:
        raw = torch.empty_like(x)
        raw.view(torch.int16).fill_(0x7BFF)  # what memory may hold: the largest float16
        again = torch.empty_like(x).set_(raw)
        return again.copy_(x) * 2

    assert look(filled, torch.tensor([3.0, 1.0], dtype=HALF)).peak.magnitude == 6.0


def test_a_mask_s_lowest_value_is_no_activation() -> None:
    def masked(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > 2, torch.finfo(x.dtype).min).softmax(-1)

    assert look(masked, torch.tensor([3.0, 1.0], dtype=HALF)).peak.magnitude == 1.0


def test_each_op_is_held_to_the_format_of_its_own_result() -> None:
    inputs = tensors("float16", shape=2, min_value=-4, max_value=4)
    found = headroom(lambda x: (x.float() * 1e6).tanh().half(), inputs)
    assert found.verdict is Verdict.PASS
    assert found.observed is not None
    assert found.observed > 1000


@pytest.mark.parametrize("domain", [None, (-100.0, 100.0)], ids=["drawn", "climbed"])
def test_an_overflow_that_is_clamped_away_is_told_with_its_op_and_line(domain: Any) -> None:
    def clamped(x: torch.Tensor) -> torch.Tensor:
        return (x * 1000).clamp(-1, 1)

    values = [1.0, 70.0] if domain is None else [1.0]
    inputs = tensors("float16", shape=1, elements=st.sampled_from(values))
    found = headroom(clamped, inputs, domain=domain)
    assert found.verdict is Verdict.WARN
    assert "mul makes an infinity" in found.message
    assert found.where.op.startswith("aten::mul")
    assert found.where.file.endswith("test_headroom.py")
    assert found.where.line == clamped.__code__.co_firstlineno + 1


def test_infinities_that_are_meant_are_no_overflow() -> None:
    def meant(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > 2, -torch.inf).softmax(-1) + (x - x).log().exp()

    assert look(meant, torch.tensor([3.0, 1.0], dtype=HALF)).overflow is None


def test_of_several_inputs_each_climbs_within_what_was_drawn_for_it() -> None:
    LARGEST.clear()
    inputs = st.tuples(
        tensors("float16", shape=1, min_value=0.25, max_value=0.75),
        tensors("float16", shape=1, min_value=-200, max_value=200),
    )
    assert_property(weighted, inputs=inputs, compile=False, options=SearchOptions(examples=12, domain=(-200.0, 200.0)))
    assert max(LARGEST) <= 0.75 * (1 + 2**-6)  # judges move inputs by a few roundings


def test_what_was_found_beyond_the_strategy_names_the_domain() -> None:
    inputs = tensors("float16", shape=1, min_value=-1, max_value=1)
    with collect() as runs, pytest.raises(AssertionError):
        assert_property(
            lambda x: x * x, inputs=inputs, compile=False, options=SearchOptions(examples=12, domain=(-1000.0, 1000.0))
        )
    (failed,) = runs[0].of(Verdict.FAIL)
    assert "by gradient ascent within |x| <= 1000, the declared domain, after" in failed.message
    assert f"after {runs[0].coverage.seen['examples']} of 12 examples" in failed.message


def test_a_mask_of_the_lowest_value_is_no_value_of_the_data_whatever_is_added_to_it() -> None:
    def masked(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return (x + hidden.to(x.dtype) * torch.finfo(x.dtype).min).softmax(-1)

    x, hidden = torch.tensor([3.0, 1.0], dtype=HALF), torch.tensor([False, True])
    assert look(masked, x, hidden).peak.share <= 3 / 65504
    assert look(lambda x: x * 2, torch.tensor([32752.0], dtype=HALF)).peak.share == 1.0
