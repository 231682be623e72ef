"""The limit of compiled code follows from the data and the roundings, never from how lucky eager mode was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.plan import Plan
from ampcheck.core.run import Run, Verdict
from ampcheck.torchtools.pytree import map_tensors

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
    return judge_accuracy(Plan.of((compiled_as(eager, compiled), [args])), options=CompileOptions("aot_eager"))


def troubles(run: Run) -> list[tuple[str, str]]:
    return [(f.check, f.message) for f in run.findings if f.verdict in BAD]


def _softmax(x: Tensor) -> Tensor:
    powers = (x - x.detach().amax(-1, keepdim=True)).exp()
    return powers / summed(powers)


def _layer_norm(x: Tensor) -> Tensor:
    centred = x - summed(x) / x.shape[-1]
    return centred * (summed(centred * centred) / x.shape[-1] + 1e-5).rsqrt()


def _logsumexp(x: Tensor) -> Tensor:
    top = x.detach().amax(-1, keepdim=True)
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


@settings(max_examples=60)
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("running sum", "positive"),
        ("running sum", "whole"),
        ("softmax", "positive"),
        ("logsumexp", "whole"),
    ],
)
def test_a_long_sum_that_eager_mode_makes_in_double_may_be_made_in_float32(name: str, kind: str) -> None:
    assert troubles(judged(EAGER[name], fused(name), values(kind, 1, 2**16, 0))) == []


def test_a_sum_of_whole_numbers_that_cancels_exactly_by_luck_is_no_measure() -> None:
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(-(2**20), 2**20, (2**14,), generator=generator).float()
    x = torch.cat([half, -half])
    x[0] += 4
    assert troubles(judged(EAGER["sum"], summed, x)) == []


@pytest.mark.parametrize("value", [2.0, 7.0])
def test_roundings_of_16_bits_that_cancel_by_luck_in_eager_mode_are_no_measure(value: float) -> None:
    def eager(x: Tensor) -> Tensor:
        return ((x * 1.7).sin() * (x * 0.3).exp()).abs().log() * 3.3

    def fewer(x: Tensor) -> Tensor:
        return (((x * 1.7).sin() * (x * 0.3).exp()).float().abs().log() * 3.3).to(x.dtype)

    run = judged(eager, fewer, torch.tensor([value]).bfloat16())
    assert not [f for f in run.findings if f.verdict is Verdict.FAIL], troubles(run)


DEFECTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], torch.dtype]] = {
    "a sum kept in bfloat16": (EAGER["sum"], lambda x: running_sum(x)[..., -1:], torch.bfloat16),
    "a mean kept in float16": (EAGER["mean"], lambda x: running_sum(x / x.shape[-1])[..., -1:], torch.float16),
    "a norm kept in bfloat16": (EAGER["norm"], lambda x: running_sum(x * x)[..., -1:].sqrt(), torch.bfloat16),
    "a float32 sum kept in bfloat16": (
        EAGER["sum"],
        lambda x: running_sum(x.bfloat16())[..., -1:].float(),
        torch.float32,
    ),
    "a dropped term": (EAGER["sum"], lambda x: summed(x[..., :-1]), torch.float32),
    "a term of a softmax dropped": (
        EAGER["softmax"],
        lambda x: (x - x.detach().amax(-1, keepdim=True)).exp() / summed(x[..., 1:].exp()),
        torch.float32,
    ),
    "an elided cast": (lambda x: x.bfloat16().float().tanh().sum(-1), lambda x: x.tanh().sum(-1), torch.float32),
    "a cast too many": (EAGER["layer norm"], lambda x: EAGER["layer norm"](x.bfloat16()).float(), torch.float32),
    "an index off by one": (EAGER["running sum"], lambda x: running_sum(x).roll(1, -1), torch.bfloat16),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_fails_as_before(defect: str) -> None:
    eager, compiled, dtype = DEFECTS[defect]
    run = judged(eager, compiled, values("positive", 2, 512, 0).to(dtype))
    assert ("compiled-error", Verdict.FAIL) in [(f.check, f.verdict) for f in run.findings], troubles(run)


def noisy(relative: float) -> Callable[..., Callable[..., object]]:
    """A backend whose results lie this much off, up or down."""

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        generator = torch.Generator().manual_seed(1)

        def off(tensor: Tensor) -> Tensor:
            return tensor * (1 + relative * (torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1))

        def run(*args: Tensor) -> object:
            return map_tensors(lambda t: off(t) if t.is_floating_point() else t, graph(*args))

        return run

    return backend


LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...], float]] = {
    "linear": (lambda: torch.nn.Linear(4096, 64), (32, 4096), 2.5e-5),
    "batch norm": (lambda: torch.nn.BatchNorm2d(8), (32, 8, 32, 32), 8e-5),
    "layer norm": (lambda: torch.nn.LayerNorm(4096), (8, 4096), 2.5e-5),
    "convolution": (lambda: torch.nn.Conv2d(64, 32, 3), (4, 64, 16, 16), 2.5e-5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_error_of_a_layer_fails_that_no_order_of_its_sums_makes(name: str) -> None:
    torch.manual_seed(0)
    make, shape, wrong = LAYERS[name]
    for relative in (1e-7, wrong):
        run = judge_accuracy(Plan.of((make(), [(torch.randn(shape),)])), options=CompileOptions(noisy(relative)))
        (found,) = (f for f in run.findings if f.check == "compiled-error")
        assert found.verdict is (Verdict.FAIL if relative == wrong else Verdict.PASS), found.message
