"""Promise: determinants and solutions are judged, in whichever order the rows of a matrix are factored."""

from __future__ import annotations

import pytest
import torch

from ampcheck.shadow import Shadow

FORMATS = (torch.bfloat16, torch.float16)


def coding_rate(z: torch.Tensor) -> torch.Tensor:
    """The log determinant of EMP-SSL and MCR2: it has as many eigenvalues of 1 as there are more features than rows."""
    rows, features = z.shape
    covariance = torch.einsum("bd,be->de", z, z)
    return torch.logdet(torch.eye(features) + features / (rows * 0.2) * covariance)


def embeddings(seed: int, rows: int, features: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [64, 256])
def test_a_log_determinant_is_exact_or_its_sign_is_a_decision(rows: int, dtype: torch.dtype) -> None:
    signs = 0
    for seed in range(6):
        z = embeddings(seed, rows, 128, dtype)
        wide = coding_rate(z.double())
        with Shadow() as shadow:
            with torch.autocast("cpu", dtype):
                rate = coding_rate(z)
            rate.item()
        if bool(rate.isnan()):
            signs += 1
            assert [fault.where.op for fault in shadow.faults] == ["aten::_linalg_slogdet"]
            assert "a decision of aten::eq.Scalar" in shadow.faults[0].reaches
        else:
            torch.testing.assert_close(shadow.exact(rate), wide, rtol=1e-9, atol=0)
            error = float((rate.double() - wide).abs() / wide.abs())
            assert bool(shadow.faults) <= (error > 0.003)
    assert (signs > 0) == (dtype is torch.bfloat16 and rows == 64)
    assert not shadow.unruled


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["det", "slogdet", "solve"])
def test_results_are_those_of_float64_though_another_row_comes_first(name: str, dtype: torch.dtype) -> None:
    """Two entries that are equal in 16 bits, of which the run takes the wrong one first."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 6, generator=generator)
    matrix[:2, 0] = torch.tensor([3.0, 3.0001])
    right = torch.randn(6, 2, generator=generator)
    functions = {
        "det": torch.linalg.det,
        "slogdet": lambda a: torch.linalg.slogdet(a).logabsdet,
        "solve": lambda a: torch.linalg.solve(a, right.to(a.dtype)),
    }
    with Shadow() as shadow:
        weight = matrix.clone().requires_grad_()
        result = functions[name](weight.to(dtype).float())
        result.sum().backward()
    torch.testing.assert_close(shadow.exact(result.detach()), functions[name](matrix.double()), rtol=1e-9, atol=1e-12)
    assert weight.grad is not None
    assert bool(shadow.exact(weight.grad).isfinite().all())
    assert shadow.faults == ()
    assert not shadow.unruled


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_equal_zeros_decide_nothing_by_themselves(dtype: torch.dtype) -> None:
    """A difference that is zero in 16 bits alone turns an equation, honestly."""
    x = torch.rand(64, generator=torch.Generator().manual_seed(0)) * 1e-3 + 1
    with Shadow() as shadow:
        low = x.to(dtype)
        (low == low.roll(1)).sum().item()
        (low != 1).sum().item()
    assert shadow.faults == ()
