"""Promise: edges of bins that a cast of the module made equal are a finding, whatever else repeats is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ampcheck.audit import audit
from ampcheck.core.run import Verdict
from ampcheck.shadow import Shadow
from ampcheck.shadow.faults import TABLE

LOW = (torch.float16, torch.bfloat16)
FORMATS = pytest.mark.parametrize("low", LOW, ids=["float16", "bfloat16"])


def coarse(edges: Tensor, values: Tensor) -> bool:
    """Whether the edges of a table, of 16 bits already, are at fault, in either op."""
    found = []
    for look_up in (torch.bucketize, lambda v, e: torch.searchsorted(e, v)):
        with Shadow() as shadow:
            look_up(values, edges.float())
        found.append([fault.kind for fault in shadow.faults if fault.reaches] == [TABLE])
        assert found[-1] or not shadow.faults
    assert found[0] == found[1]
    return found[0]


def bins_of(low: torch.dtype) -> int:
    """More numbers than the format has from 1 to 16, four times as many."""
    return 32 * int(1 / torch.finfo(low).eps)


def values(low: float = -15, high: float = 15, seed: int = 0) -> Tensor:
    return low + (high - low) * torch.rand(400, generator=torch.Generator().manual_seed(seed))


TABLES: dict[str, Callable[[int], Tensor]] = {
    "uniform": lambda bins: torch.linspace(-15, 15, bins),
    "from 0 to 1": lambda bins: torch.linspace(0, 1, bins),
    "geometric": lambda bins: torch.logspace(-1, 1, bins),
    "quantiles": lambda bins: torch.randn(4 * bins, generator=torch.Generator().manual_seed(0)).sort().values[::4] + 3,
}


@FORMATS
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_finer_than_its_format_is_found(table: Callable[[int], Tensor], low: torch.dtype) -> None:
    edges = table(bins_of(low))
    within = values(float(edges[0]), float(edges[-1]))
    assert coarse(edges.to(low), within)
    assert not coarse(edges, within)


@FORMATS
def test_values_of_the_same_format_lose_nothing_by_the_table(low: torch.dtype) -> None:
    edges = torch.linspace(-15, 15, bins_of(low)).to(low)
    assert not coarse(edges, values().to(low))
    assert not coarse(edges, 1e-3 * values())  # where the table is fine enough


def _padded(low: torch.dtype) -> Tensor:
    edges = torch.linspace(-15, 15, 64).to(low)
    return torch.cat([edges[:1].expand(500), edges, edges[-1:].expand(500), torch.full((500,), torch.inf)])


def _padded_by_zeros(low: torch.dtype) -> Tensor:
    return torch.cat([torch.zeros(500), torch.linspace(0, 15, 64)]).to(low)


def _of_pixels(low: torch.dtype) -> Tensor:
    """Quantiles of integers between two powers of two, where the format holds each of them and no more."""
    top = int(2 / torch.finfo(low).eps)
    pixels = torch.randint(top // 2, top, (8 * top,), generator=torch.Generator().manual_seed(0))
    return pixels.sort().values.to(low)


def _of_counts(low: torch.dtype) -> Tensor:
    counts = torch.poisson(torch.full((4000,), 40.0), generator=torch.Generator().manual_seed(0))
    return counts.sort().values.to(low)


def _every_number(low: torch.dtype) -> Tensor:
    """A table of all numbers of the format from 1 to 16."""
    return torch.arange(0x3F80 if low is torch.bfloat16 else 0x3C00, 0x4180, dtype=torch.int16).view(low)


@FORMATS
@pytest.mark.parametrize("table", [_padded, _padded_by_zeros, _of_pixels, _of_counts, _every_number])
def test_edges_that_repeat_for_another_reason_are_silent(
    table: Callable[[torch.dtype], Tensor], low: torch.dtype
) -> None:
    edges = table(low)
    finite = edges[edges.isfinite()]
    assert not coarse(edges, values(float(finite[0]), float(finite[-1])))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, 4)
        self.register_buffer("edges", torch.linspace(-15, 15, 4095))

    def forward(self, x: Tensor) -> Tensor:
        edges = self.get_buffer("edges")
        out: Tensor = self.embed(torch.bucketize(x, edges.float()))
        return out


def test_a_cast_module_fails_at_the_line_that_looks_up_and_its_table_in_float32_passes() -> None:
    run = audit((Tokens().bfloat16(), (values(),)), compile=False)
    (found,) = [finding for finding in run.findings if finding.verdict is Verdict.FAIL]
    assert found.check == "precision-loss"
    assert found.where.line == Tokens.forward.__code__.co_firstlineno + 2
    assert "bins" in found.message
    model = Tokens()
    model.embed.bfloat16()
    assert not audit((model, (values(),)), compile=False).failed
