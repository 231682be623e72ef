"""A small residual network."""

from torch import Tensor, nn


class Block(nn.Module):
    """A feed-forward network behind a norm, added to the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] to the same."""
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Two blocks and a head: [batch, 16] to [batch, 4]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] to [batch, 4]."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
