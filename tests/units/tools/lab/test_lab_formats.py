"""What the lab says of numbers: bits, spacings, exp, underflow, stagnation; the oracles are not ampcheck's own."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.formats import FORMATS, format_of
from ampcheck.core.run import Finding, Verdict
from ampcheck.health import SubnormalSupport
from ampcheck.tools.lab import anatomy, exp, stagnation, ulp, underflow

NUMPY = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    **{name: getattr(ml_dtypes, name) for name in FORMATS if hasattr(ml_dtypes, name)},
}


def verdicts(findings: list[Finding]) -> list[str]:
    return [finding.verdict.value for finding in findings]


def failures(findings: list[Finding]) -> list[str]:
    return [finding.message for finding in findings if finding.verdict in (Verdict.FAIL, Verdict.WARN)]


# Anatomy --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bits() -> anatomy.AnatomyStats:
    return anatomy.measure_anatomy()


@pytest.mark.parametrize("name", [name for name in NUMPY if name != "float8_e8m0fnu"])
def test_the_bits_shown_are_those_that_numpy_and_ml_dtypes_store(bits: anatomy.AnatomyStats, name: str) -> None:
    for row in bits.rows:
        if row.format == name:
            with np.errstate(all="ignore"):
                stored = np.array([row.value], dtype=np.float64).astype(NUMPY[name])
            shown = int(row.sign + row.exponent + row.mantissa, 2)
            width = 4 if name == "float4_e2m1fn" else 8 * stored.dtype.itemsize
            if math.isfinite(row.stored):
                assert shown == int.from_bytes(stored.tobytes(), "little") & ((1 << width) - 1)
                assert row.stored == float(stored[0])


def test_the_fields_shown_give_the_value_shown(bits: anatomy.AnatomyStats) -> None:
    for row in bits.rows:
        form = FORMATS[row.format]
        exponent, mantissa = int(row.exponent, 2), int(row.mantissa or "0", 2)
        if not math.isfinite(row.stored):
            continue
        if exponent or not form.has_subnormals:
            value = (1 + Fraction(mantissa, 2**form.mantissa_bits)) * Fraction(2) ** (exponent - form.bias)
        else:
            value = Fraction(mantissa, 2**form.mantissa_bits) * Fraction(2) ** (1 - form.bias)
        assert row.stored == float((-1) ** int(row.sign or "0") * value)


def test_casts_are_right_and_a_wrong_one_is_told(bits: anatomy.AnatomyStats) -> None:
    assert failures(anatomy.check_anatomy(bits)) == []
    wrong = tuple(replace(row, cast=3.0) if row.format == "bfloat16" else row for row in bits.rows)
    found = anatomy.check_anatomy(replace(bits, rows=wrong))
    assert found[0].verdict is Verdict.FAIL
    assert "bfloat16" in found[0].message


def test_a_cast_that_loses_the_subnormals_of_float16_is_told(bits: anatomy.AnatomyStats) -> None:
    edge = FORMATS["float16"].smallest_normal
    flushed = tuple(
        replace(row, cast=0.0) if row.format == "float16" and row.cast and abs(row.cast) < edge else row
        for row in bits.rows
    )
    assert anatomy.check_anatomy(replace(bits, rows=flushed))[0].verdict is Verdict.FAIL


def test_a_device_that_flushes_subnormals_is_warned_of(bits: anatomy.AnatomyStats) -> None:
    flushing = {"float32": SubnormalSupport("cpu", "float32", False, True, True)}
    found = anatomy.check_anatomy(replace(bits, subnormals={"cpu": flushing}))[1]
    assert found.verdict is Verdict.WARN
    assert "float32, multiply" in found.message


def test_the_cpu_stands_beside_another_device_and_is_not_judged_for_it(bits: anatomy.AnatomyStats) -> None:
    flushing = {"float32": SubnormalSupport("cpu", "float32", False, True, True)}
    kept = {"float32": SubnormalSupport("cuda", "float32", True, True, None)}
    both = replace(bits, device="cuda", subnormals={"cuda": kept, "cpu": flushing})
    assert anatomy.check_anatomy(both)[1].verdict is Verdict.PASS
    table = anatomy.subnormals_table(both)
    assert table.rows == [("float32", "cuda", True, True, None), ("float32", "cpu", False, True, True)]


@pytest.mark.parametrize("flushing", [False, True])
def test_a_cpu_that_is_told_to_flush_loses_its_subnormals_and_is_set_back(flushing: bool) -> None:
    if not torch.set_flush_denormal(flushing):
        pytest.skip("this CPU cannot be told")
    try:
        seen = anatomy.measure_anatomy().subnormals
        tiny = torch.full((1,), 2.0**-126).mul(0.5)
    finally:
        torch.set_flush_denormal(False)
    assert set(seen) == {"cpu", anatomy.FLUSHING}
    assert seen[anatomy.FLUSHING]["float32"].multiply is False
    assert seen["cpu"]["float32"].multiply is not flushing
    assert bool(tiny.view(torch.int32) == 0) == flushing


def test_nothing_looked_at_is_no_pass() -> None:
    assert "pass" not in verdicts(anatomy.check_anatomy(anatomy.AnatomyStats("cpu", (), {})))
    assert "pass" not in verdicts(ulp.check_ulps(ulp.UlpStats("cpu", {}, (), {})))


# Spacing --------------------------------------------------------------------------------------------------------------


def test_the_next_number_is_one_ulp_away_and_a_wrong_spacing_is_told() -> None:
    stats = ulp.measure_ulps()
    assert failures(ulp.check_ulps(stats)) == []
    assert sum(stats.compared.values()) > 100
    wrong = replace(stats, wrong=(("float16", 1.0, 0.5, 0.25),))
    assert verdicts(ulp.check_ulps(wrong)) == ["fail"]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_the_chart_of_spacings_shows_those_of_numpy_and_ml_dtypes(name: str) -> None:
    (line,) = [series for series in ulp.ulp_chart().series if series.label == name]
    assert line.x[0] == -10.0
    for exponent, spacing in zip(line.x[::2], line.y[::2], strict=True):
        one = np.array([2.0**exponent], dtype=NUMPY[name])
        last = np.array([ml_dtypes.finfo(NUMPY[name]).max], dtype=NUMPY[name])
        assert 2.0**spacing == float(np.nextafter(one, last)[0]) - float(one[0])


def test_bfloat16_has_no_odd_integers_from_256_on_and_float16_none_from_2048_on() -> None:
    for name, edge in (("bfloat16", 256), ("float16", 2048)):
        odd = torch.arange(edge + 1, 2 * edge, 2)
        assert not bool((odd.to(getattr(torch, name)).long() == odd).any())
        assert f"{edge:,}" in {row[0]: str(row[1]) for row in ulp.tables()[1].rows}[name]


# exp ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def edges() -> exp.ExpStats:
    return exp.measure_exp()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_the_last_finite_exp_is_that_of_all_bit_patterns(name: str) -> None:
    codes = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(getattr(torch, name))
    values = codes[codes.isfinite()].double()
    last = values[values.exp().to(torch.float32).to(getattr(torch, name)).isfinite()].max()
    assert exp.last_finite(format_of(name)) == float(last)


@given(st.sampled_from(["float32", "bfloat16", "float16"]), st.integers(0, 2**31), st.booleans())
def test_what_is_printed_of_exp_tells_neighbours_of_a_format_apart(name: str, code: int, negative: bool) -> None:
    form = format_of(name)
    code %= form.encode(form.max)
    sign = -1 if negative else 1
    one, other = (sign * form.decode(number) for number in (code, code + 1))
    assert exp.distinct(one, form) != exp.distinct(other, form)
    assert form.round(float(exp.distinct(one, form))) == one


def test_the_last_finite_place_of_exp_is_told_apart_from_the_first_infinite_one(edges: exp.ExpStats) -> None:
    table = exp.edges_table(edges)
    assert [row[0] for row in table.rows if row[-1] == "measured"] == ["float32", "bfloat16", "float16"]
    for name, _, log, last, beyond, _ in table.rows:
        assert float(str(last)) < float(str(log)) <= float(str(beyond)), name
        form, numpy = FORMATS[str(name)], NUMPY.get(str(name), np.float32)
        x, over = form.round(float(str(last))), form.round(float(str(beyond)))
        assert form.encode(over) == form.encode(x) + 1
        with np.errstate(over="ignore"):
            assert np.isfinite(np.exp(np.array(x)).astype(numpy)), name
            rounded = np.exp(np.array(over)).astype(numpy)
        # numpy has no tf32: what lies half a spacing above its largest value, (2 - 2^-10) 2^127, is infinite there.
        assert rounded >= (2 - 2**-11) * 2.0**127 if name == "tf32" else not np.isfinite(rounded), name


def test_exp_and_the_naive_functions_do_what_was_expected(edges: exp.ExpStats) -> None:
    assert failures(exp.check_exp(edges)) == []
    assert len(edges.edges) == 3


def test_naive_softplus_is_zero_where_one_plus_exp_is_one(edges: exp.ExpStats) -> None:
    x = np.array(edges.inputs["float16"])
    for value, error in zip(x, edges.softplus["float16", "naive"], strict=True):
        with np.errstate(all="ignore"):
            naive = np.log(np.float16(1) + np.exp(np.float16(value)))
        if naive == 0:
            assert error == 1.0
        if np.isinf(naive):
            assert math.isnan(error)


def test_an_exp_that_ends_early_a_naive_form_that_does_not_and_a_stable_one_that_is_off_are_told(
    edges: exp.ExpStats,
) -> None:
    early = {name: last / 2 for name, last in edges.edges.items()}
    assert len(failures(exp.check_exp(replace(edges, edges=early)))) == 3
    good = {**edges.softplus, ("float16", "naive"): edges.softplus["float16", "stable"]}
    assert len(failures(exp.check_exp(replace(edges, softplus=good)))) == 1
    bad = {**edges.softplus, ("float16", "stable"): edges.softplus["float16", "naive"]}
    assert len(failures(exp.check_exp(replace(edges, softplus=bad)))) == 1


def test_a_stable_softmax_that_is_off_by_more_than_its_roundings_is_told(edges: exp.ExpStats) -> None:
    for name in ("float32", "bfloat16", "float16"):
        last = edges.softmax[name, "stable"][-1]
        for wrong in (last * (1 - 20 * format_of(name).unit_roundoff), math.nan):
            off = {**edges.softmax, (name, "stable"): (*edges.softmax[name, "stable"][:-1], wrong)}
            (told,) = failures(exp.check_exp(replace(edges, softmax=off)))
            assert f"softmax of PyTorch of 0, 20, 40, 80 in {name}" in told


def test_naive_softmax_is_nan_in_float16_and_torch_is_right(edges: exp.ExpStats) -> None:
    exact = np.exp(np.array(exp.LOGITS) - 80.0)
    exact /= exact.sum()
    assert any(map(math.isnan, edges.softmax["float16", "naive"]))
    assert edges.softmax["float16", "stable"] == pytest.approx(exact, rel=2**-10, abs=2**-24)
    assert edges.exact == pytest.approx(exact)


# Underflow ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lost() -> underflow.UnderflowStats:
    return underflow.measure_underflow()


def test_float16_flushes_every_magnitude_at_or_below_2_to_the_minus_25_and_bfloat16_none(
    lost: underflow.UnderflowStats,
) -> None:
    values = underflow.magnitudes().numpy().astype(np.float64)
    for cast in lost.casts:
        wanted = int((values * cast.scale <= 2.0**-25).sum()) if cast.format == "float16" else 0
        with np.errstate(all="ignore"):
            own = (values * cast.scale).astype(np.float32).astype(NUMPY[cast.format])
        assert cast.zeros == cast.expected == wanted == int((own == 0).sum())
        small = (own != 0) & (np.abs(own.astype(np.float64)) < float(ml_dtypes.finfo(NUMPY[cast.format]).tiny))
        assert cast.subnormal == int(small.sum())
    assert failures(underflow.check_underflow(lost)) == []


def test_the_share_that_is_lost_is_that_of_the_threshold_among_powers_of_ten() -> None:
    share = (math.log10(2.0**-25) + 12) / 12
    assert underflow.expected_share("float16", 1.0) == pytest.approx(share)
    assert underflow.expected_share("float16", 2.0**13) == pytest.approx((math.log10(2.0**-38) + 12) / 12)
    assert underflow.expected_share("bfloat16", 1.0) == 0.0


def test_the_histogram_counts_every_magnitude_in_its_binade(lost: underflow.UnderflowStats) -> None:
    exponents = np.frexp(underflow.magnitudes().numpy())[1] - 1
    found, counts = np.unique(exponents, return_counts=True)
    assert dict(lost.histograms["unscaled"]) == dict(zip(found.tolist(), counts.tolist(), strict=True))
    chart = underflow.histogram_chart(lost)
    least = float(ml_dtypes.finfo(ml_dtypes.bfloat16).smallest_subnormal)
    assert f"{int(found.min()) - int(math.log2(least))} powers of two more" in chart.note
    for series in chart.series:
        assert len(series.x) == len(series.y) + 1
        assert sum(series.y) == underflow.COUNT


def test_a_loss_scale_saves_the_gradients_of_a_deep_float16_net(lost: underflow.UnderflowStats) -> None:
    first = lost.layers[0]
    assert first.plain > 0.9 * first.nonzero
    assert sum(layer.scaled for layer in lost.layers) < 0.01 * sum(layer.nonzero for layer in lost.layers)
    assert all(layer.infinite == 0 for layer in lost.layers)


def test_a_cast_that_flushes_more_and_a_scale_that_saves_nothing_are_told(lost: underflow.UnderflowStats) -> None:
    more = tuple(replace(cast, zeros=cast.zeros + 1) for cast in lost.casts)
    assert len(failures(underflow.check_underflow(replace(lost, casts=more)))) == len(more)
    useless = tuple(replace(layer, scaled=layer.plain) for layer in lost.layers)
    assert len(failures(underflow.check_underflow(replace(lost, layers=useless)))) == 1


def test_what_is_called_subnormal_is_what_the_cast_of_the_device_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.Tensor.to

    def flushing(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        out = before(self, *args, **kwargs)
        if torch.float16 in args and out.dtype is torch.float16:
            out = out.where(before(out, torch.float64).abs() >= FORMATS["float16"].smallest_normal, 0)
        return out

    monkeypatch.setattr(torch.Tensor, "to", flushing)
    seen = underflow.measure_underflow()
    assert {cast.subnormal for cast in seen.casts if cast.format == "float16"} == {0}
    assert failures(underflow.check_underflow(seen)) != []


# Stagnation -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moved() -> stagnation.StagnationStats:
    return stagnation.measure_stagnation()


def exactly(name: str, way: str) -> float:
    """The weight after all updates, each operation in exact rationals and rounded once to the format."""
    form = format_of(name)

    def rounded(x: Fraction) -> Fraction:
        exponent = math.frexp(float(x))[1] - 1 - form.mantissa_bits
        spacing = max(Fraction(2) ** exponent, Fraction(form.smallest_subnormal))
        return round(x / spacing) * spacing  # Python rounds a Fraction to the nearest, ties to even

    weight, missing, update = Fraction(1), Fraction(0), Fraction(stagnation.UPDATE)
    for _ in range(stagnation.STEPS):
        if way == stagnation.KAHAN:
            wanted = rounded(rounded(update) + missing)
            reached = rounded(weight + wanted)
            missing = rounded(wanted - rounded(reached - weight))
            weight = reached
        else:
            weight = rounded(weight + update)
    return float(weight)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", [stagnation.UNCURED, stagnation.KAHAN])
def test_a_narrow_weight_goes_where_exact_rationals_say(moved: stagnation.StagnationStats, name: str, way: str) -> None:
    assert moved.paths[name, way][-1] == exactly(name, way)


def test_two_thousand_updates_move_a_bfloat16_weight_not_at_all_and_with_a_float32_master_they_do(
    moved: stagnation.StagnationStats,
) -> None:
    assert set(moved.paths["bfloat16", stagnation.UNCURED]) == {1.0}
    assert set(moved.paths["float16", stagnation.UNCURED]) == {1.0}
    master = torch.tensor(1.02, dtype=torch.float32).bfloat16()
    assert moved.paths["bfloat16", stagnation.MASTER][-1] == pytest.approx(float(master), abs=2**-8)
    assert failures(stagnation.check_stagnation(moved)) == []


def test_stochastic_rounding_is_right_on_average(moved: stagnation.StagnationStats) -> None:
    for name in ("bfloat16", "float16"):
        spread = math.sqrt(stagnation.STEPS * stagnation.UPDATE * format_of(name).eps)
        assert abs(moved.paths[name, stagnation.STOCHASTIC][-1] - 1.02) <= 5 * spread / 8
        assert 0.5 * spread < moved.spread[name] < 2 * spread


def test_a_weight_that_moves_though_it_should_not_and_a_cure_that_does_not_cure_are_told(
    moved: stagnation.StagnationStats,
) -> None:
    paths = {**moved.paths, ("bfloat16", stagnation.UNCURED): (1.0, 1.02), ("float16", stagnation.KAHAN): (1.0, 1.0)}
    assert len(failures(stagnation.check_stagnation(replace(moved, paths=paths)))) == 2
