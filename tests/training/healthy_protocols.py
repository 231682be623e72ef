"""Healthy loops: uses of a scaler, an optimizer and a scheduler that look unusual and are right."""

from __future__ import annotations

import copy
import math

import torch
from healthy_loops import Loop, brain, half, healthy, networks, plain, scaled
from torch import nn
from torch.nn import functional as F


@healthy
def wrapped_scaler_in_a_trainer() -> Loop:
    class Wrapped:
        def __init__(self):
            self._scaler = torch.amp.GradScaler("cpu")

        def __call__(self, loss, optimizer, parameters, update):
            self._scaler.scale(loss).backward()
            if update:
                self._scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, 1.0)
                self._scaler.step(optimizer)
                self._scaler.update()

    class Trainer:
        def __init__(self):
            self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.scaler, self.x = Wrapped(), torch.randn(32, 8)

        def train_step(self, i):
            with half():
                loss = F.mse_loss(self.model(self.x).float(), self.x[:, :1]) / 2
            self.scaler(loss, self.optimizer, self.model.parameters(), i % 2 == 1)
            if i % 2 == 1:
                self.optimizer.zero_grad()
            return loss.item()

    trainer = Trainer()
    return {"model": trainer.model, "optimizer": trainer.optimizer, "step": trainer.train_step, "trainer": trainer}


@healthy
def gan_in_alternate_steps() -> Loop:
    g, d, og, od = networks()
    scaler = torch.amp.GradScaler("cpu")

    def step(i):
        real, z = torch.randn(16, 4) + 2, torch.randn(16, 8)
        if i % 2:
            og.zero_grad()
            with half():
                loss = F.softplus(-d(g(z))).float().mean()
            scaler.scale(loss).backward()
            scaler.step(og)
        else:
            od.zero_grad()
            with half():
                loss = (F.softplus(-d(real)) + F.softplus(d(g(z).detach()))).float().mean()
            scaler.scale(loss).backward()
            scaler.step(od)
        scaler.update()
        return loss.item()

    return {"model": nn.ModuleList([g, d]), "optimizer": [og, od], "scaler": scaler, "step": step}


@healthy
def gan_regularised_lazily() -> Loop:
    g, d, og, od = networks()
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)

    def step(i):
        real, z = (torch.randn(16, 4) + 2).requires_grad_(), torch.randn(16, 8)
        od.zero_grad()
        with half():
            loss = (F.softplus(-d(real)) + F.softplus(d(g(z).detach()))).float().mean()
        scaler.scale(loss).backward()
        if i % 4 == 0:
            out = d(real)
            (grad,) = torch.autograd.grad(out.sum(), real, create_graph=True)
            scaler.scale(4 * 5 * grad.square().sum(1).mean()).backward()
        scaler.step(od)
        og.zero_grad()
        with half():
            back = F.softplus(-d(g(z))).float().mean()
        scaler.scale(back).backward()
        scaler.step(og)
        scaler.update()
        return loss.item()

    return {"model": nn.ModuleList([g, d]), "optimizer": [og, od], "scaler": scaler, "step": step}


@healthy
def several_losses_one_scaler() -> Loop:
    body, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 1)])
    model, x = nn.ModuleList([body, heads]), torch.randn(32, 8)
    optimizer, scaler = torch.optim.Adam(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")

    def step(i):
        optimizer.zero_grad()
        with half():
            h = body(x).relu()
            one = F.cross_entropy(heads[0](h).float(), torch.arange(32) % 4)
            two = F.mse_loss(heads[1](h).float(), x[:, :1])
        scaler.scale(one).backward(retain_graph=True)
        scaler.scale(two).backward()
        scaler.step(optimizer)
        scaler.update()
        return one.item() + two.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


@healthy
def a_step_left_out_by_hand() -> Loop:
    model, x = nn.Linear(8, 1), torch.randn(32, 8)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(i):
        optimizer.zero_grad()
        with half():
            loss = F.mse_loss(model(x).float(), x[:, :1]) * (math.nan if i == 3 else 1.0)
        if not torch.isfinite(loss):
            return float("nan")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


@healthy
def disabled_scaler_in_bfloat16() -> Loop:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(32, 8)
    off = torch.amp.GradScaler("cpu", enabled=False)
    return scaled(model, lambda i: F.mse_loss(model(x).float(), x[:, :1]), scaler=off, context=brain, clip=1.0)


@healthy
def reduced_on_plateau_per_epoch() -> Loop:
    model, x = nn.Linear(8, 1), torch.randn(32, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scheduler, scaler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), torch.amp.GradScaler("cpu", 2.0**24)

    def step(i):
        optimizer.zero_grad()
        with half():
            loss = F.mse_loss(model(x).float(), x[:, :1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i % 12 == 11:
            scheduler.step(loss.item())
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler, "step": step}


class Orthogonal(torch.optim.Optimizer):
    """Muon: momentum in float32, made orthogonal in bfloat16."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.mul_(0.95).add_(p.grad)
                x = m.bfloat16() / (m.norm() + 1e-7).bfloat16()
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                p.add_(x.to(p.dtype), alpha=-group["lr"])


@healthy
def orthogonalised_in_bfloat16() -> Loop:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    x = torch.randn(16, 16)
    optimizer = Orthogonal(model.parameters(), lr=2e-2)
    return plain(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(16) % 4), optimizer=optimizer)


@healthy
def bfloat16_batch_norm_at_its_usual_momentum() -> Loop:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).bfloat16()
    x = torch.randn(32, 8).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(200):
        model(x)
    return plain(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(32) % 4), optimizer=optimizer)


@healthy
def bfloat16_momentum_of_nine_tenths() -> Loop:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16()
    x = torch.randn(32, 8).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return plain(model, lambda i: F.cross_entropy(model(x).float(), torch.arange(32) % 4), optimizer=optimizer)


@healthy
def stepped_in_the_backward_pass() -> Loop:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(32, 8)
    owners = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}

    def apply(p):
        owners[p].step()
        owners[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)

    def step(i):
        with brain():
            loss = F.cross_entropy(model(x).float(), torch.arange(32) % 4)
        loss.backward()
        return loss.item()

    return {"model": model, "optimizer": list(owners.values()), "step": step}


@healthy
def target_network_of_a_value_learner() -> Loop:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    target = copy.deepcopy(model).requires_grad_(False)
    memory = torch.randn(256, 4)

    def loss_of(i):
        s = memory[torch.randint(0, 256, (32,))]
        with torch.no_grad():
            goal = s.sum(1) + 0.9 * target(s).float().max(1).values
        return F.smooth_l1_loss(model(s).float()[:, 0], goal)

    def follow():
        with torch.no_grad():
            for t, p in zip(target.parameters(), model.parameters(), strict=True):
                t.mul_(0.995).add_(p, alpha=0.005)

    return plain(model, loss_of, after=follow, target=target)


@healthy
def inner_loop_of_meta_learning() -> Loop:
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        x, phase = torch.rand(16, 1), torch.rand(1)
        weights = dict(model.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(model, weights, x[:8]), (x[:8] + phase).sin())
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        loss = F.mse_loss(torch.func.functional_call(model, fast, x[8:]), (x[8:] + phase).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


@healthy
def evaluated_between_the_steps() -> Loop:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(32, 8)
    correct, seen = torch.zeros(()), torch.zeros((), dtype=torch.long)

    def loss_of(i):
        return F.cross_entropy(model(x).float(), torch.arange(32) % 4)

    def evaluate():
        model.eval()
        with torch.no_grad(), half():
            correct.add_((model(x).argmax(1) == torch.arange(32) % 4).sum())
            seen.add_(32)
        model.train()

    return scaled(model, loss_of, after=evaluate, correct=correct, seen=seen)


@healthy
def saved_and_resumed() -> Loop:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(32, 8)
    made = scaled(model, lambda i: F.mse_loss(model(x).float(), x[:, :1]))
    parts = {key: made[key] for key in ("model", "optimizer", "scaler")}

    def load(kept):
        for key, part in parts.items():
            part.load_state_dict(kept[key])

    return {**made, "save": lambda: {key: part.state_dict() for key, part in parts.items()}, "load": load}


@healthy
def accumulation_left_over_at_the_end() -> Loop:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(32, 8)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")

    def step(i):
        with half():
            loss = F.mse_loss(model(x).float(), x[:, :1]) / 5
        scaler.scale(loss).backward()
        if (i + 1) % 5 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


@healthy
def meter_in_bfloat16_that_is_cleared_in_time() -> Loop:
    model, x = nn.Linear(8, 4).bfloat16(), torch.randn(32, 8).bfloat16()
    optimizer, total = torch.optim.SGD(model.parameters(), lr=0.3), torch.zeros((), dtype=torch.bfloat16)

    def step(i):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), torch.arange(32) % 4)
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())
        mean = total.item() / (i % 8 + 1)
        if i % 8 == 7:
            total.zero_()
        return mean

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step, "total": total}


@healthy
def scaler_replaced_with_its_state() -> Loop:
    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    optimizer, held = torch.optim.SGD(model.parameters(), lr=0.1), {"scaler": torch.amp.GradScaler("cpu")}

    def step(i):
        if i == 6:
            kept = held["scaler"].state_dict()
            held["scaler"] = torch.amp.GradScaler("cpu")
            held["scaler"].load_state_dict(kept)
        scaler = held["scaler"]
        optimizer.zero_grad()
        with half():
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": held["scaler"], "state": held, "step": step}


@healthy
def heads_in_turn() -> Loop:
    body, heads, x = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)]), torch.randn(16, 8)
    model = nn.ModuleList([body, heads])
    return scaled(
        model, lambda i: F.cross_entropy(heads[i % 2](body(x).relu()).float(), torch.arange(16) % 4), clip=1.0
    )


@healthy
def constant_scale_by_hand() -> Loop:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(16, 8)
    optimizer = torch.optim.Adam(model.parameters())

    def step(i):
        optimizer.zero_grad()
        with half():
            loss = F.cross_entropy(model(x).float(), torch.arange(16) % 4)
        (loss * 1024).backward()
        for p in model.parameters():
            p.grad /= 1024
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


@healthy
def gradients_of_micro_batches_in_lists() -> Loop:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)), torch.randn(4, 16, 8)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(i):
        lists = []
        for part in x:
            with half():
                out = model(part)
            loss = F.mse_loss(out.float(), part[:, :1])
            lists.append(torch.autograd.grad(scaler.scale(loss), list(model.parameters())))
        for parameter, *grads in zip(model.parameters(), *lists, strict=True):
            parameter.grad = torch.stack(grads).mean(0)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}
