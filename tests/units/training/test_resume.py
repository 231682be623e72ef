from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck.audit import audit
from ampcheck.checks.training.resume import check as check_checkpoint_events
from ampcheck.checks.training.resume import check as check_resume
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Subject
from ampcheck.records.protocol import Act, Event
from ampcheck.records.resume import ResumeStats, SavedStates
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.resume import measure_resume, resume_table

PARTS = ("model", "optimizer", "scaler", "scheduler", "ema")


def make(
    leave_out: tuple[str, ...] = (), dropout: float = 0.0, accumulate: int = 1, keep_random: bool = False
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 1))
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler, "ema": ema}

    def step(i: int) -> float:
        x = torch.linspace(-1, 1, 32).reshape(8, 4) + 0.1 * i
        if i % accumulate == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        if (i + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            with torch.no_grad():
                for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
        return float(loss.detach())

    def save() -> dict[str, Any]:
        kept: dict[str, Any] = {name: part.state_dict() for name, part in parts.items() if name not in leave_out}
        return {**kept, "random": torch.get_rng_state()} if keep_random else kept

    def load(checkpoint: dict[str, Any]) -> None:
        for name, state in checkpoint.items():
            if name == "random":
                torch.set_rng_state(state)
            else:
                parts[name].load_state_dict(state)

    return {**parts, "step": step, "save": save, "load": load}


def judged(shape: dict[str, Any], steps: int = 3) -> tuple[Finding, ResumeStats]:
    loop = TrainingLoop(Subject(shape))
    with loop.preserved() as start:
        stats = measure_resume(loop, start, steps)
    (finding,) = check_resume(stats, Limits())
    return finding, stats


def state_of(shape: dict[str, Any]) -> list[Any]:
    held = [shape[name].state_dict() for name in PARTS]
    return [torch.get_rng_state(), copy.deepcopy(held)]


def test_a_whole_checkpoint_gives_the_same_run_bit_by_bit() -> None:
    finding, stats = judged(make())
    assert finding.verdict is Verdict.PASS
    assert not stats.forgotten
    assert not stats.drew


@pytest.mark.parametrize(
    ("part", "what"),
    [("scaler", "scaler"), ("optimizer", "optimizer state"), ("scheduler", "scheduler"), ("model", "weights"),
     ("ema", "copies of weights")],
)  # fmt: skip
def test_a_part_that_the_checkpoint_lacks_is_named_with_its_cure(part: str, what: str) -> None:
    finding, stats = judged(make(leave_out=(part,)))
    assert finding.verdict is Verdict.FAIL
    assert what in [one.what for one in stats.forgotten]
    assert what in finding.message
    assert "load_state_dict" in finding.hint
    assert resume_table(stats)


@pytest.mark.parametrize("leave_out", [(), ("scaler",), ("optimizer", "ema")])
def test_the_loop_is_afterwards_as_it_was(leave_out: tuple[str, ...]) -> None:
    shape = make(leave_out, dropout=0.3)
    before = state_of(shape)
    judged(shape)
    assert str(before) == str(state_of(shape))
    parameters = [p for group in shape["optimizer"].param_groups for p in group["params"]]
    assert [id(p) for p in parameters] == [id(p) for p in shape["model"].parameters()]


def test_a_loop_that_has_trained_already_is_resumed_from_where_it_is() -> None:
    shape = make()
    for i in range(4):
        shape["step"](i)
    assert judged(shape)[0].verdict is Verdict.PASS
    bad = make(leave_out=("scaler",))
    for i in range(4):
        bad["step"](i)
    assert judged(bad)[0].verdict is Verdict.FAIL


def test_random_numbers_that_are_not_saved_are_warned_of_and_saved_ones_are_not() -> None:
    finding, stats = judged(make(dropout=0.5))
    assert stats.drew
    assert finding.verdict is Verdict.WARN
    assert "random" in finding.message
    assert judged(make(dropout=0.5, keep_random=True))[0].verdict is Verdict.PASS


def test_a_missing_scaler_is_found_also_where_random_numbers_are_drawn() -> None:
    finding, _ = judged(make(("scaler",), dropout=0.5))
    assert finding.verdict is Verdict.FAIL
    assert "scaler" in finding.message


def test_an_interruption_between_micro_batches_is_warned_of_and_does_not_fail() -> None:
    finding, stats = judged(make(accumulate=2), steps=3)
    assert stats.accumulating
    assert finding.verdict is Verdict.WARN
    assert "accumulating" in finding.message
    assert judged(make(accumulate=2), steps=2)[0].verdict is Verdict.PASS


def test_python_state_that_changes_the_weights_and_is_not_saved_is_found() -> None:
    shape = make()
    inner, seen = shape["step"], {"count": 0}

    def step(i: int) -> float:
        seen["count"] += 1
        return float(inner(seen["count"]))

    finding, stats = judged({**shape, "step": step})
    assert finding.verdict is Verdict.FAIL
    assert not stats.forgotten
    assert "counter" in finding.hint


def test_a_mean_that_is_only_reported_is_warned_of() -> None:
    shape = make()
    inner, seen = shape["step"], {"sum": 0.0}

    def step(i: int) -> float:
        seen["sum"] += inner(i)
        return seen["sum"] / (i + 1)

    assert judged({**shape, "step": step})[0].verdict is Verdict.WARN


def test_a_scaler_that_is_not_used_need_not_be_saved() -> None:
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def step(i: int) -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    shape = {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step, "save": model.state_dict}
    assert judged({**shape, "load": model.load_state_dict})[0].verdict is Verdict.PASS


def test_weights_saved_in_16_bits_are_found() -> None:
    shape = make()

    def save() -> dict[str, Any]:
        kept: dict[str, Any] = shape["save"]()
        kept["model"] = {k: v.bfloat16() if v.is_floating_point() else v for k, v in kept["model"].items()}
        return kept

    finding, stats = judged({**shape, "save": save})
    assert finding.verdict is Verdict.FAIL
    weights = next(one for one in stats.forgotten if one.what == "weights")
    assert 2**-11 < weights.size < 2**-7
    assert "is rounded to bfloat16 and differs by" in finding.message


def test_without_save_and_load_it_is_skipped_with_the_way_to_declare_them() -> None:
    shape = {key: value for key, value in make().items() if key not in ("save", "load")}
    finding, _ = judged(shape)
    assert finding.verdict is Verdict.SKIP
    assert "'save'" in finding.message


def test_a_loop_that_does_not_replay_is_incomplete() -> None:
    shape = make(leave_out=("scaler",))
    inner, noise = shape["step"], iter(torch.rand(1000, generator=torch.Generator().manual_seed(0)))

    def step(i: int) -> float:
        with torch.no_grad():
            shape["model"][0].weight.add_(next(noise))
        return float(inner(i))

    finding, _ = judged({**shape, "step": step})
    assert finding.verdict is Verdict.INCOMPLETE
    assert "two uninterrupted runs" in finding.message


def test_a_generator_of_the_loops_own_that_is_not_saved_warns() -> None:
    shape = make()
    inner, noise = shape["step"], torch.Generator().manual_seed(0)

    def step(i: int) -> float:
        with torch.no_grad():
            shape["model"][0].weight.add_(torch.rand((), generator=noise))
        return float(inner(i))

    finding, _ = judged({**shape, "step": step})
    assert finding.verdict is Verdict.WARN
    assert "random generators" in finding.message


def raising(*_: Any) -> Any:
    raise OSError("disk full")


@pytest.mark.parametrize("part", ["save", "load"])
def test_a_save_or_load_that_raises_fails_and_leaves_the_loop_as_it_was(part: str) -> None:
    shape = make()
    before = state_of(shape)
    finding, _ = judged({**shape, part: raising})
    assert finding.verdict is Verdict.FAIL
    assert "disk full" in finding.message
    assert str(before) == str(state_of(shape))


def test_a_checkpoint_that_cannot_be_written_fails() -> None:
    finding, _ = judged({**make(), "save": lambda: lambda: 0})
    assert finding.verdict is Verdict.FAIL
    assert "torch.save cannot write" in finding.message


def test_a_step_that_raises_is_incomplete() -> None:
    finding, _ = judged({**make(), "step": raising})
    assert finding.verdict is Verdict.INCOMPLETE
    assert "disk full" in finding.message


def used(who: str, first: int, scales: list[float], **more: Any) -> Iterator[Event]:
    """A scaler in use: its scale in each step, the last being the one after the last update."""
    for number, (scale, after) in enumerate(itertools.pairwise(scales)):
        yield Event(Act.SCALE, first + number, who, scale=scale, **more)
        yield Event(Act.SCALER_STEP, first + number, who, scale=scale, **more)
        yield Event(Act.UPDATE, first + number, who, scale=scale, new_scale=after, **more)


def verdicts(events: list[Event]) -> list[Verdict]:
    return [one.verdict for one in check_checkpoint_events(SavedStates("loop", tuple(events)), Limits())]


def test_a_scaler_that_starts_over_is_found_and_one_that_was_loaded_is_not() -> None:
    before = list(used("scaler", 0, [65536.0, 32768.0, 32768.0]))
    after = list(used("scaler#2", 2, [65536.0, 65536.0]))
    (finding,) = check_checkpoint_events(SavedStates("loop", (*before, *after)), Limits())
    assert finding.verdict is Verdict.FAIL
    assert (finding.observed, finding.limit, finding.where.step) == (65536.0, 32768.0, 2)
    kept = list(used("scaler#2", 2, [32768.0, 32768.0]))
    for who in ("scaler#2", "scaler"):
        assert verdicts([*before, Event(Act.LOAD, 2, who), *kept]) == []


def test_a_load_before_the_other_scaler_was_used_does_not_count_for_the_second() -> None:
    before = list(used("scaler", 0, [65536.0, 32768.0]))
    after = list(used("scaler#2", 1, [65536.0, 65536.0]))
    assert verdicts([Event(Act.LOAD, 0, "scaler"), *before, *after]) == [Verdict.FAIL]


def test_a_scaler_made_anew_in_each_step_fails_and_one_restart_at_the_same_scale_is_warned_of() -> None:
    whos = ["scaler", "scaler#2", "scaler#3"]
    events = [event for n, who in enumerate(whos) for event in used(who, n, [65536.0, 65536.0])]
    assert verdicts(events) == [Verdict.FAIL]
    assert verdicts(events[:6]) == [Verdict.WARN]


def test_scalers_that_are_used_side_by_side_or_at_other_places_do_not_take_over() -> None:
    one = list(used("scaler_g", 0, [65536.0, 32768.0, 32768.0]))
    other = list(used("scaler_d", 0, [65536.0, 65536.0, 65536.0]))
    assert verdicts([event for pair in zip(one, other, strict=True) for event in pair]) == []
    assert verdicts([*one, *other]) == []
    with_optimizers = [
        *used("a", 0, [65536.0, 32768.0], optimizers=("optimizer",)),
        *used("b", 1, [65536.0, 65536.0], optimizers=("optimizer",)),
    ]
    assert verdicts(with_optimizers) == [Verdict.FAIL]


def checkpoint(*keys: str) -> Callable[[int], Event]:
    return lambda step: Event(Act.CHECKPOINT, step, keys=keys)


def test_a_checkpoint_of_the_optimizer_without_the_scaler_is_found() -> None:
    events = list(used("scaler", 0, [65536.0, 65536.0]))
    assert verdicts([*events, checkpoint("model", "optimizer")(0)]) == [Verdict.FAIL]
    assert verdicts([*events, checkpoint("model", "optimizer", "scaler")(0)]) == [Verdict.PASS]
    assert verdicts([*events, checkpoint("optimizer")(0), checkpoint("scaler")(0)]) == [Verdict.PASS]
    assert verdicts([*events, Event(Act.SAVE, 0, "scaler"), checkpoint("optimizer")(0)]) == [Verdict.PASS]
    assert verdicts([*events, checkpoint("model")(0)]) == []
    disabled = list(used("scaler", 0, [1.0, 1.0], enabled=False))
    assert verdicts([*disabled, checkpoint("optimizer")(0)]) == []


class Trainer:
    """Builds model, optimizer, schedule and scaler, and builds them again where a checkpoint is loaded."""

    def __init__(self, forgotten: str = "") -> None:
        self.forgotten = forgotten
        self.build()

    def build(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(self, i: int) -> float:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(torch.linspace(-1, 1, 32).reshape(8, 4) + 0.1 * i).float().pow(2).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return float(loss.detach())

    def save(self) -> dict[str, Any]:
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule", "scaler")}

    def load(self, checkpoint: dict[str, Any]) -> None:
        self.build()
        for name, state in checkpoint.items():
            if name != self.forgotten:
                getattr(self, name).load_state_dict(state)


@pytest.mark.parametrize("forgotten", ["", "model", "optimizer", "schedule", "scaler"])
def test_a_load_that_builds_everything_anew_is_judged_by_what_it_built(forgotten: str) -> None:
    trainer = Trainer(forgotten)
    model = trainer.model
    finding, _ = judged({"trainer": trainer, "step": trainer.step, "save": trainer.save, "load": trainer.load})
    assert finding.verdict is (Verdict.FAIL if forgotten else Verdict.PASS)
    assert trainer.model is model, "the user's own objects are back"


def folds(resumed: bool, forgotten: bool = False) -> list[Finding]:
    """What an audit says of a script that trains three models, one after the other, or one that resumes twice."""

    def main() -> None:
        torch.manual_seed(0)
        checkpoint: dict[str, Any] = {}
        for _ in range(3):
            model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            parts = {"model": model, "optimizer": optimizer} | ({} if forgotten else {"scaler": scaler})
            if resumed and checkpoint:
                for name, part in parts.items():
                    part.load_state_dict(checkpoint[name])
            for _ in range(4):
                x = torch.randn(16, 4)
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            checkpoint = {name: part.state_dict() for name, part in parts.items()}

    return [finding for finding in audit(main).findings if finding.verdict in (Verdict.FAIL, Verdict.WARN)]


def test_models_that_a_script_trains_one_after_the_other_share_no_parameters_and_no_scaler() -> None:
    assert folds(resumed=False) == []
    assert folds(resumed=True) == []


def test_a_script_that_resumes_without_the_scaler_fails() -> None:
    assert [finding.check for finding in folds(resumed=True, forgotten=True)] == ["resume"]
