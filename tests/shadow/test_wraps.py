"""Integers that wrap around fail where they are read as numbers; arithmetic that wraps on purpose passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcheck.audit import audit
from ampcheck.core.run import Verdict

FORMATS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def _integers(dtype: torch.dtype, seed: int = 0, size: tuple[int, ...] = (16, 32)) -> Tensor:
    info, generator = torch.iinfo(dtype), torch.Generator().manual_seed(seed)
    return torch.randint(info.min, info.max + 1, size, generator=generator).to(dtype)


CODES, OTHERS = _integers(torch.int8), _integers(torch.int8, 1)
ZERO = torch.full((16, 1), -64, dtype=torch.int8)
BYTES, BYTES_2 = _integers(torch.uint8, 2), _integers(torch.uint8, 3)
X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def _checks(integers: Callable[[], Tensor], dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, str]]:
    """The failures about integers of a layer whose weights are these, by op."""
    x = X.to(dtype)
    run = audit(lambda: x @ (integers().to(dtype) * 0.01).T)
    assert not [f for f in run.of(Verdict.FAIL) if f.check != "integer-cast" and f.where.op]  # no other op is at fault
    return [(f.where.op, f.message) for f in run.of(Verdict.FAIL) if f.check == "integer-cast"]


def _in_place() -> Tensor:
    wrapped = CODES - ZERO
    wrapped.copy_(CODES)
    return wrapped


WRAPS = {
    "difference": lambda: CODES - ZERO,
    "number": lambda: CODES + 64,
    "sum": lambda: CODES + OTHERS,
    "product": lambda: CODES * OTHERS,
    "negative": lambda: -torch.full_like(CODES, -128),
    "views": lambda: (CODES - ZERO).reshape(-1).view(16, 32),
    "copies": lambda: torch.cat([(CODES - ZERO)[:8], OTHERS[8:]]).clone(),
    "twice": lambda: (CODES - ZERO) - ZERO,
    "sums of products": lambda: (CODES * OTHERS).cumsum(-1),
    "int32 too late": lambda: (CODES - ZERO).to(torch.int32),
    "int16": lambda: CODES.to(torch.int16) * 200 + torch.full((16, 32), 20000, dtype=torch.int16),
}
MEANT = {
    "int32 first": lambda: CODES.to(torch.int32) - ZERO,
    "int16 first": lambda: CODES.to(torch.int16) - ZERO,
    "in range": lambda: CODES // 2 - ZERO // 2,
    "there and back": lambda: (CODES - ZERO) + ZERO,
    "to unsigned": lambda: (CODES - (-128)).to(torch.uint8),
    "from unsigned": lambda: (BYTES - 128).to(torch.int8),
    "nibbles": lambda: ((BYTES & 15).to(torch.int8) ^ 8) - 8,
    "sign of nibbles": lambda: (BYTES.view(torch.int8) * 16) >> 4,
    "unsigned sum": lambda: BYTES + BYTES_2,
    "hue": lambda: BYTES + 77,
    "generator": lambda: (CODES * 77 + 33) * 77 + 33,
    "hash": lambda: ((CODES * 31 + OTHERS) * 31) ^ OTHERS,
    "bits": lambda: (CODES + OTHERS) & 15,
    "parity": lambda: (CODES + OTHERS) % 2,
    "written over": _in_place,
    "not used": lambda: torch.where(OTHERS != OTHERS, CODES - ZERO, OTHERS),
}


@pytest.mark.parametrize("name", WRAPS)
def test_integers_that_wrap_and_are_read_as_numbers_fail(name: str) -> None:
    ((op, message), *_) = _checks(WRAPS[name])
    assert op.split("::")[1].split(".")[0] in ("add", "sub", "mul", "neg")
    assert "integers must not wrap around" in message
    assert "it reaches" in message


@FORMATS
def test_they_fail_in_every_format(dtype: torch.dtype) -> None:
    ((_, message),) = _checks(WRAPS["difference"], dtype)
    assert "magnitudes up to 191 are meant" in message


@FORMATS
def test_they_fail_where_a_product_converts_them(dtype: torch.dtype) -> None:
    x, scale = X.to(dtype), torch.full((16, 1), 0.01, dtype=dtype)
    run = audit(lambda: x @ ((CODES - ZERO) * scale).T)
    assert "integer-cast" in {f.check for f in run.of(Verdict.FAIL)}


@pytest.mark.every(3)
@FORMATS
@pytest.mark.parametrize("name", MEANT)
def test_arithmetic_that_does_not_wrap_or_means_it_passes(name: str, dtype: torch.dtype) -> None:
    assert not _checks(MEANT[name], dtype)


def test_phases_that_wrap_around_a_period_pass() -> None:
    phase, step = _integers(torch.int16, 4), torch.arange(32, dtype=torch.int16) * 1000
    tone = audit(lambda: torch.sin((phase + step).float() * (torch.pi / 2**15)).bfloat16())
    assert not tone.failed


def test_what_wraps_and_reaches_nothing_passes() -> None:
    x = X.bfloat16()

    def masked() -> Tensor:
        weight = (CODES - ZERO).to(x.dtype) * 0.0 + OTHERS.to(x.dtype)
        return x @ weight.T

    assert not audit(masked).failed


@pytest.mark.parametrize("clamped", [False, True])
def test_a_conversion_beyond_the_range_of_the_integers_names_their_end(clamped: bool) -> None:
    """The scale of int8 codes, rounded to bfloat16, is too small: the largest code is 128."""
    x = torch.linspace(-1, 1, 512).reshape(16, 32).bfloat16()
    scale = torch.tensor(1 / 129).bfloat16()

    def quantised() -> Tensor:
        codes = (x / scale).round()
        return (codes.clamp(-128, 127) if clamped else codes).to(torch.int8).to(x.dtype) * scale

    found = [f for f in audit(quantised).of(Verdict.FAIL) if f.where.op == "aten::_to_copy"]
    assert bool(found) is not clamped
    for finding in found:
        assert "int8 has the integers from -128 to 127 only" in finding.message
        assert "clamp" in finding.hint
