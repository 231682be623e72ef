"""A suite that knows nothing of mixed precision."""

import torch
from my_package import Model
from my_package.codes import to_index


def test_each_code_has_an_index_of_its_own() -> None:
    bits = (torch.arange(4096)[:, None] >> torch.arange(12) & 1).float()
    assert len(to_index(bits).unique()) <= 4096


def test_the_model_returns_numbers() -> None:
    torch.manual_seed(0)
    assert Model()(torch.randn(4, 16)).isfinite().all()
