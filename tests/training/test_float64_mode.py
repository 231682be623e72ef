"""A step that runs in float64 from inside gives what a model that was really converted gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_loops import mlp, state_of

from ampcheck.core.subject import Subject
from ampcheck.training.float64_mode import shadowed
from ampcheck.training.gradients.capture import captured
from ampcheck.training.loop import StepError, TrainingLoop


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 1)

    def forward(self, x):
        q, k, v = self.qkv(x[None]).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Tokens(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(9, 16, sparse=sparse), nn.LayerNorm(16), nn.Linear(16, 9)

    def forward(self, x):
        places = (x.flatten().abs() * 10).long() % 9
        return F.cross_entropy(self.head(self.norm(self.table(places))), places)


class Recurrent(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.cell, self.head = kind(16, 8, num_layers=2), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.cell(x)[0])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.reentrant = nn.Linear(16, 16), mlp(), reentrant

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)


class Images(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(1))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layers(x.reshape(-1, 1, 4, 4)))


class Casting(nn.Module):
    """Explicit casts to 16 bits, which the float64 twin must not have."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last, self.dtype = nn.Linear(16, 16), nn.Linear(16, 1), dtype

    def forward(self, x):
        narrow = self.first(x).to(self.dtype) if self.first.weight.dtype is not torch.float64 else self.first(x)
        return self.last(narrow.tanh().to(self.last.weight.dtype))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.first(x)
        hidden.mul_(2.0).add_(1.0)
        total = torch.zeros_like(hidden)
        total += hidden.sigmoid()
        total[:, 0] = hidden[:, 1]
        filled = total.new_empty(total.shape)
        filled.copy_(total)
        return self.last(filled.masked_fill(hidden > 3, 0.5))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(Square.apply(self.first(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "batch norm": lambda: Images(nn.BatchNorm2d(4)),
    "group norm": lambda: Images(nn.GroupNorm(2, 4)),
    "attention": lambda: Attention(False),
    "causal attention": lambda: Attention(True),
    "embedding": Tokens,
    "sparse embedding": lambda: Tokens(sparse=True),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "in place": InPlace,
    "custom function": Custom,
    "half": lambda: Casting(torch.float16),
    "bfloat16": lambda: Casting(torch.bfloat16),
    "transformer layer": lambda: nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0),
    "bilinear": lambda: nn.Sequential(nn.Linear(16, 16), nn.Hardswish(), nn.Softmax(-1), nn.LogSigmoid()),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 2)),
}

DATA = torch.randn(6, 16, generator=torch.Generator().manual_seed(5))


def stepped(
    model: nn.Module,
    data: torch.Tensor,
    autocast: torch.dtype | None = None,
    optimizer: Any = None,
    scaler: Any = None,
    clip: bool = False,
) -> Callable[[int], float]:
    def step(number: int) -> float:
        model.zero_grad()
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            out = model(data)
            loss = out.square().mean() if out.dim() else out
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler and optimizer:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if optimizer is not None:
            scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        return loss.item()

    return step


def close(one: torch.Tensor, other: torch.Tensor, limit: float = 1e-6) -> bool:
    one, other = (t.detach().coalesce().to_dense() if t.is_sparse else t.detach() for t in (one, other))
    scale = other.double().norm()
    return bool((one.double() - other.double()).norm() <= limit * scale + 1e-12)


@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_widened_step_is_that_of_a_converted_model(name, autocast):
    torch.manual_seed(0)
    model = MODELS[name]()
    twin = copy.deepcopy(model).double()
    expected = stepped(twin, DATA.double())(0)
    shape = {"model": model, "step": stepped(model, DATA, autocast)}
    loop = TrainingLoop(Subject(shape))
    before = state_of(shape)
    with loop.preserved():
        with shadowed(loop, torch.float64) as mode:
            value = loop.take(0)
        assert not mode.unseen
        assert isinstance(value, float), value
        assert value == pytest.approx(expected, rel=1e-9)
        truth = dict(twin.named_parameters())
        for path, parameter in model.named_parameters():
            assert close(parameter.grad, truth[path].grad), path
        for path, buffer in model.named_buffers():
            assert close(buffer, dict(twin.named_buffers())[path]), path
    assert state_of(shape) == before


def test_the_gradients_of_outputs_are_those_of_a_converted_model_in_float64():
    model = mlp()
    twin = copy.deepcopy(model).double()
    truth: dict[str, torch.Tensor] = {}
    for path, part in twin.named_modules():
        part.register_forward_hook(
            lambda m, a, out, p=path: out.register_hook(lambda g: truth.setdefault(p, g)) and None
        )
    stepped(twin, DATA.double())(0)
    seen: dict[str, torch.Tensor] = {}
    loop = TrainingLoop(Subject({"model": model, "step": stepped(model, DATA, torch.float16)}))
    with (
        loop.preserved(),
        shadowed(loop, torch.float64),
        captured(loop, lambda spot, grad: seen.setdefault((spot.kind, spot.name), grad.clone()), outputs=True),
    ):
        loop.take(0)
    outputs = {name: grad for (kind, name), grad in seen.items() if kind == "output"}
    assert outputs.keys() == truth.keys()
    for name, grad in outputs.items():
        assert grad.dtype is torch.float64
        assert close(grad, truth[name], 1e-12)


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.ASGD,
    torch.optim.Rprop,
    lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_optimizer_steps_as_it_does_in_float64(make, scaled):
    model = mlp()
    twin = copy.deepcopy(model).double()
    theirs = make(twin.parameters())
    other = stepped(twin, DATA.double(), optimizer=theirs, clip=True)
    expected = [other(0), other(1), other(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if scaled else None
    ours = make(model.parameters())
    shape = {"model": model, "optimizer": ours, "scaler": scaler}
    shape["step"] = stepped(model, DATA, torch.float16, ours, scaler, clip=True)
    loop = TrainingLoop(Subject(shape))
    before = state_of(shape)
    with loop.preserved():
        with shadowed(loop, torch.float64) as mode:
            values = [loop.take(number) for number in range(3)]
        assert not mode.unseen
        assert not [value for value in values if isinstance(value, StepError)], values
        assert values == pytest.approx(expected, rel=1e-5)
        for one, truth in zip(model.parameters(), twin.parameters(), strict=True):
            assert one.dtype is torch.float32
            assert close(one, truth, 1e-5)
        if scaler:
            assert scaler.get_scale() == 2048.0
    assert state_of(shape) == before


def test_dropout_draws_the_same_in_every_format():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    loop = TrainingLoop(Subject({"model": model, "step": stepped(model, DATA, torch.bfloat16)}))
    values = []
    for dtype in (torch.float32, torch.float64):
        with loop.preserved(), shadowed(loop, dtype) as mode:
            values.append(loop.take(0))
        assert mode.drew
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0] != values[1]


def test_noise_that_is_drawn_in_a_narrow_format_is_equal_in_a_wider_one():
    model = mlp()

    def step(number):
        noise = torch.randn(6, 16, dtype=torch.float32)
        loss = model(DATA + noise + torch.rand_like(noise)).square().mean()
        loss.backward()
        return loss.item()

    loop = TrainingLoop(Subject({"model": model, "step": step}))
    values = []
    for dtype in (torch.float32, torch.float64):
        with loop.preserved(), shadowed(loop, dtype):
            values.append(loop.take(0))
    assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_stored_in_16_bits_learns_in_float32_inside_and_is_16_bits_again(dtype):
    torch.manual_seed(0)
    model = mlp().to(dtype)
    twin = copy.deepcopy(model).double()
    expected = stepped(twin, DATA.to(dtype).double())(0)
    shape = {"model": model, "step": stepped(model, DATA.to(dtype))}
    loop = TrainingLoop(Subject(shape))
    before = state_of(shape)
    with loop.preserved():
        with shadowed(loop, torch.float64):
            assert loop.take(0) == pytest.approx(expected, rel=1e-9)
        for one, truth in zip(model.parameters(), twin.parameters(), strict=True):
            assert one.dtype is torch.float32
            assert close(one.grad, truth.grad)
    assert state_of(shape) == before


def test_an_overflow_in_float16_is_finite_in_float64():
    model = mlp()

    def step(number):
        with torch.autocast("cpu", torch.float16):
            loss = (model(DATA * 100) * 60000 * 60000).mean()
        loss.backward()
        return loss.item()

    loop = TrainingLoop(Subject({"model": model, "step": step}))
    with loop.preserved():
        assert not torch.tensor(loop.take(0)).isfinite()
    with loop.preserved(), shadowed(loop, torch.float64):
        assert torch.tensor(loop.take(0)).isfinite()


def test_an_error_of_the_users_is_the_users_own_and_the_state_is_back():
    model = mlp().half()

    def step(number):
        model(torch.ones(2, 3, dtype=torch.float16))
        return 0.0

    shape = {"model": model, "step": step}
    loop = TrainingLoop(Subject(shape))
    before = state_of(shape)
    with loop.preserved(), shadowed(loop, torch.float64):
        taken = loop.take(0)
    assert isinstance(taken, StepError)
    assert "shapes" in taken.message
    assert state_of(shape) == before
