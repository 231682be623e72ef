"""Promise: the run is untouched, and *exact* is what a separate float64 run gives."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ampcheck import emulate
from ampcheck.shadow import Shadow


class Attention(nn.Module):
    """A transformer block by hand: views, a fused attention, a residual, a norm, no decision."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, w))
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(50, width), nn.Sequential(Attention(width), Attention(width))
        self.head = nn.Linear(width, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.tokens(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Images(nn.Module):
    """Convolutions and batch norm in training mode, without a kink."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.silu(self.norm(self.conv(x))).mean((2, 3))).square().mean()


SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "language": (Language, lambda: torch.randint(0, 50, (2, 12))),
    "images": (Images, lambda: torch.randn(4, 3, 8, 8)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "sgd, foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
}
STEPS = 20


def train(
    model: nn.Module,
    data: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    low: torch.dtype | None,
    scaler: torch.amp.GradScaler | None = None,
    *,
    skipped: int = -1,
) -> torch.Tensor:
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", low) if low else contextlib.nullcontext():
            loss = model(data)
        if scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step != skipped:
                optimizer.step()
            continue
        scaler.scale(loss).backward()
        if step == skipped:
            next(model.parameters()).grad.view(-1)[0] = torch.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return loss


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    for index, values in enumerate(optimizer.state.values()):
        tensors |= {f"state {index} {name}": t for name, t in values.items() if isinstance(t, torch.Tensor)}
    return tensors


def distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    value, reference = value.detach(), reference.detach()
    return float((value - reference).norm() / reference.norm().clamp_min(1e-30))


def _cases() -> Iterator[Any]:
    formats = {"float32": None, "bfloat16": torch.bfloat16}
    for subject, optimizer, name in itertools.product(SUBJECTS, OPTIMIZERS, formats):
        yield pytest.param(subject, optimizer, formats[name], id=f"{subject}-{optimizer}-{name}")


@pytest.mark.parametrize(("subject", "optimizer", "low"), list(_cases()))
def test_exact_equals_a_separate_float64_run_and_the_run_is_untouched(
    subject: str, optimizer: str, low: torch.dtype | None
) -> None:
    build, make_data = SUBJECTS[subject]
    torch.manual_seed(0)
    model, data = build(), make_data()
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    ours, plains, wides = (OPTIMIZERS[optimizer](m.parameters()) for m in (model, plain, wide))
    before = torch.get_rng_state()
    with Shadow(model) as shadow:
        loss = train(model, data, ours, low)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(loss, train(plain, data, plains, low))
    for (name, value), reference in zip(state(model, ours).items(), state(plain, plains).values(), strict=True):
        assert torch.equal(value, reference), name
        assert value.dtype is reference.dtype, name
    train(wide, data.double() if data.is_floating_point() else data, wides, None)
    for (name, value), reference in zip(state(model, ours).items(), state(wide, wides).values(), strict=True):
        if value.is_floating_point():
            # NAdam takes products of its momenta out of float32 tensors, as numbers that come back as data
            bound = 1e-6 if optimizer == "nadam" else 1e-12
            assert distance(shadow.exact(value), reference.double()) <= bound, name
    assert not shadow.unruled


def test_a_step_that_the_scaler_skips_is_skipped_by_exact() -> None:
    torch.manual_seed(0)
    model, data = Language(), torch.randint(0, 50, (2, 12))
    wide = copy.deepcopy(model).double()
    ours, wides = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, wide))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Shadow(model) as shadow:
        train(model, data, ours, torch.float16, scaler, skipped=3)
    train(wide, data, wides, None, skipped=3)
    for (name, value), reference in zip(model.named_parameters(), wide.parameters(), strict=True):
        assert distance(shadow.exact(value), reference) <= 1e-12, name


def test_activation_checkpoints_and_custom_functions_are_followed() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return 3 * x * x * gradient

    torch.manual_seed(0)
    block, x = Attention(), torch.randn(2, 5, 32)
    wide = copy.deepcopy(block).double()
    with Shadow() as shadow, torch.autocast("cpu", torch.bfloat16):
        loss = Cube.apply(checkpoint(block, x, use_reentrant=False)).sum()
        loss.backward()
    reference = Cube.apply(wide(x.double())).sum()
    reference.backward()
    assert distance(shadow.exact(loss), reference) <= 1e-12
    for ours, theirs in zip(block.parameters(), wide.parameters(), strict=True):
        assert distance(shadow.exact(ours.grad), theirs.grad) <= 1e-12


def test_functorch_transforms_are_followed() -> None:
    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh().square().sum()

    torch.manual_seed(0)
    weight, x = torch.randn(4, 3), torch.randn(5, 4)
    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))
    with Shadow() as shadow:
        rows = gradients(weight, x)
        tangent = torch.func.jvp(lambda w: loss(w, x), (weight,), (torch.ones_like(weight),))[1]
    assert distance(shadow.exact(rows), gradients(weight.double(), x.double())) <= 1e-12
    wide = torch.func.jvp(lambda w: loss(w, x.double()), (weight.double(),), (torch.ones(4, 3).double(),))[1]
    assert distance(shadow.exact(tangent), wide) <= 1e-12


PROGRAM = {
    "add": lambda x, y: x + 0.5 * y,
    "in place": lambda x, y: x.clone().mul_(y).add_(1.0),
    "a view written": lambda x, y: _write(x, y),
    "transposed": lambda x, y: (x.t() @ y).t() / x.shape[0],
    "data": lambda x, y: _write_data(x, y),
    "out": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "half": lambda x, y: x.half().float() + y,
    "cat": lambda x, y: torch.cat([x[1:], y[:1]]),
    "strided": lambda x, y: torch.as_strided(x, (4, 4), (1, 4)).tanh() + y,
    "expanded": lambda x, y: x[:1].expand(4, 4) * y,
    "complex": lambda x, y: torch.fft.ifft(torch.fft.fft(x) * y).real,
    "conj": lambda x, y: (torch.complex(x, y).conj() * torch.complex(y, x)).imag.clone(),
    "softmax": lambda x, y: F.softmax(x, -1) - F.log_softmax(y, 0),
    "index": lambda x, y: x[torch.tensor([3, 0, 0, 2])] + y.index_select(1, torch.tensor([1, 1, 0, 3])),
    "scatter": lambda x, y: x.scatter_add(0, torch.zeros(1, 4, dtype=torch.long), y),
    "set": lambda x, y: x.new_empty(0).set_(y.clone()) + x,
    "resized": lambda x, y: x.clone().resize_(4, 4) + y,
    "chunks": lambda x, y: torch.stack(x.chunk(2)[0].unbind() + y.chunk(2)[1].unbind()),
    "normalised": lambda x, y: F.layer_norm(x, (4,)) * y,
    "cumulative": lambda x, y: x.cumsum(0) * y.logsumexp(1, keepdim=True),
    "foreach": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=0.5)[1],
}


def _write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result[1:3, ::2] = y[:2, 1::2]
    result.diagonal().mul_(0.5)
    return result


def _write_data(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = nn.Parameter(x.contiguous().clone())
    result.data.view(-1)[4:8] = y.reshape(-1)[:4]
    return result.detach()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(sorted(PROGRAM)), min_size=1, max_size=6), st.integers(0, 99))
def test_any_program_is_followed_in_float64_and_left_as_it_is(names: list[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(4, 4, generator=generator) for _ in range(2))

    def run(x: torch.Tensor, y: torch.Tensor, wide: bool) -> torch.Tensor:
        for name in names:
            if wide and name == "half":
                x, y = x + y, x
            else:
                x, y = PROGRAM[name](x, y), x
        return x

    plain = run(x, y, wide=False)
    with Shadow() as shadow:
        value = run(x, y, wide=False)
    assert torch.equal(value, plain)
    assert value.stride() == plain.stride()
    reference = run(x.double(), y.double(), wide=True)
    known = reference.isfinite()
    assert distance(shadow.exact(value)[known], reference[known]) <= 1e-12 * 10 ** len(names)
    assert not shadow.unruled


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_acts_on_the_ops_that_an_op_calls(device: str, enabled: bool) -> None:
    """`affine_grid_generator` calls `bmm`, which autocast runs in 16 bits: under a shadow as without one."""
    theta = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])

    def grid() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return F.affine_grid(theta, [1, 1, 8, 512], align_corners=False)

    with emulate("cuda") if device == "cuda" else contextlib.nullcontext():
        plain = grid()
        with Shadow():
            shadowed = grid()
    assert plain.dtype == (torch.bfloat16 if enabled else torch.float32)
    torch.testing.assert_close(shadowed, plain, rtol=0, atol=0)
