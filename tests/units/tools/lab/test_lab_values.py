"""`ampcheck lab anatomy --value`: what counts as a number, and bits that stand under each other."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from ampcheck.cli.main import main
from ampcheck.core.formats import FORMATS
from ampcheck.tools.lab import anatomy

STORED = {
    "float64": np.float64,
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["lab", "anatomy", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def fields(lines: list[str]) -> dict[str, list[str]]:
    """Sign, exponent and mantissa of each format, by the columns of the heading alone."""
    heading = next(line for line in lines if line.split() == ["format", "sign", "exponent", "mantissa"])
    starts = [heading.index(word) for word in heading.split()] + [None]
    found: dict[str, list[str]] = {}
    name = ""
    for line in lines[lines.index(heading) + 2 :]:
        first, *bits = ("".join(line[a:b].split()) for a, b in itertools.pairwise(starts))
        name = first or name
        if name not in FORMATS:
            break
        found[name] = [old + new for old, new in zip(found.get(name, [""] * 3), bits, strict=True)]
    return found


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("-1e-5", -1e-5),
        ("0x1.8p3", 12.0),
        ("-0X1P-3", -0.125),
        ("-0.0", -0.0),
        ("-.5", -0.5),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("-Infinity", -math.inf),
    ],
)
def test_the_bits_of_any_number_stand_under_each_other(
    text: str, value: float, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = shown(capsys, "--value", text)
    assert all(len(line) <= int(columns) for line in lines)
    assert f"The bits of {text}" in lines
    found = fields(lines)
    for name, dtype in STORED.items():
        with np.errstate(all="ignore"):
            stored = np.array([value], dtype=np.float64).astype(dtype)
        bits = f"{int.from_bytes(stored.tobytes(), 'little'):0{8 * stored.dtype.itemsize}b}"
        cut = 1 + FORMATS[name].exponent_bits
        assert found[name] == [bits[:1], bits[1:cut], bits[cut:]], name
    # A format without signs has no code for a negative number, and none for zero.
    assert ("float8_e8m0fnu" in found) == (value > 0)


def test_nan_has_bits_where_a_format_has_a_nan(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--value", "-nan")
    found = fields(lines)
    assert set(found) == {name for name, form in FORMATS.items() if form.nan != "none"}
    for name in STORED:
        _, exponent, mantissa = found[name]
        assert set(exponent) == {"1"}
        assert "1" in mantissa


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "-0.0", "0", "1e-310", "1e308", "0x1p-1074"])
def test_the_devices_casts_of_the_unusual_agree_with_the_bits(text: str) -> None:
    stats = anatomy.measure_anatomy(values={text: float.fromhex(text) if "x" in text else float(text)})
    assert [row for row in stats.rows if row.cast is not None and not row.right] == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("1e400", "inf for infinity"),
        ("-1e400", "inf for infinity"),
        ("0x1p5000", "inf for infinity"),
        ("1e-400", "rounds to zero"),
        ("0x1p-2000", "rounds to zero"),
        ("abc", "'abc'"),
        ("", "''"),
        ("1,5", "'1,5'"),
        ("0x", "'0x'"),
    ],
)
def test_what_is_no_number_of_float64_gets_one_sentence(
    text: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "anatomy", f"--value={text}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert word in err


def test_a_value_beside_another_experiment_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    for names in ([], ["ulp"], ["anatomy", "ulp"]):
        assert main(["lab", *names, "--value", "-inf"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "ampcheck lab anatomy --value X" in line


def test_several_values_have_a_table_each_and_what_they_stand_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--value", "1e-8", "--value", "inf")
    assert [line for line in lines if line.startswith("The bits of ")] == ["The bits of 1e-8", "The bits of inf"]
    rows = [line.split() for line in lines]
    assert ["float16", "1e-8", "0", "1"] in rows
    assert ["float16", "inf", "inf", "0"] in rows
    assert ["float4_e2m1fn", "inf", "6", "everything"] in rows
