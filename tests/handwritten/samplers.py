"""Sampling and decoding."""

import torch
from torch import nn

from handwritten.case import FLOAT16, LOW, case, enter, wide


@case("decision", LOW)
def inverse_cdf(dtype):
    """cumsum and searchsorted over 1000 tokens; draws stay in float32, the table does not."""
    torch.manual_seed(0)
    p = enter(torch.rand(1000), dtype).softmax(-1)
    cdf = p.cumsum(-1)  # lost here
    draws = torch.rand(400).to(wide(dtype))
    return torch.searchsorted(cdf.to(wide(dtype)), draws).clamp(max=999)  # lost here


@case("cancellation", LOW)
def gumbel_noise(dtype):
    """-log(-log(u)) where u rounds to 1."""
    torch.manual_seed(0)
    draws = torch.rand(4096).to(wide(dtype)).to(dtype)  # lost here
    noise = -torch.log(-torch.log(draws))  # lost here
    return noise.topk(8).values


@case("cancellation", LOW)
def exponential_waiting_times(dtype):
    """-log(1 - u) of the smallest draws: the difference rounds to 1."""
    torch.manual_seed(0)
    draws = torch.rand(4096).sort().values[1:9].to(wide(dtype))
    return -torch.log(1 - draws.to(dtype)) / 0.01  # lost here


@case("collision", LOW)
def systematic_resampling(dtype):
    """(i + u) / n over 4096 particles: pointers coincide."""
    torch.manual_seed(0)
    weights = enter(0.5 + torch.rand(4096), wide(dtype)).cumsum(0)
    pointer = (torch.arange(4096, dtype=dtype) + 0.37) / 4096  # lost here
    return torch.searchsorted(weights / weights[-1], pointer.to(wide(dtype)))  # lost here


@case("silent-zero", FLOAT16)
def particle_weights(dtype):
    """exp(log weight) / sum of log weights near -30."""
    torch.manual_seed(0)
    weights = enter(-30 + 2 * torch.randn(64), dtype).exp()  # lost here
    return weights / weights.sum()  # lost here


@case("decision", LOW)
def beam_scores(dtype):
    """Log probabilities summed token by token over 400 tokens; beams a nat apart change their order."""
    torch.manual_seed(0)
    step = -2.5 - torch.rand(400, 1).expand(400, 8) - 1.0 / 400 * torch.randperm(8)
    score = torch.zeros(8, dtype=dtype)
    for log_p in enter(step, wide(dtype)):
        score = score + log_p.to(dtype)  # lost here
    return score.argsort(stable=True, descending=True)  # lost here


@case("flush", FLOAT16)
def speculative_acceptance(dtype):
    """p / q of tokens whose probabilities are 1e-10: 0 / 0 accepts nothing."""
    torch.manual_seed(0)
    draft, target = torch.randn(32, 16), torch.randn(32, 16)
    draft[:, 3], target[:, 3] = -20.0, -20.0
    p, q = (enter(logits, dtype).softmax(-1)[:, 3] for logits in (target, draft))  # lost here
    return (p / q).clamp(max=4.0)  # lost here


@case("absorption", LOW)
def nucleus_size(dtype):
    """The number of tokens that reach 0.6 of a flat distribution: the running sum stops before."""
    torch.manual_seed(0)
    p = enter(0.1 * torch.rand(3000), dtype).softmax(-1).sort(descending=True).values
    total, kept = torch.zeros((), dtype=dtype), torch.zeros((), dtype=torch.long)
    for share in p:
        kept += total < 0.6  # lost here
        total = total + share  # lost here
    return kept.double() / 3000


@case("overflow", FLOAT16)
def importance_weights(dtype):
    """exp(new - old) of a policy that moved by 12, clipped after the product with the advantage."""
    torch.manual_seed(0)
    new, old = enter(-torch.rand(16), dtype), enter(-12 - torch.rand(16), dtype)
    weight = torch.exp(new - old)  # lost here
    return weight / weight.sum()  # lost here


class Reservoir(nn.Module):
    """Counts what it has seen and keeps the item whose key is the largest."""

    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=dtype))

    def forward(self, item):
        self.seen += 1  # lost here
        return item / self.seen


@case("absorption", LOW, parts=(Reservoir,))
def reservoir_counter(dtype):
    """The chance to keep an item, 1 / seen, stops falling."""
    reservoir = Reservoir(dtype)
    return torch.stack([reservoir(torch.ones((), dtype=dtype)) for _ in range(2500)])[-50:]


@case("collision", LOW)
def token_ids_through_half(dtype):
    """Token ids are concatenated with features in half and read back as integers."""
    torch.manual_seed(0)
    ids = torch.randint(0, 32_000, (4, 16))
    table = torch.concat([ids.to(dtype)[..., None], enter(torch.rand(4, 16, 2), dtype)], -1)  # lost here
    return table[..., 0].long()  # lost here


@case("decision", LOW)
def priority_sampling(dtype):
    """The sum tree of a replay buffer: sums of priorities over 8192 leaves, descended by differences."""
    torch.manual_seed(0)
    level = enter(0.5 + torch.rand(8192), dtype)
    total = level.cumsum(0)  # lost here
    goals = (torch.arange(256, dtype=wide(dtype)) + 0.5) / 256
    return torch.searchsorted(total.to(wide(dtype)), goals * total[-1].to(wide(dtype)))  # lost here


@case("cancellation", LOW)
def residual_of_speculation(dtype):
    """The residual distribution (p - q) of two nearly equal distributions, normalised."""
    torch.manual_seed(0)
    logits = enter(torch.randn(4, 64), dtype)
    shifted = logits + enter(5e-3 * torch.randn(4, 64), dtype)  # lost here
    residual = (logits.softmax(-1) - shifted.softmax(-1)).clamp_min(0)  # lost here
    return residual / residual.sum(-1, keepdim=True)
