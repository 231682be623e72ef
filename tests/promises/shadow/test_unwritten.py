"""Memory that a kernel leaves unwritten is no value: what it keeps for its own backward is not judged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from ampcheck import Run, Verdict, watch


@pytest.fixture(autouse=True)
def nan_where_nothing_is_written() -> Iterator[None]:
    """In this mode PyTorch fills new memory with NaN, which every run may find there."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(deterministic)


def alarms(run: Run) -> list[str]:
    return [str(f) for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_paths_that_ctc_never_takes_are_silent(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, lengths = torch.nn.Linear(8, 6), torch.tensor([20, 18, 15])
    with watch(fail_on="never") as watched:
        with torch.autocast("cpu", dtype):
            scores = layer(torch.randn(20, 3, 8))
        targets = torch.randint(1, 6, (3, 5))
        F.ctc_loss(scores.float().log_softmax(-1), targets, lengths, torch.tensor([5, 4, 3])).backward()
    assert not alarms(watched.run)
