from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.records.protocol import Act, Event
from ampcheck.records.scales import ScalerStats, ScalerStep
from ampcheck.training.scale.stats import measure_scalers


def _drive(bad: list[bool], *, init: float = 65536.0, interval: int = 3, enabled: bool = True) -> list[Event]:
    """The events of a real GradScaler whose gradient is infinite in some steps."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval, enabled=enabled)
    events = []
    for step, infinite in enumerate(bad):
        scale = scaler.get_scale()
        weight.grad = torch.full((2,), float("inf") if infinite else scale)
        before = weight.detach().clone()
        scaler.scale(torch.zeros(()))
        events.append(Event(Act.SCALE, step, "scaler", scale=scale, enabled=enabled))
        scaler.step(optimizer)
        skipped = torch.equal(before, weight.detach())
        names = ("weight",) if infinite else ()
        events.append(
            Event(Act.SCALER_STEP, step, "scaler", scale=scale, skipped=skipped, nonfinite=names, enabled=enabled)
        )
        scaler.update()
        events.append(Event(Act.UPDATE, step, "scaler", scale=scale, new_scale=scaler.get_scale(), enabled=enabled))
    return events


@given(st.lists(st.booleans(), min_size=1, max_size=25))
def test_the_path_is_that_of_a_real_scaler(bad: list[bool]) -> None:
    stats = measure_scalers(_drive(bad))["scaler"]
    scale, clean, expected, last = 65536.0, 0, [], None
    for step, infinite in enumerate(bad):
        expected.append((step, scale, infinite))
        last = last if infinite else scale
        clean = 0 if infinite else clean + 1
        if infinite:
            scale *= 0.5
        elif clean == 3:
            scale, clean = scale * 2, 0
    assert stats.trajectory == tuple(expected)
    assert (stats.scale_in_use, stats.last_scale) == (last, scale)
    assert stats.skipped_by == ({"weight": sum(bad)} if any(bad) else {})


def test_a_disabled_scaler_has_scale_one() -> None:
    stats = measure_scalers(_drive([False] * 3, enabled=False))["scaler"]
    assert not stats.enabled
    assert stats.scale_in_use == 1.0


def test_two_optimizers_under_one_scaler_make_one_step() -> None:
    events = [
        Event(Act.SCALER_STEP, 0, "s", scale=8.0, skipped=True, nonfinite=("a", "b")),
        Event(Act.SCALER_STEP, 0, "s", scale=8.0),
        Event(Act.UPDATE, 0, "s", scale=8.0, new_scale=4.0),
        Event(Act.SCALER_STEP, 1, "s", scale=4.0, skipped=True, nonfinite=("a",)),
        Event(Act.SCALER_STEP, 1, "s", scale=4.0, skipped=True),
        Event(Act.UPDATE, 1, "s", scale=4.0, new_scale=2.0),
    ]
    stats = measure_scalers(events)["s"]
    assert stats.steps == (ScalerStep(0, 8.0, 1, 1, 4.0, ("a", "b")), ScalerStep(1, 4.0, 0, 2, 2.0, ("a",)))
    assert stats.trajectory == ((0, 8.0, False), (1, 4.0, True))
    assert stats.skipped_by == {"a": 2, "b": 1}
    assert (stats.scale_in_use, stats.last_scale) == (8.0, 2.0)


def test_several_updates_in_one_step_of_the_loop_are_several_steps() -> None:
    events = [
        Event(act, 0, "s", scale=scale, new_scale=scale * 2 if act is Act.UPDATE else None)
        for scale in (1.0, 2.0)
        for act in (Act.SCALER_STEP, Act.UPDATE)
    ]
    assert measure_scalers(events)["s"].trajectory == ((0, 1.0, False), (0, 2.0, False))


def test_a_missing_update_does_not_join_the_steps() -> None:
    stats = measure_scalers([Event(Act.SCALER_STEP, i, "s", scale=4.0) for i in range(3)])["s"]
    assert stats.trajectory == ((0, 4.0, False), (1, 4.0, False), (2, 4.0, False))
    assert stats.last_scale == 4.0


def test_an_update_without_a_step_moves_the_scale_only() -> None:
    stats = measure_scalers([Event(Act.UPDATE, 0, "s", scale=4.0, new_scale=8.0)])["s"]
    assert stats.trajectory == ()
    assert (stats.scale_in_use, stats.last_scale) == (None, 8.0)


def test_scalers_are_kept_apart_and_other_events_are_not_theirs() -> None:
    events = [
        Event(Act.SCALE, 0, "one", scale=2.0),
        Event(Act.BACKWARD, 0, "", scaled=True),
        Event(Act.OPTIMIZER_STEP, 0, "optimizer"),
        Event(Act.SCALER_STEP, 0, "two", scale=4.0),
    ]
    told = measure_scalers(events)
    assert set(told) == {"one", "two"}
    assert told["one"] == ScalerStats(True, ())
    assert told["one"].last_scale is None
    assert told["two"].scale_in_use == 4.0


def test_a_scale_that_nobody_read_is_no_step() -> None:
    assert measure_scalers([Event(Act.SCALER_STEP, 0, "s")])["s"].steps == ()
