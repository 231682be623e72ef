"""No verdict without evidence: what was not judged, and why, is told, and never passes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from searches import search

from ampcheck import UsageError
from ampcheck.checks import findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where, collect
from ampcheck.records.property import Peak, PropertyStats
from ampcheck.search import BatchOrder
from ampcheck.strategies import tensors

ONE = tensors("float16", shape=1, min_value=-4, max_value=4)
NARROW = tensors("float16", shape=3, min_value=-4, max_value=4)


def run_of(*args: Any, **kwargs: Any) -> Run:
    """The run of a search, whatever its verdict."""
    with collect() as runs, suppress(AssertionError):
        search(*args, **{"examples": 8, **kwargs})
    return runs[0]


def one(run: Run, check: str) -> Finding:
    """The only finding of that check."""
    (found,) = (f for f in run.findings if f.check == check)
    return found


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: None, "results without tensors (NoneType)"),
        (lambda x: "done", "results without tensors (str)"),
        (lambda x: x.to("meta"), "outputs that are quantised, opaque or on the device meta"),
        (lambda x: x[:0], "no output has an element"),
        (lambda x: x / 0, "elements that are not finite in float64"),
    ],
    ids="none text meta empty undefined".split(),
)
def test_where_nothing_could_be_judged_the_search_fails(function: Any, told: str) -> None:
    run = run_of(function, inputs=NARROW)
    assert [(f.check, f.verdict) for f in run.findings] == [("coverage", Verdict.FAIL)]
    assert told in run.findings[0].message


def test_inputs_that_are_infinite_already_are_no_evidence() -> None:
    run = run_of(torch.relu, inputs=tensors("float32", shape=2, elements=st.just(float("inf"))), dtype="float16")
    assert [f.verdict for f in run.findings] == [Verdict.FAIL]


def test_outputs_beside_those_judged_are_counted() -> None:
    run = run_of(lambda x: (x, x.to("meta")), inputs=NARROW)
    assert "on the device meta" in one(run, "coverage").message


def test_a_number_is_judged_like_a_tensor_of_one_element() -> None:
    run = run_of(lambda x: float((x + 2048).sum() - 3 * 2048), inputs=NARROW, examples=30)
    assert one(run, "property-accuracy").verdict is Verdict.FAIL
    assert not run_of(lambda x: float(x.abs().amax()), inputs=NARROW).failed


def test_an_exception_on_some_inputs_is_named_and_the_counts_agree() -> None:
    def sometimes(x: torch.Tensor) -> torch.Tensor:
        return x * (1 / 0) if x[0] > 0 else x

    run = run_of(sometimes, inputs=NARROW, examples=25, domain=(-4, 4))
    assert "division by zero" in one(run, "coverage").message
    judged = run.coverage.seen["examples"] + run.coverage.seen.get("steps of gradient ascent", 0)
    assert f"({judged} examples" in one(run, "property-accuracy").message


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (torch.nn.RReLU().half(), NARROW),
        (torch.nn.LSTM(4, 4), tensors("float32", shape=(2, 3, 4), min_value=-1, max_value=1)),
    ],
    ids=["rrelu", "lstm"],
)
def test_a_kernel_that_this_machine_lacks_says_nothing_about_the_model(model: Any, inputs: Any) -> None:
    run = run_of(model, inputs=inputs, dtype="float16", examples=3)
    (found,) = run.findings
    if found.verdict is Verdict.PASS:
        pytest.skip("this machine has the kernel")
    assert (found.check, found.verdict) == ("coverage", Verdict.SKIP)
    assert "not judged: this machine cannot run it: " in found.message


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"domain": 10}, "domain must be"),
        ({"domain": ("a", "b")}, "domain must be"),
        ({"domain": (0.0, float("inf"))}, "domain must be"),
        ({"examples": "many"}, "examples must be a whole number"),
        ({"seconds": "long"}, "seconds must be a number"),
        ({"seed": "x"}, "seed must be"),
        ({"invariances": BatchOrder()}, "invariances must be"),
        ({"invariances": (BatchOrder,)}, "an invariance must be"),
        ({"invariances": ("scale",)}, "an invariance must be"),
        ({"reproduce": __file__}, "reproduce must be a folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_input_is_refused_before_the_search(arguments: dict[str, Any], told: str) -> None:
    def never(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the search began")

    with pytest.raises(UsageError, match=told) as caught:
        search(never, NARROW, **arguments)
    assert "\n" not in str(caught.value)


# What a call leaves behind ----------------------------------------------------------------------------------------


class Counting(torch.nn.Module):
    """Right from its fourth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x if self.calls > 3 else (x + 2048) - 2048


class Caching(torch.nn.Module):
    """Grows a buffer and a list with every call, and gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(0, dtype=torch.float16))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.cat([self.cache, x])
        self.seen.append(x)
        return torch.cat([self.cache, *self.seen])


def test_a_counter_does_not_hide_what_the_first_call_does() -> None:
    assert one(run_of(Counting(), inputs=ONE), "property-accuracy").verdict is Verdict.FAIL


def test_a_cache_begins_anew_with_each_call() -> None:
    assert not run_of(Caching(), inputs=ONE).failed


def test_so_does_what_a_closure_counts() -> None:
    calls = 0
    held: list[int] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        held.append(calls)
        return x if calls > 3 or len(held) > 3 else (x + 2048) - 2048

    assert one(run_of(counting, inputs=ONE), "property-accuracy").verdict is Verdict.FAIL


# Written down -----------------------------------------------------------------------------------------------------


class Holder:
    """Has a method that loses what is small."""

    def lossy(self, x: torch.Tensor) -> torch.Tensor:
        """Wrong below one."""
        return (x + 2048) - 2048


def test_what_would_not_run_by_itself_is_not_written(tmp_path: Path) -> None:
    def lossy(x: torch.Tensor, like: Path = Path()) -> torch.Tensor:
        return (x + 2048) - 2048

    for model, told in ((Holder().lossy, "a method cannot be imported by name"), (lossy, "'Path' is not defined")):
        run = run_of(model, inputs=ONE, reproduce=tmp_path)
        assert told in one(run, "property-accuracy").hint
    assert list(tmp_path.iterdir()) == []


def test_a_property_of_which_nothing_was_looked_at_is_skipped_and_a_pass_counts_what_it_rests_on() -> None:
    stats = PropertyStats("f [float16, eager]", "float16", examples=3, budget=3, elements=12)
    stats = replace(stats, asked=("property-accuracy", "property-compiled"), coverage=Coverage({"examples": 3}))
    stats = replace(stats, peak=Peak(0.5, 1.0, Where(), "float16"))
    found = {finding.check: finding for finding in findings(stats, Limits())}
    assert found["property-compiled"].verdict is Verdict.SKIP
    assert found["property-accuracy"].verdict is Verdict.PASS
    assert (found["property-accuracy"].seen, found["coverage"].seen) == (12, 3)


def test_a_module_that_computes_nothing_in_16_bits_is_a_warning() -> None:
    run = search(torch.nn.Embedding(10, 4), inputs=st.just(torch.tensor([1, 2])), dtype="float16")
    (found,) = [finding for finding in run.findings if finding.check == "coverage"]
    assert found.verdict is Verdict.WARN
    assert "needs ops that compute in it" in found.message
