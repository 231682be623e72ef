"""Promise: the way of an error is printed from the line that lost the digits to the tensor that is wrong."""

from __future__ import annotations

import pytest
import torch

import ampcheck
from ampcheck import UsageError


def test_the_line_that_lost_the_digits_comes_first() -> None:
    torch.manual_seed(0)
    with ampcheck.watch(fail_on="never") as seen:
        x = (torch.randn(8, 64) * 0.5 + 12).half()
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        scaled = x / (variance + 1e-5).sqrt()
        total = scaled.float().sum(-1)
    lines = seen.explain_error(total).splitlines()
    assert "aten::sub.Tensor" in lines[1]
    assert lines[2].strip().startswith("variance = ")
    assert lines[2].endswith("lost here")
    assert "aten::sum" in lines[-2]
    assert "total = " in lines[-1]
    assert "within its bound" in seen.explain_error(x)
    assert "has not seen" in seen.explain_error(torch.ones(2))


def test_a_watch_of_an_optimizer_names_what_to_do_instead() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ampcheck.watch(model, optimizer, exact=False, fail_on="never") as seen:
        pass
    with pytest.raises(UsageError, match="exact=True"):
        seen.explain_error(torch.ones(2))
