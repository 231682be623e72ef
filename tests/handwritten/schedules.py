"""Schedules of diffusion, learning rates and samplers."""

import math

import torch

from handwritten.case import BFLOAT16, FLOAT16, LOW, case, enter, wide


@case("drift", LOW)
def cumulative_product_of_alphas(dtype):
    """The signal left after 2000 steps of a fine schedule, multiplied up step by step: 1 - 2e-4 is 1."""
    beta = torch.full((2000,), 2e-4, dtype=dtype)
    alpha_bar = torch.ones((), dtype=dtype)
    for step in beta:
        alpha_bar = alpha_bar * (1 - step)  # lost here
    return alpha_bar


@case("cancellation", LOW)
def noise_of_the_first_steps(dtype):
    """sqrt(1 - alpha_bar) from a table that was cast: the first entries are 1."""
    beta = torch.linspace(1e-4, 0.02, 1000, dtype=wide(dtype))
    table = (1 - beta).cumprod(0)[:8].to(dtype)  # lost here
    sigma = (1 - table).sqrt()  # lost here
    torch.manual_seed(0)
    return enter(torch.randn(8, 16), dtype) * sigma[:, None]


@case("cancellation", LOW)
def signal_to_noise_weights(dtype):
    """Loss weights by signal-to-noise ratio, alpha_bar / (1 - alpha_bar)."""
    beta = torch.linspace(1e-4, 0.02, 1000, dtype=dtype)  # lost here
    alpha_bar = (1 - beta).cumprod(0)  # lost here
    ratio = alpha_bar / (1 - alpha_bar)  # lost here
    return ratio[:50].log()


@case("absorption", LOW)
def warmup_counter(dtype):
    """A step counter in half: the learning rate stops rising at step 2048, or 256."""
    step = torch.zeros((), dtype=dtype)
    rates = []
    for _ in range(3000):
        step += 1  # lost here
        rates.append(step / 4000)
    return torch.stack(rates)


@case("cancellation", LOW)
def cosine_decay_at_the_end(dtype):
    """0.5 * (1 + cos(pi * step / total)) over the last steps."""
    step = torch.arange(9900, 9990).to(dtype)  # lost here
    return 0.5 * (1 + torch.cos(math.pi * step / 10000))  # lost here


@case("absorption", LOW)
def exponential_decay(dtype):
    """rate *= 0.9999 per step rounds back to the rate."""
    rate = torch.tensor(0.3, dtype=dtype)
    for _ in range(3000):
        rate = rate * 0.9999  # lost here
    return rate


@case("cancellation", LOW)
def step_sizes_of_karras_sigmas(dtype):
    """Step sizes as differences of 200 neighbouring noise levels."""
    ramp = torch.linspace(0, 1, 200, dtype=dtype)  # lost here
    sigma = (80 ** (1 / 7) + ramp * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7  # lost here
    return sigma[1:] - sigma[:-1]  # lost here


@case("overflow", FLOAT16)
def loss_scale_of_65536(dtype):
    """A loss scale kept in half: 2^16 is inf, and inf * 0 is NaN."""
    torch.manual_seed(0)
    weight = enter(torch.randn(8), dtype).requires_grad_()
    scale = torch.tensor(65536.0).to(dtype)  # lost here
    loss = (weight * enter(1e-4 * torch.randn(8), dtype)).sum()
    (loss * scale).backward()  # lost here
    return weight.grad / scale


@case("collision", LOW)
def sampler_timesteps(dtype):
    """The timesteps of a sampler from linspace in half, rounded to integers."""
    return torch.linspace(0, 3999, 250, dtype=dtype).round().long()  # lost here


@case("absorption", BFLOAT16)
def token_budget(dtype):
    """Tokens seen are counted in thousands: bfloat16 stops at 1024 of 2000."""
    seen = torch.zeros((), dtype=dtype)
    for _ in range(1000):
        seen += 2.0  # lost here
    return seen / 2000


@case("cancellation", LOW)
def bias_correction(dtype):
    """1 - 0.9997^t with the step counter as a tensor in half."""
    return 1 - 0.9997 ** torch.arange(1, 40, dtype=dtype)  # lost here


@case("absorption", LOW)
def annealed_coefficient(dtype):
    """KL annealing adds 1e-4 per step to a coefficient in half."""
    coefficient = torch.zeros((), dtype=dtype)
    for _ in range(4000):
        coefficient = torch.clamp(coefficient + 1e-4, max=1.0)  # lost here
    return coefficient


@case("cancellation", LOW)
def velocity_of_flow(dtype):
    """The velocity of a flow as (x(t + dt) - x(t)) / dt of two interpolations in half."""
    torch.manual_seed(0)
    noise, data = enter(torch.randn(4, 16), dtype), enter(torch.randn(4, 16), dtype)
    time = torch.tensor(0.5, dtype=dtype)
    before = (1 - time) * noise + time * data  # lost here
    after = (1 - (time + 1 / 1024)) * noise + (time + 1 / 1024) * data  # lost here
    return (after - before) * 1024  # lost here
