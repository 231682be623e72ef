"""Models in float32 whose sensitive parts autocast runs in 16 bits: the twin switches it off."""

import torch
from torch import nn

from handwritten.case import BFLOAT16, FLOAT16, LOW, autocast, case, enter, enter_module, wide


class PoissonHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Linear(16, 4)
        nn.init.constant_(self.rate.bias, 12.0)

    def forward(self, x):
        return torch.exp(self.rate(x))  # lost here


@case("overflow", FLOAT16, parts=(PoissonHead,))
def rate_of_poisson_head(dtype):
    """exp of a linear layer's output of 12: autocast on the CPU leaves exp in the format of its input."""
    torch.manual_seed(0)
    head = enter_module(PoissonHead(), wide(dtype))
    with autocast(dtype):
        return head(enter(0.1 * torch.randn(8, 16), wide(dtype))).to(wide(dtype))


@case("cancellation", LOW)
def nearest_code_under_autocast(dtype):
    """Vector quantisation: |z|^2 - 2 z c + |c|^2 with the product in 16 bits, codes that share a mean of 5."""
    torch.manual_seed(0)
    mean = enter(5 + torch.randn(32), wide(dtype))
    codes = mean + enter(0.1 * torch.randn(24, 32), wide(dtype))
    latents = mean + enter(0.1 * torch.randn(12, 32), wide(dtype))
    with autocast(dtype):
        product = latents @ codes.mT  # lost here
        squares = latents.square().sum(-1, keepdim=True) + codes.square().sum(-1)
        return squares - 2 * product  # lost here


@case("cancellation", LOW)
def covariance_under_autocast(dtype):
    """x^T x / n - m m^T, as covariance losses have it, with products in 16 bits."""
    torch.manual_seed(0)
    x = enter(4 + 0.1 * torch.randn(256, 8), wide(dtype))
    mean = x.mean(0, keepdim=True)
    with autocast(dtype):
        return x.mT @ x / 256 - mean.mT @ mean  # lost here


class Homography(nn.Module):
    def forward(self, matrix, points):
        ones = torch.ones_like(points[:, :1])
        warped = torch.cat([points, ones], -1) @ matrix.mT  # lost here
        return warped[:, :2] / warped[:, 2:]


@case("cancellation", LOW, parts=(Homography,))
def optical_flow_of_homography(dtype):
    """The flow that a small rotation makes in an image of 1920 pixels: warped minus original coordinates."""
    torch.manual_seed(0)
    matrix = torch.eye(3) + torch.tensor([[0.0, -4e-4, 0.3], [4e-4, 0.0, -0.2], [0.0, 0.0, 0.0]])
    points = (torch.rand(64, 2) * torch.tensor([1920.0, 1080.0])).round()
    with autocast(dtype):
        return Homography()(matrix.to(wide(dtype)), points.to(wide(dtype))) - points  # lost here


class ResidualPolicy(nn.Module):
    """A value head in 16 bits that predicts returns of 800; the advantage is a difference of two of them."""

    def __init__(self):
        super().__init__()
        self.body, self.value = nn.Linear(8, 16), nn.Linear(16, 1)
        nn.init.constant_(self.value.bias, 800.0)

    def forward(self, state):
        return self.value(torch.tanh(self.body(state))).squeeze(-1)  # lost here


@case("absorption", LOW, parts=(ResidualPolicy,))
def temporal_difference(dtype):
    """Values of 800 come out of a linear layer in 16 bits; the temporal difference is below their spacing."""
    torch.manual_seed(0)
    policy = enter_module(ResidualPolicy(), wide(dtype))
    states = enter(torch.randn(33, 8), wide(dtype))
    with autocast(dtype):
        values = policy(states).to(wide(dtype))
    return values[1:] - values[:-1]  # lost here


@case("flush", FLOAT16)
def gradient_through_autocast_without_scale(dtype):
    """Backward of a mean over many tokens without GradScaler: the gradients inside of autocast vanish."""
    torch.manual_seed(0)
    first = enter_module(nn.Linear(8, 8), wide(dtype))
    second = enter_module(nn.Linear(8, 8), wide(dtype))
    x = enter(torch.randn(2048, 8), wide(dtype))
    with autocast(dtype):
        output = second(torch.tanh(first(x)))  # lost here
        loss = 1e-5 * output.to(wide(dtype)).square().mean()  # lost here
    loss.backward()  # lost here
    return first.weight.grad


@case("decision", BFLOAT16)
def routing_of_close_experts(dtype):
    """A router's logits have an offset of 40 from its bias in 16 bits: bfloat16 cannot tell the experts apart."""
    torch.manual_seed(0)
    router = nn.Linear(16, 8)
    nn.init.zeros_(router.weight)
    router.weight.data[:, 0] = torch.linspace(-0.4, 0.4, 8)[torch.randperm(8)]
    nn.init.constant_(router.bias, 40.0)
    x = torch.ones(32, 16)
    x[16:, 0] = -1.0
    weight, bias = enter(router.weight.data, wide(dtype)), router.bias.data.to(wide(dtype))
    with autocast(dtype):
        logits = nn.functional.linear(x.to(wide(dtype)), weight, bias)  # lost here
        return logits.topk(2).indices  # lost here
