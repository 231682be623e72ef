"""Promise: numbers computed from bits of another format are found; bits that are only carried in it are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcheck.audit import audit
from ampcheck.core.run import Verdict
from ampcheck.shadow import Shadow

HALF, BRAIN, WORDS, BYTES = torch.float16, torch.bfloat16, torch.int16, torch.uint8
E4M3, E5M2, E4M3_HIP = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz


def _failures(read: Callable[[Tensor], Tensor]) -> list[str]:
    """The messages of failures of a product with what is read of keys, which are bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 16, generator=generator).bfloat16() for rows in (12, 16))
    return [f.message for f in audit(lambda: x @ read(x @ weight.T).to(BRAIN).T).of(Verdict.FAIL)]


def _copied(cache: torch.dtype, bits: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Keys that a kernel copies to a part of a cache, bit by bit."""

    def read(keys: Tensor) -> Tensor:
        memory = torch.zeros(64, 16, dtype=cache)
        memory.view(bits)[: len(keys)] = keys.view(bits)
        return memory[: len(keys)]

    return read


def _of_bytes(written: torch.dtype, read: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Keys in a cache of bytes, of which two places have their own opinion."""

    def through(keys: Tensor) -> Tensor:
        memory = torch.zeros(64, 16 * written.itemsize, dtype=BYTES)
        memory.view(written)[: len(keys)] = keys.to(written)
        return memory.view(read)[: len(keys)]

    return through


def _rewritten(keys: Tensor) -> Tensor:
    keys = keys * 1.1
    keys.view(HALF)[:6].copy_(keys[6:])
    return keys


WRONG = {
    "viewed": (lambda keys: keys.view(HALF), BRAIN, HALF),
    "viewed through integers": (lambda keys: keys.view(WORDS).view(HALF), BRAIN, HALF),
    "moved, then read": (lambda keys: keys.view(HALF)[torch.arange(12)].clone(), BRAIN, HALF),
    "read by an op that mixes": (lambda keys: keys.view(HALF).softmax(-1), BRAIN, HALF),
    "words copied to a part": (_copied(HALF, WORDS), BRAIN, HALF),
    "bytes copied to a part": (_copied(HALF, BYTES), BRAIN, HALF),
    "half written as the other": (_rewritten, HALF, BRAIN),
    "bytes, bfloat16 as float16": (_of_bytes(BRAIN, HALF), BRAIN, HALF),
    "bytes, float16 as bfloat16": (_of_bytes(HALF, BRAIN), HALF, BRAIN),
    "bytes, two formats of 8 bits": (_of_bytes(E4M3, E5M2), E4M3, E5M2),
    "bits of large numbers are NaN": (lambda keys: (keys * 1e37).view(HALF), BRAIN, HALF),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("name", WRONG)
def test_bits_that_are_read_in_another_format_are_found_and_named(name: str) -> None:
    read, written, format_read = WRONG[name]
    names = [str(dtype).removeprefix("torch.") for dtype in (written, format_read)]
    assert any(f"bits of {names[0]} numbers are read as {names[1]};" in message for message in _failures(read))


def _arena(keys: Tensor) -> Tensor:
    """One pool of bytes with parts of either format, written and read by turns."""
    memory = torch.empty(64 * 32, dtype=BYTES)
    brain, half = memory[:1024].view(BRAIN).view(-1, 16)[:12], memory[1024:].view(HALF).view(-1, 16)[:12]
    brain.copy_(keys)
    half.copy_(keys.half() * 0.7)
    product = brain * half.to(BRAIN)
    half.mul_(1.3)
    return product * half.to(BRAIN)


def _in_its_own_memory(keys: Tensor) -> Tensor:
    keys = keys * 1.1
    half = keys.view(HALF)
    half.copy_(keys)
    return half


def _of_a_pool(keys: Tensor) -> Tensor:
    """A part of memory that was allocated in the other format."""
    memory = torch.empty(64, 16, dtype=HALF).view(BRAIN)[:12]
    return memory.copy_(keys).mul_(1.1)


def _in_a_container(keys: Tensor) -> Tensor:
    """Weights from a file that has no bfloat16, moved as what they are not."""
    contained = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16().view(HALF)
    return keys * contained[torch.arange(12)].clone().view(BRAIN)


def _stale(keys: Tensor) -> Tensor:
    """Memory is used again, and what is left of another format is masked."""
    memory = keys * 1.1
    half = memory.view(HALF)
    half[:6] = keys[:6].half()
    return torch.where(torch.arange(12)[:, None] < 6, half * 2, 0.0)


def _between_dialects(keys: Tensor) -> Tensor:
    """Formats of one layout, whose values differ by two, which the scale takes up."""
    bits = (keys * 4).to(E4M3).view(torch.int8)
    return bits.masked_fill(bits == -128, 0).view(E4M3_HIP).to(BRAIN) * (2 / 4)


def _inverse_root(keys: Tensor) -> Tensor:
    y = keys.float().abs() + 0.1
    root = (0x5F3759DF - (y.view(torch.int32) >> 1)).view(torch.float32)
    for _ in range(3):
        root = root * (1.5 - 0.5 * y * root * root)
    return root


RIGHT = {
    "words copied": _copied(BRAIN, WORDS),
    "bytes copied": _copied(BRAIN, BYTES),
    **{f"bytes read as written, {dtype}": _of_bytes(dtype, dtype) for dtype in (HALF, BRAIN, E4M3, E5M2)},
    "carried": lambda keys: torch.cat([keys.view(HALF)] * 2)[torch.arange(12)].clone().view(BRAIN),
    "sorted as the other": lambda keys: keys.view(HALF).sort(-1).values.view(BRAIN),
    "widened by bits": lambda keys: (keys.view(WORDS).int() << 16).view(torch.float32),
    "arena": _arena,
    "converted in its memory": _in_its_own_memory,
    "pool": _of_a_pool,
    "container": _in_a_container,
    "stale": _stale,
    "dialects": _between_dialects,
    "inverse root": _inverse_root,
}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", RIGHT)
def test_bits_that_are_carried_or_meant_are_silent(name: str) -> None:
    assert not _failures(RIGHT[name])


def test_what_is_carried_keeps_its_companions() -> None:
    x, cache = torch.randn(8, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.zeros(10).bfloat16()
    with Shadow() as shadow:
        y = x * 1.1
        back = y.view(HALF).clone().view(BRAIN) * 1
        cache *= 1
        cache.view(WORDS)[1:9] = y.view(WORDS)
    assert not torch.equal(shadow.exact(y), y.double())
    assert torch.equal(shadow.exact(back), shadow.exact(y))
    assert torch.equal(shadow.exact(cache)[1:9], shadow.exact(y))
