"""Norms and running statistics written by hand."""

import torch
from torch import nn

from handwritten.case import FLOAT16, LOW, case, enter, enter_module


@case("silent-zero", FLOAT16)
def rms_norm_eps_1e8(dtype):
    """Root mean square with eps 1e-8 over padded tokens: the eps is zero in float16 and rsqrt(0) times 0 is NaN."""
    torch.manual_seed(0)
    tokens = torch.randn(6, 64)
    tokens[4:] = 0.0
    x = enter(tokens, dtype)
    variance = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + 1e-8)  # lost here


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)  # lost here
        return self.weight * x * torch.rsqrt(variance + 1e-6)


@case("overflow", FLOAT16, parts=(RMSNorm,))
def rms_norm_of_outlier_channel(dtype):
    """A residual stream with one channel of 700, as large models have: its square is inf and the token becomes zero."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 64)
    hidden[..., 7] = 700.0
    norm = enter_module(RMSNorm(64), dtype)
    return norm(enter(hidden, dtype))


@case("cancellation", LOW)
def layer_norm_by_moments(dtype):
    """Variance as E[x^2] - E[x]^2 of features with mean 40 and deviation 0.5."""
    torch.manual_seed(0)
    x = enter(40 + 0.5 * torch.randn(8, 256), dtype)
    mean = x.mean(-1, keepdim=True)
    variance = x.square().mean(-1, keepdim=True) - mean.square()  # lost here
    return (x - mean) / (variance.clamp_min(0) + 1e-5).sqrt()  # lost here


class LayerNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).sum(-1, keepdim=True) / x.shape[-1]  # lost here
        return centred / torch.sqrt(variance + self.eps) * self.weight + self.bias


@case("overflow", FLOAT16, parts=(LayerNorm,))
def layer_norm_sum_before_division(dtype):
    """Squares of 12 summed over 1024 features before the division: 147,000 is inf, so the token becomes zero."""
    torch.manual_seed(0)
    norm = enter_module(LayerNorm(1024, 1e-5), dtype)
    return norm(enter(12 * torch.randn(4, 1024), dtype))


@case("silent-zero", FLOAT16)
def l2_normalise_eps_1e12(dtype):
    """Embeddings divided by norm + 1e-12; the embedding of an empty text is zero, and 0 / 0 follows."""
    torch.manual_seed(0)
    embeddings = torch.randn(6, 32)
    embeddings[2] = 0.0
    x = enter(embeddings, dtype)
    return x / (x.norm(dim=-1, keepdim=True) + 1e-12)  # lost here


@case("overflow", FLOAT16)
def l2_normalise_by_squares(dtype):
    """The norm as root of a sum of squares: 512 entries of 20 sum to 200,000."""
    torch.manual_seed(0)
    x = enter(20 * torch.randn(4, 512), dtype)
    squares = (x * x).sum(-1, keepdim=True)  # lost here
    return x / squares.sqrt()


@case("overflow", FLOAT16)
def group_statistics_by_sums(dtype):
    """A group's mean as sum over 16,384 positions divided by their count."""
    torch.manual_seed(0)
    x = enter(6 + torch.randn(2, 8, 64, 64), dtype).reshape(2, 2, -1)
    mean = x.sum(-1, keepdim=True) / x.shape[-1]  # lost here
    return x - mean


@case("drift", LOW)
def running_mean_of_batch_norm(dtype):
    """running += 0.004 * (mean - running) in the format of the activations stops short of the mean."""
    torch.manual_seed(0)
    batches = enter(4.2 + 0.01 * torch.randn(1500, 8), dtype)
    running = torch.zeros(8, dtype=dtype)
    for mean in batches:
        running += 0.004 * (mean - running)  # lost here
    return running


@case("drift", LOW)
def running_variance_of_batch_norm(dtype):
    """The two-term form, momentum 0.001: what is multiplied by 0.999 does not shrink by as much, or not at all."""
    torch.manual_seed(0)
    batches = enter(0.3 + 0.02 * torch.rand(1500, 8), dtype)
    running = torch.ones(8, dtype=dtype)
    for variance in batches:
        running.mul_(0.999).add_(variance, alpha=0.001)  # lost here
    return running


@case("flush", FLOAT16)
def weight_standardisation(dtype):
    """Convolution weights of 1e-4 standardised: the squared deviations of 1e-8 are zero, the quotient is inf."""
    torch.manual_seed(0)
    weight = enter(1e-4 * torch.randn(16, 72), dtype)
    centred = weight - weight.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)  # lost here
    return centred / (variance + 1e-10).sqrt()  # lost here


@case("silent-zero", FLOAT16)
def min_max_of_constant_channel(dtype):
    """(x - min) / (max - min + 1e-8) of a channel that is constant, as a blank image has."""
    torch.manual_seed(0)
    image = torch.rand(3, 100)
    image[1] = 0.5
    x = enter(image, dtype)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return (x - low) / (high - low + 1e-8)  # lost here


@case("silent-zero", FLOAT16)
def mean_pooling_of_empty_text(dtype):
    """Sum over tokens divided by clamp(count, 1e-9): an empty text divides zero by zero."""
    torch.manual_seed(0)
    hidden = enter(torch.randn(4, 12, 16), dtype)
    mask = (torch.arange(12) < torch.tensor([[12], [5], [0], [9]])).to(dtype)[..., None]
    count = mask.sum(1).clamp(min=1e-9)  # lost here
    return (hidden * mask).sum(1) / count  # lost here


class SpectralNorm(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        u = torch.ones(self.weight.shape[0], dtype=x.dtype)
        for _ in range(8):
            v = self.weight.mT @ u
            v = v / (v.pow(2).sum() + 1e-12).sqrt()  # lost here
            u = self.weight @ v
            u = u / (u.pow(2).sum() + 1e-12).sqrt()  # lost here
        return x @ (self.weight / torch.dot(u, self.weight @ v)).mT


@case("flush", FLOAT16, parts=(SpectralNorm,))
def spectral_norm_of_small_weight(dtype):
    """Power iteration with a weight of 1e-5: the squares of the iterate vanish and so does the eps."""
    torch.manual_seed(0)
    norm = enter_module(SpectralNorm(1e-5 * (torch.randn(24, 16) + 1)), dtype)
    return norm(enter(torch.randn(5, 16), dtype))
