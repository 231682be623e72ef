"""States that are rounded at each step, NaN that is chosen, and memory that nothing has written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ampcheck
from ampcheck import Verdict

STEPS = 600


def one_line(state: Tensor, decay: float, x: Tensor) -> Tensor:
    return (state.float() * decay + x).to(torch.bfloat16)


def two_lines(state: Tensor, decay: float, x: Tensor) -> Tensor:
    new = state.float() * decay + x
    return new.to(torch.bfloat16)


def copied(state: Tensor, decay: float, x: Tensor) -> Tensor:
    return state.copy_(state.float() * decay + x)


def in_16_bits(state: Tensor, decay: float, x: Tensor) -> Tensor:
    kept = state * decay
    return kept + x.to(torch.bfloat16)


STYLES = (one_line, two_lines, copied, in_16_bits)


def failures(function: Callable[[], object], check: str) -> list[ampcheck.Finding]:
    with ampcheck.watch(fail_on="never") as seen:
        kept = function()
    del kept
    assert seen.run is not None
    return [f for f in seen.run.findings if f.check == check and f.verdict is Verdict.FAIL]


def scanned(style: Callable[[Tensor, float, Tensor], Tensor], decay: float) -> Tensor:
    torch.manual_seed(0)
    state = torch.zeros(64, dtype=torch.bfloat16)
    for x in (1 + 0.1 * torch.randn(STEPS, 64)) * (1 - decay):
        state = style(state, decay, x)
    return state


@pytest.mark.parametrize("style", STYLES)
def test_a_state_that_is_rounded_at_each_step_is_named_at_the_line_that_rounds_it(
    style: Callable[[Tensor, float, Tensor], Tensor],
) -> None:
    found = failures(lambda: scanned(style, 0.997), "precision-loss")
    assert found
    assert "a running value is written again and again" in found[0].message
    assert found[0].where is not None
    first = style.__code__.co_firstlineno
    assert first < (found[0].where.line or 0) <= first + 2


@pytest.mark.parametrize("style", STYLES)
def test_a_state_that_forgets_within_a_few_steps_is_honest(
    style: Callable[[Tensor, float, Tensor], Tensor],
) -> None:
    assert not failures(lambda: scanned(style, 0.8), "precision-loss")


def test_what_is_read_from_a_running_state_is_no_running_state() -> None:
    def decoded() -> Tensor:
        torch.manual_seed(0)
        state, outputs = torch.zeros(2, 16, dtype=torch.bfloat16), []
        for x, read in zip(torch.randn(60, 2, 16), torch.randn(60, 2, 16), strict=True):
            new = state.float() * 0.7 + x
            state = new.to(torch.bfloat16)
            outputs.append((state * read.to(torch.bfloat16)).sum(-1))
        return torch.stack(outputs)

    assert not failures(decoded, "precision-loss")


@pytest.mark.parametrize("choose", [lambda t: t.argmax(), lambda t: t.topk(2).indices])
def test_a_nan_that_is_chosen_fails(choose: Callable[[Tensor], Tensor]) -> None:
    def sampled() -> Tensor:
        return choose(torch.tensor([0.2, 0.0, 0.8]) / torch.tensor([1.0, 0.0, 1.0]))

    (finding,) = failures(sampled, "nonfinite-reference")
    assert "chooses a NaN" in finding.message


def test_a_nan_that_is_replaced_before_the_choice_does_not_fail() -> None:
    def sampled() -> Tensor:
        return (torch.tensor([0.2, 0.0, 0.8]) / torch.tensor([1.0, 0.0, 1.0])).nan_to_num(0.0).argmax()

    assert not failures(sampled, "nonfinite-reference")


def test_memory_that_nothing_has_written_is_not_judged() -> None:
    def drawn() -> Tensor:
        block = torch.full((4096,), 1e30)
        del block  # what `empty` returns most likely
        return torch.empty(4096).half().normal_()

    with ampcheck.watch(fail_on="never") as seen:
        kept = drawn()
    assert kept.isfinite().all()
    assert seen.run is not None
    assert not [f for f in seen.run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]


def test_a_cast_behind_memory_that_was_written_is_judged() -> None:
    def filled() -> Tensor:
        memory = torch.empty(64)
        memory.copy_(torch.full((64,), 1e30))
        return memory.half()

    assert failures(filled, "overflow")


def test_the_hint_of_an_overflow_in_float32_names_no_float32() -> None:
    (finding,) = failures(lambda: torch.full((4,), 96.0).exp(), "overflow")
    assert "float32 (torch.autocast" not in finding.hint
    assert "scale its inputs down" in finding.hint


def test_no_cast_is_called_harmless_where_values_are_lost() -> None:
    def lost() -> Tensor:
        scores = torch.full((4,), 300.0).half()
        return scores * scores

    with ampcheck.watch(fail_on="never") as seen:
        kept = lost()
    del kept
    assert seen.run is not None
    assert "of your own" not in str(seen.run)


class Nearest(torch.nn.Module):
    """The nearest neighbours by expanded squares, of rows that lie in pairs."""

    def forward(self, x: Tensor) -> Tensor:
        squares = x.square().sum(-1)
        distances = (squares[:, None] + squares - 2 * (x @ x.T)).clamp(min=0).sqrt()
        return distances.topk(4, largest=False).values


def test_a_selection_of_lost_digits_is_judged() -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 32)
    x[64:96] = x[:32] + 1e-3 * torch.randn(32, 32)
    run = ampcheck.audit((Nearest(), (x,)), compile=False)
    assert not [reason for reason in run.coverage.unseen if "is not judged" in reason]
