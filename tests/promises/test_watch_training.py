"""`ampcheck.watch(model, optimizer, scaler)`: what is handed over adds to what is judged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampcheck
from ampcheck import Run, UsageError, Verdict


class Loop:
    """A small classifier in float16 autocast. Its parts are attributes of an object that no variable of a test names
    while it steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.x = torch.randn(64, 8)
        self.labels = self.x[:, :4].argmax(1)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(self.model(self.x).float(), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scaler


def failed(run: Run) -> set[tuple[str, bool]]:
    """The checks that fail, and whether with a line of this file."""
    return {(f.check, f.where.file.endswith("test_watch_training.py")) for f in run.of(Verdict.FAIL)}


def epoch(loop: Loop, steps: int, **options: Any) -> Run:
    """The run of an epoch whose mean loss is summed in bfloat16."""
    with ampcheck.watch(*loop.parts, fail_on="never", **options) as seen:
        total = torch.zeros((), dtype=torch.bfloat16)
        for _ in range(steps):
            total += loop.step().bfloat16()
    return seen.run


def test_a_sum_beside_the_optimizer_is_judged_though_an_optimizer_is_handed_over() -> None:
    assert failed(epoch(Loop(), 30)) == {("stagnation", True)}


@pytest.mark.parametrize("options", [{"exact": False}, {"every": 10}])
def test_what_is_measured_alone_is_cheap_and_says_less(options: dict[str, Any]) -> None:
    run = epoch(Loop(), 30, **options)

    assert not failed(run)
    assert "ops" not in run.coverage.seen


def test_each_tenth_step_may_be_measured_and_all_ops_followed() -> None:
    run = epoch(Loop(), 30, exact=True, every=10)

    assert failed(run) == {("stagnation", True)}
    assert run.coverage.seen["measured steps"] == 3


def test_a_healthy_loop_is_silent_and_each_check_gives_one_pass_of_a_loop() -> None:
    loop = Loop()
    with ampcheck.watch(*loop.parts) as seen:
        for _ in range(6):
            seen.step(loop.step())

    counts = seen.run.counts()
    assert not {Verdict.FAIL, Verdict.WARN, Verdict.INCOMPLETE} & counts.keys(), counts
    for check in ("loss-scale", "scaler-protocol", "gradient-underflow", "coverage"):
        assert [f.verdict for f in seen.run.findings if f.check == check] == [Verdict.PASS]


def test_the_weights_are_those_of_an_unwatched_loop() -> None:
    watched, plain = Loop(), Loop()
    with ampcheck.watch(*watched.parts):
        losses = [watched.step() for _ in range(4)]

    assert losses == [plain.step() for _ in range(4)]
    assert all(map(torch.equal, watched.model.parameters(), plain.model.parameters()))


def test_what_vanishes_is_proven_by_float64_and_only_warned_of_without() -> None:
    verdicts = []
    for exact in (True, False):
        loop = Loop()
        loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
        loop.labels = loop.x @ torch.ones(8, 4)

        def step(loop: Loop = loop) -> None:
            loop.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = (loop.model(loop.x) * 1e-9).float().square().mean()
            loss.backward()
            loop.optimizer.step()

        with ampcheck.watch(*loop.parts, exact=exact, fail_on="never") as seen:
            for _ in range(4):
                step()
        verdicts.append({f.verdict for f in seen.run.findings if f.check == "gradient-underflow"})

    assert verdicts == [{Verdict.FAIL}, {Verdict.WARN}]


def test_an_error_can_be_explained_where_an_optimizer_is_handed_over() -> None:
    loop = Loop()
    with ampcheck.watch(*loop.parts, fail_on="never") as seen:
        loss = loop.step()
        assert "within its bound" in seen.explain_error(loss)


def test_parts_that_no_variable_leads_to_are_known() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def steps(call: Any, update: Any) -> None:  # no variable of a user's frame holds the optimizer itself
        for _ in range(3):
            call(torch.ones(2, 4, dtype=torch.bfloat16)).float().mean().backward()
            update()

    with ampcheck.watch(model.bfloat16(), optimizer, fail_on="never") as seen:
        steps(model.forward, optimizer.step)

    assert ("stagnation", True) in failed(seen.run)


def test_a_compiled_model_is_followed_in_eager_mode_where_float64_is_asked_for() -> None:
    loop = Loop()
    compiled = torch.compile(loop.model)
    loop.model = compiled  # type: ignore[assignment]
    with ampcheck.watch(*loop.parts, exact=True, fail_on="never") as seen:
        for _ in range(3):
            loop.step()

    assert seen.run.coverage.seen["ops"] > 0
    assert seen.stats.values is None


def test_checks_of_graphs_leave_float64_out() -> None:
    loop = Loop()
    with ampcheck.watch(*loop.parts, checks=("graph-break", "loss-scale"), fail_on="never") as seen:
        loop.step()

    assert seen.stats.ops is None
    assert seen.stats.training is not None


def test_nothing_to_watch_is_said() -> None:
    with pytest.raises(UsageError, match="exact=False leaves nothing to watch"):
        ampcheck.watch(exact=False)
