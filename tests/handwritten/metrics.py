"""Metrics and the counters behind them."""

import torch
from torch import nn
from torch.nn import functional as F

from handwritten.case import BFLOAT16, FLOAT16, LOW, case, enter


@case("absorption", LOW)
def accuracy_count(dtype):
    """One is added per right answer: float16 counts to 2048, bfloat16 to 256."""
    torch.manual_seed(0)
    right = torch.rand(3000) < 0.9
    count = torch.zeros((), dtype=dtype)
    for answer in right:
        count += answer  # lost here
    return count / len(right)


@case("drift", LOW)
def running_loss(dtype):
    """A running loss kept in the format of the losses."""
    torch.manual_seed(0)
    losses = enter(0.4 + 0.1 * torch.rand(3000), dtype)
    total = torch.zeros((), dtype=dtype)
    for loss in losses:
        total = total + loss  # lost here
    return total / len(losses)


class AverageMeter(nn.Module):
    """The meter of many training scripts."""

    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=dtype))

    def forward(self, value, n):
        self.total += value * n  # lost here
        self.count += n  # lost here
        return self.total / self.count


@case("overflow", FLOAT16, parts=(AverageMeter,))
def average_meter(dtype):
    """value * n is summed over 90,000 samples with loss 2.3: 207,000 is inf."""
    torch.manual_seed(0)
    meter = AverageMeter(dtype)
    return torch.stack([meter(loss, 512) for loss in enter(2.3 + 0.1 * torch.randn(176), dtype)])


@case("overflow", FLOAT16)
def mean_iou(dtype):
    """Intersection and union over an image of 512 x 512 pixels."""
    torch.manual_seed(0)
    label = torch.randint(0, 3, (512, 512))
    prediction = torch.where(torch.rand(512, 512) < 0.8, label, 0)
    classes = torch.arange(3)[:, None, None]
    left, right = (prediction == classes).to(dtype), (label == classes).to(dtype)
    intersection = (left * right).sum((1, 2))  # lost here
    union = left.sum((1, 2)) + right.sum((1, 2)) - intersection  # lost here
    return intersection / union


@case("cancellation", LOW)
def unexplained_variance_by_squares(dtype):
    """The share of variance that is left, with total squares as sum of y^2 - n * mean^2."""
    torch.manual_seed(0)
    y, residual = enter(20 + 0.6 * torch.randn(100), dtype), enter(0.2 * torch.randn(100), dtype)
    total = y.square().sum() - len(y) * y.mean().square()  # lost here
    return residual.square().sum() / total


@case("cancellation", LOW)
def pearson_by_moments(dtype):
    """Covariance as E[xy] - E[x] * E[y]."""
    torch.manual_seed(0)
    signal = torch.randn(500)
    x, y = enter(30 + signal, dtype), enter(30 + signal + 0.5 * torch.randn(500), dtype)
    covariance = (x * y).mean() - x.mean() * y.mean()  # lost here
    return covariance / (x.std() * y.std())


@case("overflow", FLOAT16)
def cosine_similarity_by_dot(dtype):
    """Dot product and norms of features of 15 in 1024 dimensions."""
    torch.manual_seed(0)
    features = 15 * torch.randn(4, 1024)
    left, right = enter(features, dtype), enter(features + 3 * torch.randn(4, 1024), dtype)
    dot = (left * right).sum(-1)  # lost here
    return dot / (left.norm(dim=-1) * right.norm(dim=-1))  # lost here


@case("flush", FLOAT16)
def cosine_similarity_of_quiet_features(dtype):
    """Features of 1e-5: dot product, norms' product and eps are all zero."""
    torch.manual_seed(0)
    features = 1e-5 * torch.randn(4, 64)
    left, right = enter(features, dtype), enter(features + 3e-6 * torch.randn(4, 64), dtype)
    dot = (left * right).sum(-1)  # lost here
    return dot / (left.norm(dim=-1) * right.norm(dim=-1) + 1e-12)  # lost here


@case("cancellation", LOW)
def pairwise_distance_by_expansion(dtype):
    """|a|^2 + |b|^2 - 2ab of points that share a mean of 10."""
    torch.manual_seed(0)
    points = enter(10 + 0.1 * torch.randn(20, 64), dtype)
    squares = points.square().sum(-1)  # lost here
    return squares[:10, None] + squares[None, 10:] - 2 * points[:10] @ points[10:].mT  # lost here


@case("absorption", LOW)
def confusion_counts(dtype):
    """Ones are scattered into a matrix of counts; the background has 9000 pixels."""
    torch.manual_seed(0)
    label = (torch.rand(12000) > 0.75).long()
    prediction = (torch.rand(12000) > 0.75).long()
    counts = torch.zeros(4, dtype=dtype)
    counts.index_add_(0, label * 2 + prediction, torch.ones(12000, dtype=dtype))  # lost here
    return counts.reshape(2, 2) / 12000


@case("overflow", FLOAT16)
def psnr_of_ten_bits(dtype):
    """peak^2 / mean square error where the peak is 1023."""
    torch.manual_seed(0)
    image = 1023 * torch.rand(64, 64)
    x = enter(image, dtype)
    error = x - enter(image + 4 * torch.randn(64, 64), dtype)
    return 10 * torch.log10(x.amax().square() / error.square().mean())  # lost here


@case("cancellation", LOW)
def structural_similarity_of_flat_patches(dtype):
    """Local variance as mean of squares minus squared mean, in bright flat patches."""
    torch.manual_seed(0)
    noise = 0.01 * torch.randn(2, 1, 32, 32)
    x, y = enter(0.9 + noise, dtype), enter(0.9 + noise + 0.004 * torch.randn(2, 1, 32, 32), dtype)
    mean_x, mean_y = F.avg_pool2d(x, 8), F.avg_pool2d(y, 8)
    variance_x = F.avg_pool2d(x * x, 8) - mean_x.square()  # lost here
    variance_y = F.avg_pool2d(y * y, 8) - mean_y.square()  # lost here
    covariance = F.avg_pool2d(x * y, 8) - mean_x * mean_y  # lost here
    return (2 * covariance + 1e-5) / (variance_x + variance_y + 1e-5)


@case("overflow", FLOAT16)
def auroc_by_ranks(dtype):
    """The Mann-Whitney statistic: 5000 ranks sum to six million."""
    torch.manual_seed(0)
    positive = torch.rand(5000) < 0.4
    ranks = (torch.rand(5000) + 0.3 * positive).argsort().argsort().to(dtype) + 1  # lost here
    count = int(positive.sum())
    rank_sum = ranks[positive].sum()  # lost here
    return (rank_sum / count - (count + 1) / 2) / (5000 - count)


@case("overflow", FLOAT16)
def class_weights(dtype):
    """Weights of classes as total / count over 200,000 samples."""
    torch.manual_seed(0)
    counts = torch.tensor([150_000, 30_000, 15_000, 5_000]).to(dtype)  # lost here
    weights = counts.sum() / (len(counts) * counts)  # lost here
    return F.cross_entropy(enter(torch.randn(32, 4), dtype), torch.arange(32) % 4, weight=weights)


@case("collision", BFLOAT16)
def median_rank_of_retrieval(dtype):
    """Ranks of the right answers among 1500 candidates, as integers in bfloat16."""
    torch.manual_seed(0)
    ranks = torch.randperm(1500)[:200] + 1
    low = ranks.to(dtype)  # lost here
    return low.long()  # lost here
