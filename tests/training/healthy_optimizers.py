"""Healthy loops: where data come from, and optimizers that keep what low precision would lose."""

from __future__ import annotations

import copy

import torch
from healthy_loops import Loop, brain, healthy, plain, scaled
from torch import nn
from torch.nn import functional as F


@healthy
def data_from_an_iterator() -> Loop:
    set_ = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randint(0, 4, (256,)))
    batches = iter(torch.utils.data.DataLoader(set_, batch_size=2, shuffle=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))

    def loss_of(i):
        x, y = next(batches)
        return F.cross_entropy(model(x).float(), y)

    return scaled(model, loss_of)


@healthy
def data_from_a_generator_of_its_own() -> Loop:
    source = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss_of(i):
        x = torch.randn(32, 8, generator=source)
        return F.mse_loss(model(x).float(), x[:, :1])

    return scaled(model, loss_of)


class Kahan(torch.optim.Optimizer):
    """SGD on bfloat16 weights that carries what rounding lost."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                lost = self.state[p].setdefault("compensation", torch.zeros_like(p))
                update = -group["lr"] * p.grad + lost
                before = p.clone()
                p.add_(update)
                lost.copy_(update - (p - before))


@healthy
def pure_bfloat16_with_kahan() -> Loop:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16(), torch.randn(16, 16).bfloat16()
    optimizer = Kahan(model.parameters(), lr=1e-3)
    return plain(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(16) % 4), optimizer=optimizer)


class Stochastic(torch.optim.Optimizer):
    """SGD that rounds to bfloat16 at random, by bits below the kept ones."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                wide = p.float() - group["lr"] * p.grad.float()
                bits = wide.view(torch.int32) + torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)
                p.copy_((bits & -65536).view(torch.float32))


@healthy
def pure_bfloat16_with_stochastic_rounding() -> Loop:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16(), torch.randn(16, 16).bfloat16()
    optimizer = Stochastic(model.parameters(), lr=1e-3)
    return plain(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(16) % 4), optimizer=optimizer)


@healthy
def pure_bfloat16_at_a_rate_that_arrives() -> Loop:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16(), torch.randn(16, 16).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return plain(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(16) % 4), optimizer=optimizer)


@healthy
def adafactor() -> Loop:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(16, 16)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    return plain(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(16) % 4), optimizer=optimizer)


@healthy
def fused_adam_float16() -> Loop:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return scaled(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(16) % 4), optimizer=optimizer)


@healthy
def foreach_momentum_capturable() -> Loop:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    return plain(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(16) % 4), optimizer=optimizer)


@healthy
def teacher_and_student_distilled() -> Loop:
    teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).requires_grad_(False)
    model, x, t = nn.Linear(8, 4), torch.randn(32, 8), 4.0

    def loss_of(i):
        with torch.no_grad():
            target = (teacher(x).float() / t).softmax(-1)
        return F.kl_div((model(x).float() / t).log_softmax(-1), target, reduction="batchmean") * t * t

    return scaled(model, loss_of, teacher=teacher)


@healthy
def momentum_teacher_float32() -> Loop:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    teacher, x = copy.deepcopy(model).requires_grad_(False), torch.randn(32, 8)

    def loss_of(i):
        with torch.no_grad():
            target = F.normalize(teacher(x + 0.1 * torch.randn_like(x)).float(), dim=-1)
        return 2 - 2 * (F.normalize(model(x).float(), dim=-1) * target).sum(-1).mean()

    def follow():
        with torch.no_grad():
            for a, p in zip(teacher.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 1e-3)

    return scaled(model, loss_of, after=follow, teacher=teacher)


@healthy
def policy_gradient_with_integer_counter() -> Loop:
    policy, value = nn.Linear(4, 2), nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=1e-3)
    seen = torch.zeros((), dtype=torch.long)
    mean = torch.zeros(())

    def step(i):
        state = torch.randn(32, 4)
        reward = state.sum(1)
        seen.add_(32)
        mean.add_((reward.mean() - mean) * 32 / seen)
        optimizer.zero_grad()
        with brain():
            logits, baseline = policy(state).float(), value(state).float()[:, 0]
        chosen = torch.distributions.Categorical(logits=logits)
        action = chosen.sample()
        loss = -(chosen.log_prob(action) * (reward - baseline.detach())).mean() + F.mse_loss(baseline, reward)
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": nn.ModuleList([policy, value]), "optimizer": optimizer, "scaler": None, "step": step, "mean": mean}


@healthy
def large_vocabulary_float16() -> Loop:
    embed, head, ids = nn.Embedding(2000, 32), nn.Linear(32, 2000), torch.randint(0, 2000, (8, 16))

    def loss_of(i):
        return F.cross_entropy(head(embed(ids)).flatten(0, 1), ids.roll(1, 1).flatten())

    return scaled(nn.ModuleList([embed, head]), loss_of)


@healthy
def scale_that_grows_and_backs_off() -> Loop:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), 4 * torch.randn(64, 16)
    scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    return scaled(model, lambda i: F.mse_loss(model(x).float(), x[:, :4]), scaler=scaler)


@healthy
def compiled_bfloat16() -> Loop:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(16, 16)
    fast = torch.compile(model, backend="aot_eager")
    return plain(model, lambda i: F.cross_entropy(fast(x).float(), torch.arange(16) % 4), fast=fast)
