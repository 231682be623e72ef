"""Promise: looking for a loss scale by hand changes nothing, and raises nothing, in the user's backward pass."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampcheck


class Normalised(nn.Module):
    """The loss is scaled inside of a checkpoint, whose saved tensors are computed again when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.loss, x, use_reentrant=False)  # type: ignore[no-any-return]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().mean() * torch.tensor(128.0)


def trained(watched: bool) -> Normalised:
    torch.manual_seed(0)
    model = Normalised()
    optimizer = torch.optim.SGD(model.parameters(), 0.001)

    def steps() -> None:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).backward()
            optimizer.step()

    if watched:
        with ampcheck.watch(model, optimizer, fail_on="never"):
            steps()
    else:
        steps()
    return model


def test_a_checkpoint_computes_its_forward_as_often_as_without() -> None:
    plain, watched = trained(False), trained(True)
    assert int(watched.norm.num_batches_tracked) == int(plain.norm.num_batches_tracked)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True)
    )


def test_a_complex_factor_is_no_loss_scale() -> None:
    parameter = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], 0.1)
    with ampcheck.watch(optimizer, fail_on="never"):
        (parameter * torch.tensor(1j)).backward(torch.tensor(1 + 0j))
        optimizer.step()
    assert parameter.isfinite()
