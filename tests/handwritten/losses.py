"""Losses written by hand, some with their gradients."""

import math

import torch
from torch import nn

from handwritten.case import FLOAT16, LOW, case, enter


@case("silent-zero", FLOAT16)
def log_of_p_plus_1e8(dtype):
    """-log(p + 1e-8) of a class that softmax made zero: the eps is zero in float16."""
    torch.manual_seed(0)
    logits = torch.randn(16, 10)
    logits[:, 3] -= 30
    p = enter(logits, dtype).softmax(-1)
    return -(p + 1e-8).log()[:, 3]  # lost here


@case("cancellation", LOW)
def bce_by_hand(dtype):
    """Binary cross entropy from probabilities: 1 - sigmoid(9) is zero, its logarithm -inf."""
    torch.manual_seed(0)
    logits = enter(9 + torch.rand(32), dtype)
    target = (torch.arange(32) % 2).to(dtype)
    p = torch.sigmoid(logits)  # lost here
    return -(target * (p + 1e-12).log() + (1 - target) * (1 - p + 1e-12).log()).mean()  # lost here


@case("overflow", FLOAT16)
def dice_over_volume(dtype):
    """Dice over a scan of 131,072 voxels: the sums are inf, their quotient NaN."""
    torch.manual_seed(0)
    p = enter(torch.rand(1, 32, 64, 64), dtype)
    target = (torch.rand(1, 32, 64, 64) < 0.7).to(dtype)
    intersection = (p * target).sum()
    total = p.sum() + target.sum()  # lost here
    return 1 - 2 * intersection / (total + 1e-5)  # lost here


@case("cancellation", LOW)
def focal_loss_of_easy_examples(dtype):
    """(1 - p)^2 * -log(p) where p is 0.999: 1 - p keeps one digit, the square keeps none."""
    torch.manual_seed(0)
    logits = enter(7 + torch.rand(64), dtype)
    p = torch.sigmoid(logits)  # lost here
    return ((1 - p).square() * -p.log()).mean() * 1e6  # lost here


@case("overflow", FLOAT16)
def info_nce_by_exp(dtype):
    """exp(similarity / 0.07) of embeddings in a narrow cone is 500,000."""
    torch.manual_seed(0)
    cone = torch.randn(64)
    left, right = nn.functional.normalize(cone + 0.4 * torch.randn(2, 16, 64), dim=-1)
    similarity = enter(left, dtype) @ enter(right, dtype).mT
    exponential = (similarity / 0.07).exp()  # lost here
    return -(exponential.diagonal() / exponential.sum(-1)).log().mean()


@case("flush", FLOAT16)
def divergence_by_quotient(dtype):
    """sum p * log(p / q) where the student gives 1e-9 to what the teacher gives 0.01."""
    torch.manual_seed(0)
    student = torch.randn(8, 12)
    student[:, 5] = -20.0
    p = enter(torch.randn(8, 12), dtype).softmax(-1)
    q = enter(student, dtype).softmax(-1)  # lost here
    return (p * (p / q).log()).sum(-1)  # lost here


@case("cancellation", LOW)
def divergence_of_near_distributions(dtype):
    """The divergence of a student that has learned its teacher is 1e-4, the logarithms are 8."""
    torch.manual_seed(0)
    teacher = enter(3 * torch.randn(8, 64), dtype)
    student = teacher + enter(0.02 * torch.randn(8, 64), dtype)  # lost here
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)  # lost here
    return (log_p.exp() * (log_p - log_q)).sum(-1)  # lost here


@case("overflow", FLOAT16)
def perplexity_of_untrained_model(dtype):
    """exp of a cross entropy of 11.7, that of a vocabulary of 128,000."""
    torch.manual_seed(0)
    losses = enter(11.7 + 0.05 * torch.randn(40), dtype)
    return torch.exp(losses.mean())  # lost here


@case("silent-zero", FLOAT16)
def charbonnier_gradient_at_zero(dtype):
    """sqrt(d^2 + 1e-12) where prediction and target agree: the gradient is 0 / 0."""
    torch.manual_seed(0)
    target = enter(torch.rand(4, 32), dtype)
    prediction = target.clone()
    prediction[:, ::2] += 0.25
    prediction.requires_grad_()
    torch.sqrt((prediction - target) ** 2 + 1e-12).sum().backward()  # lost here
    return prediction.grad


@case("cancellation", LOW)
def pseudo_huber_of_small_errors(dtype):
    """sqrt(1 + (d / delta)^2) - 1 where d / delta is 0.01."""
    torch.manual_seed(0)
    difference = enter(0.01 * torch.randn(256), dtype)
    return (torch.sqrt(1 + (difference / 1.0) ** 2) - 1).mean() * 1000  # lost here


@case("overflow", FLOAT16)
def depth_error_in_millimetres(dtype):
    """Squared errors of depth maps in millimetres: 500 mm are 250,000."""
    torch.manual_seed(0)
    depth = 2000 + 1000 * torch.rand(2, 16, 16)
    target, prediction = enter(depth, dtype), enter(depth + 500 * torch.randn(2, 16, 16), dtype)
    return (prediction - target).square().mean().sqrt()  # lost here


@case("flush", FLOAT16)
def label_smoothing_over_many_classes(dtype):
    """0.1 / 800,000 per class is two units of the smallest float16."""
    torch.manual_seed(0)
    log_p = enter(torch.randn(800_000), dtype).log_softmax(-1)
    share = torch.full_like(log_p, 0.1 / log_p.numel())  # lost here
    return -(share * log_p).sum()  # lost here


@case("silent-zero", FLOAT16)
def sequence_probability_by_product(dtype):
    """The probability of 60 tokens as a product: 1e-26 is zero, its logarithm -inf."""
    torch.manual_seed(0)
    p = enter(0.2 + 0.4 * torch.rand(4, 60), dtype)
    return -p.prod(-1).log() / 60  # lost here


@case("flush", FLOAT16)
def gradient_of_mean_without_loss_scale(dtype):
    """The mean over a batch of 65,536 elements: gradients of 3e-8 are below the smallest float16."""
    torch.manual_seed(0)
    prediction = enter(1e-3 * torch.randn(64, 1024), dtype).requires_grad_()
    prediction.square().mean().backward()  # lost here
    return prediction.grad * 1024


@case("overflow", FLOAT16)
def log_cosh_by_hand(dtype):
    """log(cosh(d)) where d is 15."""
    torch.manual_seed(0)
    difference = enter(12 + 3 * torch.rand(64), dtype)
    return torch.log(torch.cosh(difference)).mean()  # lost here


@case("flush", FLOAT16)
def gaussian_likelihood_by_variance(dtype):
    """d^2 / exp(log variance) where the variance is 1e-8."""
    torch.manual_seed(0)
    log_variance = enter(-18.5 + 0.2 * torch.randn(64), dtype)
    difference = enter(1e-4 * torch.randn(64), dtype)
    return 0.5 * (difference.square() / log_variance.exp() + log_variance)  # lost here


@case("cancellation", LOW)
def divergence_of_latents(dtype):
    """1 + log variance - mean^2 - variance of an encoder close to its prior."""
    torch.manual_seed(0)
    mean, log_variance = enter(0.01 * torch.randn(16, 32), dtype), enter(0.01 * torch.randn(16, 32), dtype)
    return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)  # lost here


class SigmoidPairLoss(nn.Module):
    def forward(self, logits, labels):
        likelihood = 1 / (1 + torch.exp(-labels * logits))  # lost here
        return -likelihood.log().mean()


@case("overflow", FLOAT16, parts=(SigmoidPairLoss,))
def sigmoid_loss_by_hand(dtype):
    """1 / (1 + exp(12)) per pair, as in a hand-written SigLIP loss: exp is inf, the likelihood zero, its log -inf."""
    torch.manual_seed(0)
    logits = enter(12 + torch.rand(8, 8), dtype)
    return SigmoidPairLoss()(logits, 2 * torch.eye(8, dtype=dtype) - 1)


@case("cancellation", LOW)
def angular_margin(dtype):
    """sine as sqrt(1 - cosine^2) of embeddings that nearly meet their class centre, as in ArcFace."""
    torch.manual_seed(0)
    centres = torch.randn(32, 256)
    embedding = nn.functional.normalize(enter(centres + 0.04 * torch.randn(32, 256), dtype), dim=-1)
    cosine = (embedding * nn.functional.normalize(enter(centres, dtype), dim=-1)).sum(-1)  # lost here
    sine = torch.sqrt((1 - cosine.square()).clamp(0, 1))  # lost here
    return sine * math.sin(0.5)
