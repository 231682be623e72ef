"""Statistics: moments, sums, averages, order."""

import torch
from torch import nn

from handwritten.case import FLOAT16, LOW, case, enter


class Welford(nn.Module):
    """Online mean and variance; the count is a buffer like the others."""

    def __init__(self, width, dtype):
        super().__init__()
        for name in ("count", "mean", "squares"):
            self.register_buffer(name, torch.zeros(width, dtype=dtype))

    def forward(self, x):
        self.count += 1  # lost here
        difference = x - self.mean
        self.mean += difference / self.count  # lost here
        self.squares += difference * (x - self.mean)  # lost here
        return self.squares / self.count  # lost here


@case("absorption", LOW, parts=(Welford,))
def welford(dtype):
    """Welford's update over 2500 samples: neither the count nor the squares grow any more."""
    torch.manual_seed(0)
    statistics = Welford(3, dtype)
    scale = 0.2 + (torch.arange(2500) > 1200)[:, None]
    for sample in enter(scale * torch.randn(2500, 3), dtype):
        variance = statistics(sample)
    return variance


@case("cancellation", LOW)
def variance_of_latents(dtype):
    """E[x^2] - E[x]^2 of a channel with mean 8 and deviation 0.25."""
    torch.manual_seed(0)
    x = enter(8 + 0.25 * torch.randn(4, 1000), dtype)
    return x.square().mean(-1) - x.mean(-1).square()  # lost here


@case("cancellation", LOW)
def moving_average_by_cumsum(dtype):
    """A window's sum as a difference of cumulative sums."""
    torch.manual_seed(0)
    total = enter(torch.rand(4000), dtype).cumsum(0)  # lost here
    return (total[8:] - total[:-8]) / 8  # lost here


@case("overflow", FLOAT16)
def histogram_equalisation(dtype):
    """The cumulative histogram of an image of 512 x 512 pixels."""
    torch.manual_seed(0)
    image = (64 + 40 * torch.randn(512 * 512)).clamp(0, 255).long()
    histogram = torch.bincount(image, minlength=256).to(dtype)  # lost here
    cumulative = histogram.cumsum(0)  # lost here
    return cumulative / cumulative[-1]


@case("drift", LOW)
def moving_average_of_weights(dtype):
    """An average of weights with decay 0.999 in the format of the weights."""
    torch.manual_seed(0)
    weight = enter(0.75 + 0.1 * torch.rand(16), dtype)
    average = torch.ones(16, dtype=dtype)
    for _ in range(1500):
        average.mul_(0.999).add_(weight, alpha=0.001)  # lost here
    return average - 0.5  # lost here


@case("drift", LOW)
def teacher_by_lerp(dtype):
    """A teacher's weights follow the student's by lerp with 0.001: the step is below half a unit."""
    torch.manual_seed(0)
    student = enter(1.2 + 0.02 * torch.randn(16), dtype)
    teacher = torch.ones(16, dtype=dtype)
    for _ in range(1200):
        teacher.lerp_(student, 0.001)  # lost here
    return teacher - 0.9  # lost here


@case("decision", LOW)
def sort_by_composite_key(dtype):
    """Sort by group and score with the key group * 1000 + score: the score is rounded away."""
    torch.manual_seed(0)
    score = torch.linspace(0, 1, 64)[torch.randperm(64)]
    group = 12 + torch.arange(64) % 4
    key = group.to(dtype) * 1000 + enter(score, dtype)  # lost here
    return key.argsort(stable=True)  # lost here


@case("overflow", FLOAT16)
def kurtosis_by_powers(dtype):
    """The fourth power of deviations of 25."""
    torch.manual_seed(0)
    x = enter(25 * torch.randn(4, 400), dtype)
    centred = x - x.mean(-1, keepdim=True)
    return centred.pow(4).mean(-1) / centred.square().mean(-1).square()  # lost here


@case("absorption", LOW)
def mean_over_graph_nodes(dtype):
    """Mean pooling of a graph of 6000 nodes with index_add_ of features and ones."""
    torch.manual_seed(0)
    features = enter(0.3 + 0.1 * torch.rand(6000, 4), dtype)
    graph = torch.zeros(6000, dtype=torch.long)
    total = torch.zeros(1, 4, dtype=dtype).index_add_(0, graph, features)  # lost here
    count = torch.zeros(1, dtype=dtype).index_add_(0, graph, torch.ones(6000, dtype=dtype))  # lost here
    return total / count.sqrt()


@case("silent-zero", FLOAT16)
def log_likelihood_of_mixture(dtype):
    """log(sum(exp(log p))) without the maximum, log p of -25."""
    torch.manual_seed(0)
    log_p = enter(-25 + torch.randn(16, 5), dtype)
    return log_p.exp().sum(-1).log()  # lost here


@case("flush", FLOAT16)
def forward_algorithm(dtype):
    """The forward recursion of a hidden Markov model in probabilities, 30 observations."""
    torch.manual_seed(0)
    transition = enter(torch.randn(4, 4).softmax(-1), dtype)
    alpha = torch.full((4,), 0.25, dtype=dtype)
    for emission in enter(0.02 + 0.2 * torch.rand(30, 4), dtype):
        alpha = (alpha @ transition) * emission  # lost here
    return alpha.log()


@case("cancellation", LOW)
def covariance_by_moments(dtype):
    """E[x x^T] - m m^T of features with mean 6."""
    torch.manual_seed(0)
    x = enter(6 + 0.1 * torch.randn(512, 8), dtype)
    mean = x.mean(0)
    return x.mT @ x / 512 - torch.outer(mean, mean)  # lost here


@case("decision", LOW)
def top_k_of_summed_scores(dtype):
    """The best five by 500 + score: the offset removes the digits that rank them."""
    torch.manual_seed(0)
    score = torch.linspace(-0.2, 0.2, 40)[torch.randperm(40)]
    boosted = enter(score, dtype) + 500.0  # lost here
    return boosted.topk(5).indices  # lost here


@case("collision", LOW)
def ranks_in_half(dtype):
    """Average ranks for Spearman's correlation: ranks of 3000 samples are not distinct, their differences are gone."""
    torch.manual_seed(0)
    first = torch.arange(2500, 3000)
    second = first + torch.randint(-2, 3, (500,))
    difference = first.to(dtype) - second.to(dtype)  # lost here
    return difference.square().mean()


@case("drift", LOW)
def sum_in_a_loop(dtype):
    """A mean as sum of 4000 small terms in a loop."""
    torch.manual_seed(0)
    total = torch.zeros(4, dtype=dtype)
    for row in enter(0.01 * torch.rand(4000, 4), dtype):
        total += row  # lost here
    return total / 4000


@case("decision", LOW)
def threshold_of_a_sum(dtype):
    """A stopping rule: the accumulated halting probability must exceed 1 - 1e-3 (adaptive computation time)."""
    torch.manual_seed(0)
    accumulated = torch.zeros(32, dtype=dtype)
    steps = torch.zeros(32, dtype=torch.long)
    share = enter(torch.linspace(0.0005, 0.001, 32), dtype)
    for _ in range(1500):
        accumulated = accumulated + share  # lost here
        steps += accumulated < 0.95  # lost here
    return steps
