"""Optimizers by hand with states in the format of the weights."""

import torch
from torch import nn

from handwritten.case import FLOAT16, LOW, case, enter, enter_module


class Adam:
    """Adam as it stands in a tutorial."""

    def __init__(self, weight, eps=1e-8, beta=0.999):
        self.mean, self.square = torch.zeros_like(weight), torch.zeros_like(weight)
        self.weight, self.eps, self.beta, self.steps = weight, eps, beta, 0

    def step(self, gradient):
        self.steps += 1
        self.mean.mul_(0.9).add_(gradient, alpha=0.1)
        self.square.mul_(self.beta).addcmul_(gradient, gradient, value=1 - self.beta)  # lost here
        root = (self.square / (1 - self.beta**self.steps)).sqrt()
        update = self.mean / (1 - 0.9**self.steps) / (root + self.eps)  # lost here
        self.weight.sub_(0.01 * update)
        return update


@case("silent-zero", FLOAT16, parts=(Adam,))
def adam_of_unused_row(dtype):
    """A row of an embedding without gradient: 0 / (sqrt(0) + 1e-8) is NaN in float16."""
    torch.manual_seed(0)
    gradient = torch.randn(4, 8)
    gradient[2] = 0.0
    return Adam(enter(torch.randn(4, 8), dtype)).step(enter(gradient, dtype)) + 1


@case("flush", FLOAT16)
def adam_of_small_gradients(dtype):
    """Gradients of 1e-4: their squares are zero, the update is inf."""
    torch.manual_seed(0)
    square = torch.zeros(16, dtype=dtype)
    mean = torch.zeros(16, dtype=dtype)
    for gradient in enter(1e-4 * torch.randn(20, 16), dtype):
        mean.mul_(0.9).add_(gradient, alpha=0.1)
        square.mul_(0.99).add_(gradient * gradient, alpha=0.01)  # lost here
    return mean / (square.sqrt() + 1e-8)  # lost here


@case("drift", LOW)
def second_moment_stands_still(dtype):
    """v = 0.9998 v + 0.0002 g^2 does not fall after a spike, since 0.9998 v rounds to v."""
    torch.manual_seed(0)
    square = torch.ones(16, dtype=dtype)
    for gradient in enter(0.1 * torch.randn(4000, 16), dtype):
        square = square * 0.9998 + 0.0002 * gradient * gradient  # lost here
    return square.rsqrt()


class SGD(torch.optim.Optimizer):
    """Plain gradient descent, one line per parameter."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad  # lost here


@case("absorption", LOW, parts=(SGD,))
def update_below_half_a_unit(dtype):
    """Weights of 1.5 and updates of 2e-4: pure half training does not learn."""
    torch.manual_seed(0)
    weight = nn.Parameter(enter(1.5 + 0.2 * torch.rand(16), dtype))
    start, optimizer = weight.detach().clone(), SGD([weight], lr=1e-4)
    for slope in enter(1.0 + torch.rand(100, 16), dtype):
        optimizer.zero_grad()
        (weight * slope).sum().backward()
        optimizer.step()
    return weight - start  # lost here


@case("absorption", LOW)
def weight_decay_factor(dtype):
    """1 - lr * decay as a tensor in half is 1."""
    torch.manual_seed(0)
    weight, rate = enter(torch.randn(16), dtype), torch.tensor(1e-3).to(dtype)
    for _ in range(1800):
        weight = weight * (1 - rate * 0.2)  # lost here
    return weight


@case("absorption", LOW)
def average_of_checkpoints(dtype):
    """Stochastic weight averaging: (average * n + weight) / (n + 1) over 800 checkpoints in half."""
    torch.manual_seed(0)
    weights = torch.linspace(1, 2, 1600)[:, None] + 0.01 * torch.randn(1600, 8)
    average = torch.zeros(8, dtype=dtype)
    for n, weight in enumerate(enter(weights, dtype)):
        average = average + (weight - average) / (n + 1)  # lost here
    return average - 1.25  # lost here


@case("flush", FLOAT16)
def adafactor_rows(dtype):
    """Row and column means of squared gradients of 3e-5 are zero, so the factored moment is 0 / 0."""
    torch.manual_seed(0)
    gradient = enter(3e-5 * torch.randn(16, 24), dtype)
    square = gradient.square() + 1e-30  # lost here
    row, column = square.mean(-1, keepdim=True), square.mean(0, keepdim=True)
    return gradient / (row * column / row.mean()).sqrt()  # lost here


@case("overflow", FLOAT16)
def adagrad_accumulator(dtype):
    """Squared gradients of 60 summed over 40 steps: inf, and the weight stands still."""
    torch.manual_seed(0)
    accumulator = torch.zeros(8, dtype=dtype)
    for gradient in enter(60 * torch.randn(40, 8), dtype):
        accumulator.addcmul_(gradient, gradient)  # lost here
    return 1 / accumulator.sqrt()


@case("drift", LOW)
def adagrad_stops_accumulating(dtype):
    """Squared gradients of 0.5 summed over 3000 steps."""
    torch.manual_seed(0)
    accumulator = torch.zeros(8, dtype=dtype)
    for gradient in enter(0.7 + 0.1 * torch.rand(3000, 8), dtype):
        accumulator += gradient * gradient  # lost here
    return accumulator.sqrt()


@case("drift", LOW)
def training_without_master_weights(dtype):
    """A linear regression trained for 150 steps with its weights in half and a rate of 1e-4."""
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    model = enter_module(nn.Linear(8, 1), dtype)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs, targets = enter(x, dtype), enter(x.sum(1, keepdim=True), dtype)
    for _ in range(150):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()  # lost here
    return model.weight - start  # lost here


@case("overflow", FLOAT16)
def natural_gradient_damping(dtype):
    """The inverse of Fisher + 1e-6: small entries of 1e-6 give 5e5, inf before it meets the gradient."""
    torch.manual_seed(0)
    gradient = enter(1e-3 * torch.randn(16), dtype)
    inverse = 1 / (gradient.square() + 1e-6)  # lost here
    return inverse * gradient
