"""Kernels, honest and faulty, beside their references in PyTorch. A fault is one that kernels really have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F

BF16 = torch.bfloat16


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def rms(x: Any, w: Any) -> Any:
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w.float()).to(x.dtype)


def matmul(a: Any, b: Any) -> Any:
    return (a.float() @ b.float()).to(a.dtype)


def softmax(x: Any) -> Any:
    return x.float().softmax(-1).to(x.dtype)


def attention(q: Any, k: Any, v: Any) -> Any:
    return ((q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1) @ v.float()).to(q.dtype)


INPUTS: dict[Callable[..., Any], Callable[[int], tuple[torch.Tensor, ...]]] = {
    rms: lambda n: (draw(3, n), draw(n, seed=1)),
    matmul: lambda n: (draw(7, n, seed=3), draw(n, 5, seed=4)),
    softmax: lambda n: (draw(4, n, seed=5),),
    attention: lambda n: tuple(draw(2, n, 16, seed=seed) for seed in range(3)),
}


@dataclass(frozen=True)
class Kernel:
    compute: Callable[..., Any]
    reference: Callable[..., Any]


HONEST: dict[str, Kernel] = {}
FAULTY: dict[str, Kernel] = {}


def of(reference: Callable[..., Any], kernels: dict[str, Kernel]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        kernels[compute.__name__] = Kernel(compute, reference)
        return compute

    return register


# Faults ---------------------------------------------------------------------------------------------------------------


@of(matmul, FAULTY)
def drops_the_last_block(a: Any, b: Any) -> Any:
    whole = a.shape[1] // 32 * 32 or a.shape[1]
    return matmul(a[:, :whole], b[:whole])


@of(matmul, FAULTY)
def sums_in_bfloat16(a: Any, b: Any) -> Any:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=BF16)
    for i in range(a.shape[1]):
        total = total + a[:, i : i + 1] * b[i]
    return total


@of(matmul, FAULTY)
def leaves_the_last_row_unwritten(a: Any, b: Any) -> Any:
    out = torch.empty(a.shape[0], b.shape[1], dtype=BF16)
    out[:-1] = matmul(a, b)[:-1]
    return out


@of(matmul, FAULTY)
def scales_twice(a: Any, b: Any) -> Any:
    return matmul(a, b) * torch.tensor(1.03, dtype=BF16)


@of(matmul, FAULTY)
def assumes_contiguous_rows(a: Any, b: Any) -> Any:
    return matmul(a.as_strided((a.numel(),), (1,), a.storage_offset()).view(a.shape) if a.numel() else a, b)


@of(matmul, FAULTY)
def ignores_the_offset(a: Any, b: Any) -> Any:
    return matmul(a.as_strided(a.shape, a.stride(), 0) if a.numel() else a, b)


@of(matmul, FAULTY)
def writes_its_input(a: Any, b: Any) -> Any:
    out = matmul(a, b)
    a.mul_(0.5)
    return out


@of(rms, FAULTY)
def has_no_eps(x: Any, w: Any) -> Any:
    wide = x.float()
    return (wide * wide.pow(2).mean(-1, keepdim=True).rsqrt() * w.float()).to(x.dtype)


@of(rms, FAULTY)
def divides_by_the_padded_length(x: Any, w: Any) -> Any:
    wide, length = x.float(), max(1, -(-x.shape[-1] // 16) * 16)
    return (wide * (wide.pow(2).sum(-1, keepdim=True) / length + 1e-6).rsqrt() * w.float()).to(x.dtype)


@of(rms, FAULTY)
def sums_squares_in_bfloat16(x: Any, w: Any) -> Any:
    total = torch.zeros(x.shape[0], 1, dtype=BF16)
    for i in range(x.shape[-1]):
        total = total + x[:, i : i + 1] * x[:, i : i + 1]
    return (x.float() * (total.float() / max(1, x.shape[-1]) + 1e-6).rsqrt() * w.float()).to(x.dtype)


@of(rms, FAULTY)
def takes_the_next_weight(x: Any, w: Any) -> Any:
    return rms(x, w.roll(1))


@of(softmax, FAULTY)
def subtracts_no_maximum(x: Any) -> Any:
    powers = x.float().exp()
    return (powers / powers.sum(-1, keepdim=True)).to(x.dtype)


@of(softmax, FAULTY)
def masks_one_too_many(x: Any) -> Any:
    wide = x.float().clone()
    if x.shape[-1] > 1 and x.shape[-1] % 16 == 1:
        wide[..., -1] = -torch.inf
    return wide.softmax(-1).to(x.dtype)


@of(softmax, FAULTY)
def pads_with_zeros(x: Any) -> Any:
    return F.pad(x.float(), (0, -x.shape[-1] % 16)).softmax(-1)[..., : x.shape[-1]].to(x.dtype)


_CALLS = count()


@of(softmax, FAULTY)
def races(x: Any) -> Any:
    out = softmax(x)
    return torch.nextafter(out, torch.full_like(out, 9.0)) if next(_CALLS) % 7 == 0 else out


@of(softmax, FAULTY)
def spoils_one_element(x: Any) -> Any:
    out = softmax(x)
    if out.numel() > 20:
        out.view(-1)[17] *= 1.5
    return out


@of(softmax, FAULTY)
def returns_float32(x: Any) -> Any:
    return x.float().softmax(-1)


@of(attention, FAULTY)
def scales_by_the_width_of_the_model(q: Any, k: Any, v: Any) -> Any:
    return ((q.float() @ k.float().mT * (2 * q.shape[-1]) ** -0.5).softmax(-1) @ v.float()).to(q.dtype)


@of(attention, FAULTY)
def drops_the_last_key(q: Any, k: Any, v: Any) -> Any:
    keys = max(1, k.shape[1] - 1) if k.shape[1] else 0
    return attention(q, k[:, :keys], v[:, :keys])


@of(attention, FAULTY)
def does_not_rescale_between_blocks(q: Any, k: Any, v: Any) -> Any:
    wide, total, out = q.float() * q.shape[-1] ** -0.5, torch.zeros(*q.shape[:-1], 1), torch.zeros(q.shape)
    for start in range(0, k.shape[1], 32):
        scores = wide @ k[:, start : start + 32].float().mT
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total, out = total + weights.sum(-1, keepdim=True), out + weights @ v[:, start : start + 32].float()
    return (out / total).to(v.dtype)


# Honest ---------------------------------------------------------------------------------------------------------------


@of(matmul, HONEST)
def matmul_of_torch(a: Any, b: Any) -> Any:
    return a @ b


@of(matmul, HONEST)
def matmul_in_blocks(a: Any, b: Any) -> Any:
    total = torch.zeros(a.shape[0], b.shape[1])
    for i in range(0, a.shape[1], 32):
        total += a[:, i : i + 32].float() @ b[i : i + 32].float()
    return total.to(BF16)


@of(rms, HONEST)
def rms_of_torch(x: Any, w: Any) -> Any:
    return F.rms_norm(x, x.shape[-1:], w, 1e-6) if x.shape[-1] else x.clone()


@of(rms, HONEST)
def rms_in_float64(x: Any, w: Any) -> Any:
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()).to(x.dtype)


@of(rms, HONEST)
def rms_rounded_before_the_weight(x: Any, w: Any) -> Any:
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * w


@of(softmax, HONEST)
def softmax_of_torch(x: Any) -> Any:
    return x.softmax(-1)


@of(softmax, HONEST)
def softmax_by_hand(x: Any) -> Any:
    wide = x.float()
    powers = (wide - wide.amax(-1, keepdim=True)).exp() if x.shape[-1] else wide
    return (powers / powers.sum(-1, keepdim=True)).to(x.dtype)


@of(attention, HONEST)
def attention_of_torch(q: Any, k: Any, v: Any) -> Any:
    return (
        F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0] if k.shape[1] else attention(q, k, v)
    )


@of(attention, HONEST)
def attention_with_rounded_weights(q: Any, k: Any, v: Any) -> Any:
    return (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1).to(BF16) @ v


@of(attention, HONEST)
def attention_in_blocks(q: Any, k: Any, v: Any) -> Any:
    wide, total, out = q.float() * q.shape[-1] ** -0.5, torch.zeros(*q.shape[:-1], 1), torch.zeros(q.shape)
    largest = torch.full((*q.shape[:-1], 1), -1e30)
    for start in range(0, k.shape[1], 32):
        scores = wide @ k[:, start : start + 32].float().mT
        peak = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - peak).exp(), (largest - peak).exp()
        total, out = (
            total * shrink + weights.sum(-1, keepdim=True),
            out * shrink + weights @ v[:, start : start + 32].float(),
        )
        largest = peak
    return (out / total).to(v.dtype)
