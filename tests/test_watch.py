"""`ampcheck.watch` in a user's own loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampcheck
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict
from ampcheck.torchtools import interception


class Loud(nn.Module):
    """Its second layer overflows float16 from inputs of size 100 on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.first.weight, 1.0)
        nn.init.constant_(self.second.weight, 100.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


@pytest.fixture(scope="module")
def loop() -> tuple[Run, list[torch.Tensor]]:
    """Six calls, every third watched; the fourth, which is one of them, overflows."""
    model = Loud()
    compiled = torch.compile(model)
    losses: list[torch.Tensor] = []
    with ampcheck.watch(compiled, every=3, name="loud") as seen:
        for number in range(6):
            with torch.autocast("cpu", torch.float16):
                out = compiled(torch.full((2, 4), 100.0 if number == 3 else 0.1))
            losses.append(out.detach().float().mean())
    return seen.run(), losses


def test_what_overflows_in_a_users_loop_is_found_at_its_call_module_and_line(
    loop: tuple[Run, list[torch.Tensor]],
) -> None:
    run, losses = loop

    assert [bool(loss.isfinite()) for loss in losses] == [True, True, True, False, True, True]
    (finding,) = run.of(Verdict.FAIL)
    assert finding.check == "overflow"
    assert (finding.where.module, finding.where.phase, finding.where.step) == ("second", "forward", 3)
    assert finding.where.file.endswith("test_watch.py")
    assert finding.subject == "loud"


def test_the_run_says_how_much_was_looked_at(loop: tuple[Run, list[torch.Tensor]]) -> None:
    run, _ = loop

    assert (run.coverage.seen["graphs"], run.coverage.seen["measured calls"]) == (1, 2)
    assert run.tables
    assert "loud" in run.title


def test_verify_raises_what_failed() -> None:
    compiled = torch.compile(lambda x: (x * 7).to(torch.float16))
    with ampcheck.watch(compiled) as seen:
        compiled(torch.tensor([1e5]))

    with pytest.raises(AssertionError, match="finite values must stay finite"):
        seen.verify()


def test_the_statistics_can_be_asked_for_inside_the_block() -> None:
    compiled = torch.compile(lambda x: (x * 7).to(torch.float16))
    with ampcheck.watch(compiled) as seen:
        compiled(torch.tensor([1.0]))
        assert seen.stats().measured == 1
        compiled(torch.tensor([2.0]))
        assert seen.stats().measured == 2
    assert seen.stats().sites[0].amax == 14.0


def test_a_model_that_was_compiled_and_called_before_is_watched_all_the_same() -> None:
    compiled = torch.compile(lambda x: (x * 9).to(torch.float16))
    compiled(torch.tensor([1.0]))

    with ampcheck.watch(compiled) as seen:
        compiled(torch.tensor([2.0]))

    assert seen.stats().measured == 1


def test_a_model_that_is_not_compiled_is_a_failure_of_coverage_not_a_pass() -> None:
    model = Loud()
    with ampcheck.watch(model) as seen:
        model(torch.ones(2, 4))

    (finding,) = seen.run().findings
    assert (finding.check, finding.verdict) == ("coverage", Verdict.FAIL)


def test_a_compiled_model_that_rounds_nothing_to_16_bits_is_no_pass_either() -> None:
    torch.compiler.reset()
    compiled = torch.compile(torch.nn.Linear(4, 4))
    with ampcheck.watch(compiled) as seen:
        compiled(torch.ones(2, 4))

    (finding,) = seen.run().findings
    assert (finding.check, finding.verdict) == ("coverage", Verdict.FAIL)
    assert "level='all'" in finding.hint


def test_an_exception_of_the_loop_comes_through() -> None:
    with pytest.raises(ZeroDivisionError), ampcheck.watch(torch.compile(Loud())):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"level": "bits"}, "casts, ops, all"),
        ({"every": 0}, "1 or more"),
        ({"every": 2.5}, "1 or more"),
        ({"every": True}, "1 or more"),
    ],
    ids=str,
)
def test_bad_settings_are_told_with_what_is_valid(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told), ampcheck.watch(Loud(), **given):
        pass


def test_what_cannot_be_called_cannot_be_watched() -> None:
    with pytest.raises(UsageError, match="found int"), ampcheck.watch(3):
        pass


def test_watching_leaves_no_trace_in_the_compiler() -> None:
    from torch._inductor import compile_fx

    entry = compile_fx.compile_fx
    with ampcheck.watch(torch.compile(Loud())):
        assert compile_fx.compile_fx is not entry
    assert compile_fx.compile_fx is entry
    assert interception.unsupported() == ""
