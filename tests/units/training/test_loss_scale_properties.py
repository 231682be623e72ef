"""The loss scale's path is that of a real GradScaler, and its window that of PyTorch's own casts, for any gradients."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from ampcheck.core.subject import Subject
from ampcheck.records.scales import FEW, GradientHistogram, ScalerStats, scale_window
from ampcheck.strategies import cancelling_pairs, heavy_tails, log_uniform, outlier_channels, shapes, tensors, values
from ampcheck.training.gradients.watch import histogram_of
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.scale.stats import measure_scalers

# The path of a scaler -----------------------------------------------------------------------------------------------

gradients = values("float32", infinity=True, nan=True) | st.floats(-4, 4, width=16)
factors = values("float16", min_value=1 + 2**-10, max_value=64)


@dataclass(frozen=True)
class Plan:
    """A loop to run twice: the settings of its scaler and the gradients of each step, a row for each optimizer."""

    settings: dict[str, Any]
    steps: list[list[tuple[float, float]]]
    unscaled: bool
    interval: int
    set_scale: dict[int, float]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    rows = draw(st.integers(1, 2))
    settings = {
        "init_scale": draw(values("float32", min_value=2.0**-20, max_value=2.0**100) | st.just(65536.0)),
        "growth_factor": draw(factors),
        "backoff_factor": 1 / draw(factors),
        "growth_interval": draw(st.integers(1, 4)),
        "enabled": draw(st.integers(0, 9)) > 0,
    }
    one = st.lists(st.tuples(gradients, gradients), min_size=rows, max_size=rows)
    steps = draw(st.lists(one | st.just([(math.inf, 0.0)] * rows), min_size=1, max_size=14))
    changed = st.dictionaries(st.integers(0, 13), values("float32", min_value=2.0**-10, max_value=2.0**20), max_size=1)
    return Plan(settings, steps, draw(st.booleans()), draw(st.sampled_from([1, 1, 2])), draw(changed))


@dataclass
class Seen:
    """What the loop itself saw, by no code of ours: (scale, scale after the update or None), and optimizer steps."""

    scales: list[tuple[float, float | None]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    nonfinite: Counter[str] = field(default_factory=Counter)


class Pair(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(count))


def looped(plan: Plan) -> tuple[dict[str, Any], Seen]:
    """The loop as a user writes it, which notes what happened on its way."""
    count, seen = len(plan.steps[0]), Seen()
    model = Pair(count)
    optimizers = [torch.optim.SGD([weight], lr=1e-3) for weight in model.weights]
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: seen.taken.append(len(seen.scales)))
    scaler = torch.amp.GradScaler("cpu", **plan.settings)

    def step(number: int) -> float:
        scaler.scale(torch.zeros(()))
        before, stepped = scaler.get_scale(), len(seen.taken)
        for weight, optimizer, row in zip(model.weights, optimizers, plan.steps[number], strict=True):
            weight.grad = torch.tensor(row)
            if plan.unscaled:
                scaler.unscale_(optimizer)
            at = len(seen.taken)
            scaler.step(optimizer)
            if len(seen.taken) == at and not weight.grad.isfinite().all():
                seen.nonfinite[f"weights.{optimizers.index(optimizer)}"] += 1
        if (number + 1) % plan.interval == 0:
            scaler.update(plan.set_scale.get(number))
            seen.scales.append((before, scaler.get_scale()))
        else:
            seen.scales.append((before, None))
            vars(scaler).get(
                "_per_optimizer_states", {}
            ).clear()  # else PyTorch refuses a second step without an update
        assert len(seen.taken) >= stepped
        return 0.0

    return {"model": model, "optimizer": optimizers, "scaler": scaler, "step": step}, seen


def recorded(shape: dict[str, Any], steps: int) -> ScalerStats:
    recorder = Recorder(TrainingLoop(Subject(shape, name="loop")))
    with recorder.listening():
        for recorder.step in range(steps):
            shape["step"](recorder.step)
    (stats,) = measure_scalers(recorder.events).values()
    return stats


@given(plans())
def test_the_recorded_path_is_that_of_the_same_loop_unwatched(plan: Plan) -> None:
    alone, seen = looped(plan)
    for number in range(len(plan.steps)):
        alone["step"](number)
    stats = recorded(looped(plan)[0], len(plan.steps))

    count = len(plan.steps[0])
    taken = [seen.taken.count(number) for number in range(len(plan.steps))]
    assert stats.enabled == plan.settings["enabled"]
    assert stats.trajectory == tuple((n, before, not taken[n]) for n, (before, _) in enumerate(seen.scales))
    assert [(one.taken, one.skipped) for one in stats.steps] == [(n, count - n) for n in taken]
    assert [one.new_scale for one in stats.steps] == [after for _, after in seen.scales]
    assert stats.skipped_by == dict(seen.nonfinite)
    used = [before for (before, _), n in zip(seen.scales, taken, strict=True) if n]
    assert stats.scale_in_use == (used[-1] if used else None)
    before, after = seen.scales[-1]
    assert stats.last_scale == (before if after is None else after)


# The histogram ------------------------------------------------------------------------------------------------------

NARROW = ("float16", "bfloat16", "float8_e5m2")
WIDE = ("float64", "float32", "bfloat16", "float16")
ANY_SHAPE = shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


def any_gradient(name: str) -> st.SearchStrategy[torch.Tensor]:
    return tensors(name, shape=ANY_SHAPE, layout="any", elements=values(name, infinity=True, nan=True))


@st.composite
def edges(draw: st.DrawFn, name: str) -> float:
    """Where a cast to a narrow format begins to flush or overflow, and its neighbours, a few binades away."""
    info = torch.finfo(getattr(torch, name))
    top = info.max + math.ldexp(info.eps, math.frexp(info.max)[1] - 2)
    place = draw(st.sampled_from([info.tiny * info.eps / 2, top]))
    moved = np.float32(math.ldexp(place, draw(st.integers(-6, 0))))
    return float(np.nextafter(moved, np.float32(draw(st.sampled_from([0.0, float(moved), 3e38])))))


def realistic() -> st.SearchStrategy[torch.Tensor]:
    """Gradients as models have them, float32 or float16."""
    pairs = st.lists(cancelling_pairs("float32", min_value=-1.0, max_value=1.0), min_size=4, max_size=12)
    found = [
        heavy_tails(scale=1e-6),
        heavy_tails("float16", scale=1e-5),
        outlier_channels(shape=(5, 6), scale=1e-4),
        tensors("float32", elements=log_uniform(2.0**-40, 2.0**10).map(np.float32).map(float)),
        pairs.map(torch.tensor),
        st.sampled_from(NARROW).flatmap(lambda name: tensors("float32", shape=(2,), elements=edges(name))),
    ]
    return st.one_of(found)


def by_fractions(tensor: torch.Tensor) -> GradientHistogram:
    """Bin b holds what is larger than 2^(b-1) and at most 2^b."""
    numbers = tensor.detach().to(torch.float64).flatten().tolist()
    finite = [abs(x) for x in numbers if math.isfinite(x)]
    bins: Counter[int] = Counter()
    for size in map(Fraction, filter(None, finite)):
        b = size.numerator.bit_length() - size.denominator.bit_length() + 1  # at or just above the right one
        while size <= Fraction(2) ** (b - 1):
            b -= 1
        bins[b] += 1
    return GradientHistogram(bins, max(finite, default=0.0), len(numbers) - len(finite))


@given(name=st.sampled_from(WIDE), data=st.data())
def test_a_gradient_of_any_layout_is_binned_as_exact_fractions_are(name: str, data: st.DataObject) -> None:
    tensor = data.draw(any_gradient(name))
    assert histogram_of(tensor) == by_fractions(tensor)


@given(st.lists(st.sampled_from(WIDE).flatmap(any_gradient) | realistic(), min_size=1, max_size=4), st.data())
def test_histograms_merge_to_that_of_all_elements_in_any_order_and_grouping(
    many: list[torch.Tensor], data: st.DataObject
) -> None:
    whole = by_fractions(torch.cat([tensor.flatten().to(torch.float64) for tensor in many]))
    parts = data.draw(st.permutations([histogram_of(tensor) for tensor in many]))
    while len(parts) > 1:
        place = data.draw(st.integers(0, len(parts) - 2))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    assert parts[0] == whole == parts[0] + GradientHistogram() == GradientHistogram() + parts[0]


# The window ---------------------------------------------------------------------------------------------------------

steps_of = st.dictionaries(st.sampled_from("abc"), realistic(), min_size=1)
shares = st.sampled_from([0.0, 0.01, 0.1, 1 / 3, 0.5, 0.9])


def cast(tensor: torch.Tensor, exponent: int) -> tuple[int, int, bool]:
    """Nonzero finite elements, how many of them PyTorch's cast of the scaled ones flushes, whether one overflows."""
    wide = tensor.to(torch.float64)
    wide = wide[wide.isfinite() & (wide != 0)]
    scaled = torch.ldexp(wide, torch.tensor(exponent))
    once = scaled.to(torch.float32)
    assume(torch.equal(once.to(torch.float64), scaled))  # else PyTorch would round twice
    after = once.half()
    return len(wide), int((after == 0).sum()), not bool(after.to(torch.float32).isfinite().all())


@given(steps_of, st.integers(-40, 40) | st.integers(0, 6))
def test_what_a_scale_does_is_what_pytorchs_cast_does(named: dict[str, torch.Tensor], exponent: int) -> None:
    window = scale_window({key: histogram_of(one) for key, one in named.items()}, share=0.1)
    told = window.at(2.0**exponent)
    real = {key: cast(one, exponent) for key, one in named.items()}
    nonzero, flushed = (sum(one[i] for one in real.values()) for i in (0, 1))
    pooled = flushed / nonzero if nonzero else 0.0
    assert told.pooled == pooled
    assert told.lost == max([pooled, *(gone / whole for whole, gone, _ in real.values() if whole >= FEW)])
    assert set(told.overflows) == {key for key, (_, _, over) in real.items() if over}
    assert window.at(2.0**exponent, at_least=True) == told


@given(steps_of, shares)
def test_the_ends_of_a_window_are_the_last_scales_at_which_pytorchs_cast_keeps_enough(
    named: dict[str, torch.Tensor], share: float
) -> None:
    window = scale_window({key: histogram_of(one) for key, one in named.items()}, share=share)
    assume(window.nonzero)

    def keeps(exponent: int) -> bool:
        real = [cast(one, exponent) for one in named.values()]
        whole, gone = sum(one[0] for one in real), sum(one[1] for one in real)
        return gone / whole <= share and all(g / w <= share for w, g, _ in real if w >= FEW)

    def fits(exponent: int) -> bool:
        return not any(cast(one, exponent)[2] for one in named.values())

    assert keeps(window.needed)
    assert not keeps(window.needed - 1)
    assert fits(window.allowed)
    assert not fits(window.allowed + 1)


@given(tensors("float32", shape=(2,), elements=edges("float16")))
def test_overflow_begins_at_the_tie_beyond_the_largest_value_at_every_scale(tensor: torch.Tensor) -> None:
    window = scale_window({"a": histogram_of(tensor)}, share=0.5)
    for exponent in (window.allowed, window.allowed + 1):
        over = cast(tensor, exponent)[2]
        assert over == (exponent > window.allowed)
        assert window.at(2.0**exponent).overflows == (("a",) if over else ())


def merge_histograms(steps: list[dict[str, GradientHistogram]]) -> dict[str, GradientHistogram]:
    merged: dict[str, GradientHistogram] = {}
    for step in steps:
        for name, histogram in step.items():
            merged[name] = merged.get(name, GradientHistogram()) + histogram
    return merged


@given(st.lists(st.dictionaries(st.sampled_from("abc"), realistic(), max_size=3), max_size=4), st.data())
def test_histograms_of_steps_merge_by_name_in_any_order(
    many: list[dict[str, torch.Tensor]], data: st.DataObject
) -> None:
    told = [{key: histogram_of(one) for key, one in step.items()} for step in many]
    whole = {
        key: by_fractions(torch.cat([step[key].flatten().to(torch.float64) for step in many if key in step]))
        for key in {key for step in many for key in step}
    }
    assert merge_histograms(data.draw(st.permutations(told))) == whole
    cut = data.draw(st.integers(0, len(told)))
    assert merge_histograms([merge_histograms(told[:cut]), merge_histograms(told[cut:])]) == whole


@given(steps_of, steps_of, shares)
def test_the_window_of_two_steps_lies_within_what_each_of_them_asks_for(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], share: float
) -> None:
    """What overflows in one step does so in both; the share that both lose lies between the shares of each."""
    told = [{key: histogram_of(tensor) for key, tensor in step.items()} for step in (one, other)]
    windows = [scale_window(step, share=share) for step in told]
    both = scale_window(merge_histograms(told), share=share)
    assert both.allowed == min(window.allowed for window in windows)
    pools = [scale_window({"all": sum(step.values(), GradientHistogram())}, share=share).needed for step in told]
    assert both.needed >= min(pools)
    if all(
        tensor.numel() == histogram.nonzero >= FEW
        for step, held in zip((one, other), told, strict=True)
        for tensor, histogram in zip(step.values(), held.values(), strict=True)
    ):
        assert both.needed <= max(window.needed for window in windows)
