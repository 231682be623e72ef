"""Gradients: clipping, scaling, accumulation over micro-batches."""

import torch
from torch import nn

from handwritten.case import BFLOAT16, FLOAT16, LOW, case, enter, enter_module, wide


def clip_(gradients, limit):
    total = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()  # lost here
    for gradient in gradients:
        gradient.mul_((limit / (total + 1e-6)).clamp(max=1.0))
    return gradients


@case("overflow", FLOAT16, parts=(clip_,))
def clipping_by_squares(dtype):
    """Gradients with entries of 300 are clipped by a norm of inf: every gradient is zero."""
    torch.manual_seed(0)
    gradients = [torch.randn(8, 8), torch.randn(8)]
    gradients[0][2, 3] = 300.0
    return clip_([enter(gradient, dtype) for gradient in gradients], 1.0)


@case("overflow", FLOAT16)
def clipping_a_model_in_half(dtype):
    """The same after a real backward: a loss scaled by 1024 leaves gradients whose squares are inf."""
    torch.manual_seed(0)
    model = enter_module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), dtype)
    (model(enter(torch.randn(4, 8), dtype)).square().mean() * 1024).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    total = sum(gradient.pow(2).sum() for gradient in gradients) ** 0.5  # lost here
    return [gradient / (total + 1e-6) for gradient in gradients]


@case("overflow", FLOAT16)
def global_norm_of_layer_norms(dtype):
    """Norms of 90 per layer are squared and summed over 40 layers."""
    torch.manual_seed(0)
    norms = torch.stack([enter(6 * torch.randn(256), dtype).norm() for _ in range(40)])
    return 1.0 / norms.square().sum().sqrt()  # lost here


@case("flush", FLOAT16)
def trust_ratio(dtype):
    """LARS divides by the norm of gradients of 1e-5; by squares it is zero, and so is the eps."""
    torch.manual_seed(0)
    weight, gradient = enter(torch.randn(16, 16), dtype), enter(1e-5 * torch.randn(16, 16), dtype)
    norm = gradient.pow(2).sum().sqrt()  # lost here
    return 0.001 * weight.norm() / (norm + 1e-8) * gradient  # lost here


@case("flush", FLOAT16)
def micro_batches_divided_first(dtype):
    """Each micro-batch's loss is divided by 300 before backward: gradients of 3e-8 vanish."""
    torch.manual_seed(0)
    weight = enter(torch.randn(16), dtype).requires_grad_()
    for batch in enter(4e-5 * (0.5 + torch.rand(300, 16)), dtype):
        ((weight * batch).mean() * (16 / 300) / 16).backward()  # lost here
    return weight.grad


@case("drift", BFLOAT16)
def gradient_over_300_micro_batches(dtype):
    """`.grad` over 300 micro-batches: after 20 large gradients bfloat16 no longer adds the small ones."""
    torch.manual_seed(0)
    weight = enter(torch.randn(16), dtype).requires_grad_()
    size = torch.where(torch.arange(300) < 20, 4.5, 0.1)[:, None]
    for batch in enter(size * (0.2 + 1.6 * torch.rand(300, 16)), dtype):
        (weight * batch).sum().backward()  # lost here
    return weight.grad


@case("drift", LOW)
def gradient_over_800_micro_batches(dtype):
    """The same where ten gradients of 30 come first: float16 no longer adds the small ones, either."""
    torch.manual_seed(0)
    weight = enter(torch.randn(4), dtype).requires_grad_()
    size = torch.where(torch.arange(800) < 10, 30.0, 0.1)[:, None]
    for batch in enter(size * (0.8 + 0.2 * torch.rand(800, 4)), dtype):
        (weight * batch).sum().backward()  # lost here
    return weight.grad


@case("overflow", FLOAT16)
def gradients_multiplied_by_world_size(dtype):
    """Scaled gradients of 2000 are summed over 64 workers and divided after the sum."""
    torch.manual_seed(0)
    workers = enter(2000 + 100 * torch.randn(64, 32), dtype)
    return workers.sum(0) / 64  # lost here


@case("flush", FLOAT16)
def unscaled_in_place(dtype):
    """Gradients of 1e-3 are unscaled by 65536 in the format of the weights, before the optimizer sees them."""
    torch.manual_seed(0)
    gradient = enter(1e-3 * torch.randn(64), dtype)
    gradient.mul_(1 / 65536)  # lost here
    return gradient.to(wide(dtype)) * 1000


@case("silent-zero", FLOAT16)
def adaptive_clipping_without_gradient(dtype):
    """Adaptive clipping: weight norm over gradient norm + 1e-9 for a layer without gradient."""
    torch.manual_seed(0)
    weight, gradient = enter(torch.randn(4, 16), dtype), torch.randn(4, 16)
    gradient[1] = 0.0
    gradient = enter(gradient, dtype)
    ratio = weight.norm(dim=-1, keepdim=True) * 0.01 / (gradient.norm(dim=-1, keepdim=True) + 1e-9)  # lost here
    return gradient * ratio


@case("cancellation", LOW)
def gradient_noise_scale(dtype):
    """The variance of micro-batch gradients as mean of squared norms minus squared norm of the mean."""
    torch.manual_seed(0)
    gradients = enter(1 + 0.05 * torch.randn(16, 256), dtype)
    squares = gradients.square().sum(-1).mean()  # lost here
    return squares - gradients.mean(0).square().sum()  # lost here


@case("decision", FLOAT16)
def skipped_step_by_norm(dtype):
    """Steps whose norm is above 500 are skipped; the norm by squares is inf above 256."""
    torch.manual_seed(0)
    gradients = enter(torch.linspace(2, 50, 32)[:, None] * torch.ones(32, 64), dtype)
    return gradients.square().sum(-1).sqrt() > 500  # lost here
