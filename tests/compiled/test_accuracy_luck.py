"""The limit of compiled code follows from the data and the roundings, never from how lucky eager mode was."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.record import Run, Verdict

BAD = (Verdict.FAIL, Verdict.WARN)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("ampcheck_tests::running_sum", mutates_args=())
def running_sum(x: Tensor) -> Tensor:
    """The running sum along the last dimension, one term after the other, each partial sum in the dtype of `x`.

    PyTorch's own kernels on a CPU keep theirs in double or sum in pairs.
    """
    if x.dtype is torch.float32:
        return torch.from_numpy(x.numpy().cumsum(-1, dtype="float32"))
    partial, found = torch.zeros_like(x[..., 0]), []
    for term in x.unbind(-1):
        partial = partial + term
        found.append(partial)
    return torch.stack(found, -1)


@running_sum.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


running_sum.register_autograd(lambda ctx, grad: running_sum(grad.contiguous().flip(-1)).flip(-1))


def summed(x: Tensor) -> Tensor:
    return running_sum(x.contiguous())[..., -1:]


def compiled_as(eager: Callable[..., Tensor], compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of which Dynamo traces another one than eager mode runs."""

    def function(*args: Tensor) -> Tensor:
        return compiled(*args) if torch.compiler.is_compiling() else eager(*args)

    return function


def judged(eager: Callable[..., Tensor], compiled: Callable[..., Tensor], *args: Tensor) -> Run:
    return judge_accuracy((compiled_as(eager, compiled), [args]), options={"backend": "aot_eager"})


def troubles(run: Run) -> list[tuple[str, str]]:
    return [(f.check, f.message) for f in run.findings if f.verdict in BAD]


def _softmax(x: Tensor) -> Tensor:
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers / summed(powers)


def _layer_norm(x: Tensor) -> Tensor:
    centred = x - summed(x) / x.shape[-1]
    return centred * (summed(centred * centred) / x.shape[-1] + 1e-5).rsqrt()


def _logsumexp(x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    return summed((x - top).exp()).log() + top


EAGER: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "variance": lambda x: x.var(-1, keepdim=True, correction=0),
    "product": lambda x: (x @ x.mT)[..., :1],
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "running sum": lambda x: x.cumsum(-1),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "chain": lambda x: ((x.sin() * x.cos()).exp() * 3.3).sigmoid() - 0.5,
}
OTHERWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": summed,
    "mean": lambda x: summed(x) / x.shape[-1],
    "norm": lambda x: summed(x * x).sqrt(),
    "variance": lambda x: summed((x - summed(x) / x.shape[-1]).square()) / x.shape[-1],
    "product": lambda x: summed(x * x[..., :1, :]),
    "softmax": _softmax,
    "layer norm": _layer_norm,
    "running sum": running_sum,
    "logsumexp": _logsumexp,
    "chain": EAGER["chain"],
}
"""The same, in another order of the sums."""


def fused(name: str) -> Callable[[Tensor], Tensor]:
    """What a fused kernel computes: in float32, in another order, rounded once at the end."""
    return lambda x: OTHERWISE[name](x.float()).to(x.dtype)


def values(kind: str, rows: int, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator)
    if kind == "whole":
        return (x * 3).round()
    if kind == "positive":
        return x.abs()
    if kind == "shifted":
        return x + 10
    if kind == "cancelling":
        half = x[..., : (size + 1) // 2]
        return torch.cat([half, -half], -1)[..., :size]
    return x


@given(
    st.sampled_from(sorted(EAGER)),
    st.sampled_from(DTYPES),
    st.sampled_from(["normal", "whole", "positive", "shifted", "cancelling"]),
    st.sampled_from([1, 3]),
    st.integers(0, 12).map(lambda power: 2**power),
    st.integers(0, 100),
)
def test_an_honest_order_of_evaluation_never_fails(
    name: str, dtype: torch.dtype, kind: str, rows: int, size: int, seed: int
) -> None:
    x = values(kind, rows, size, seed).to(dtype)
    run = judged(EAGER[name], fused(name), x)
    assert not [f for f in run.findings if f.verdict is Verdict.FAIL], troubles(run)
