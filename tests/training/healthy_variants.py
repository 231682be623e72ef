"""Healthy loops: layers, losses, optimizers and data of many kinds."""

from __future__ import annotations

import math

import torch
from healthy_loops import Loop, brain, half, healthy, plain, scaled
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.Conv2d(n, n, 3, padding=1, bias=False)
        self.na, self.nb = nn.BatchNorm2d(n), nn.BatchNorm2d(n)
        nn.init.zeros_(self.nb.weight)

    def forward(self, x):
        return F.relu(x + self.nb(self.b(F.relu(self.na(self.a(x))))))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


@healthy
def resnet_float16_one_cycle() -> Loop:
    model, x, y = resnet(), torch.randn(8, 3, 8, 8), torch.arange(8) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    scaler = torch.amp.GradScaler("cpu")

    def step(i):
        optimizer.zero_grad()
        with half():
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler, "step": step}


@healthy
def resnet_channels_last_bfloat16() -> Loop:
    model, y = resnet().to(memory_format=torch.channels_last), torch.arange(8) % 4
    x = torch.randn(8, 3, 8, 8).to(memory_format=torch.channels_last)
    return plain(model, lambda i: F.cross_entropy(model(x).float(), y))


@healthy
def contrastive_with_learned_temperature() -> Loop:
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.ModuleList([a, b])
    model.register_parameter("logit_scale", nn.Parameter(torch.tensor(math.log(1 / 0.07))))
    x, y = torch.randn(32, 8), torch.randn(32, 8)

    def loss_of(i):
        one, two = F.normalize(a(x).float(), dim=-1), F.normalize(b(y).float(), dim=-1)
        logits = model.logit_scale.exp() * one @ two.T
        target = torch.arange(32)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    def clamp():
        model.logit_scale.data.clamp_(0, math.log(100))

    return scaled(model, loss_of, after=clamp)


@healthy
def accumulation_with_clipping() -> Loop:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    data = torch.randn(64, 16, 8)

    def step(i):
        x = data[i % 64]
        with half():
            loss = F.mse_loss(model(x).float(), x[:, :1]) / 4
        scaler.scale(loss).backward()
        if i % 4 == 3:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return loss.item() * 4

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


@healthy
def warm_up_from_zero_cosine() -> Loop:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(16, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def rate(s):
        return s / 10 if s < 10 else 0.5 * (1 + math.cos(math.pi * (s - 10) / 90))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return plain(
        model,
        lambda i: F.cross_entropy(model(x).float(), torch.arange(16) % 4),
        optimizer=optimizer,
        after=scheduler.step,
        scheduler=scheduler,
    )


@healthy
def sharpness_aware_two_passes() -> Loop:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(16, 8)
    optimizer, y = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), torch.arange(16) % 4

    def loss_of():
        with brain():
            return F.cross_entropy(model(x).float(), y)

    def step(i):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
            for p, e in zip(model.parameters(), moves, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        loss_of().backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=True):
                p.sub_(e)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


@healthy
def lbfgs() -> Loop:
    model, x = nn.Linear(8, 1), torch.randn(32, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def step(i):
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


@healthy
def layer_wise_rates_and_a_group_at_zero() -> Loop:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(16, 8)
    groups = [{"params": model[k].parameters(), "lr": r} for k, r in ((0, 0.0), (2, 1e-4), (4, 1e-3))]
    optimizer = torch.optim.AdamW(groups)
    return scaled(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(16) % 4), optimizer=optimizer)


@healthy
def frozen_half_backbone() -> Loop:
    backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)).half().requires_grad_(False).eval()
    head, x = nn.Linear(16, 4), torch.randn(16, 8)

    def loss_of(i):
        with torch.no_grad():
            features = backbone(x)
        return F.cross_entropy(head(features).float(), torch.arange(16) % 4)

    return scaled(head, loss_of, backbone=backbone)


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.bfloat16().requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, base.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x):
        return self.base(x.bfloat16()) + 2 * (x @ self.a.T @ self.b.T)


@healthy
def low_rank_adapters_on_a_bfloat16_base() -> Loop:
    model, x = nn.Sequential(Lora(nn.Linear(16, 16)), nn.GELU(), Lora(nn.Linear(16, 4))), torch.randn(16, 16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    return plain(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(16) % 4), optimizer=optimizer)


class Experts(nn.Module):
    def __init__(self, n=16, many=4):
        super().__init__()
        self.gate, self.experts = nn.Linear(n, many), nn.ModuleList(nn.Linear(n, n) for _ in range(many))
        self.head = nn.Linear(n, 4)

    def forward(self, x):
        weight, index = self.gate(x).float().softmax(-1).topk(1, dim=-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (index[:, 0] == k).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, (expert(x[rows]).float() * weight[rows]).to(out.dtype))
        return self.head(x + out)


@healthy
def mixture_of_experts_float16() -> Loop:
    model, x = Experts(), torch.randn(12, 16)
    return scaled(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(12) % 4), clip=1.0)


@healthy
def sparse_embedding_bag() -> Loop:
    bag, head = nn.EmbeddingBag(100, 8, mode="sum", sparse=True), nn.Linear(8, 4)
    optimizers = [torch.optim.SparseAdam(bag.parameters(), lr=1e-2), torch.optim.Adam(head.parameters(), lr=1e-3)]

    def step(i):
        ids = torch.randint(0, 100, (16, 5))
        for optimizer in optimizers:
            optimizer.zero_grad()
        with brain():
            loss = F.cross_entropy(head(bag(ids)).float(), torch.arange(16) % 4)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return {"model": nn.ModuleList([bag, head]), "optimizer": optimizers, "scaler": None, "step": step}


@healthy
def tied_weights_and_unused_parameters() -> Loop:
    embed, body, head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
    head.weight = embed.weight
    unused, ids = nn.Linear(4, 4), torch.randint(0, 32, (4, 8))
    model = nn.ModuleList([embed, body, head, unused])

    def loss_of(i):
        return F.cross_entropy(head(body(embed(ids))).float().flatten(0, 1), ids.flatten())

    return scaled(model, loss_of)


@healthy
def checkpointed_blocks() -> Loop:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
    head, x = nn.Linear(16, 4), torch.randn(16, 16)

    def loss_of(i):
        h = x
        for block in blocks:
            h = h + checkpoint(block, h, use_reentrant=False)
        return F.cross_entropy(head(h).float(), torch.arange(16) % 4)

    return scaled(nn.ModuleList([blocks, head]), loss_of)
