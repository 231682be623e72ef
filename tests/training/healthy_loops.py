"""Training loops as real projects have them, and as they should be: none of them may fail."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

Loop = dict[str, Any]
LOOPS: dict[str, Callable[[], Loop]] = {}


def healthy(build: Callable[[], Loop]) -> Callable[[], Loop]:
    LOOPS[build.__name__] = build
    return build


def half():
    return torch.autocast("cpu", torch.float16)


def brain():
    return torch.autocast("cpu", torch.bfloat16)


def scaled(model, loss_of, *, optimizer=None, scaler=None, clip=None, context=half, after=None, **more) -> Loop:
    """The usual float16 loop: scale, backward, clip what is unscaled, step, update."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler or torch.amp.GradScaler("cpu")

    def step(i):
        optimizer.zero_grad(set_to_none=True)
        with context():
            loss = loss_of(i)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        if after is not None:
            after()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step, **more}


def plain(model, loss_of, *, optimizer=None, context=brain, after=None, **more) -> Loop:
    """The usual loop without a scaler."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i):
        optimizer.zero_grad()
        with context():
            loss = loss_of(i)
        loss.backward()
        optimizer.step()
        if after is not None:
            after()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step, **more}


def settled():
    """A scaler whose scale needs no search: few steps are enough."""
    return torch.amp.GradScaler("cpu", 1024.0)


def transformers():
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    import transformers as library

    return library


@healthy
def gpt2_float16() -> Loop:
    lib = transformers()
    small = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    model = lib.GPT2LMHeadModel(lib.GPT2Config(vocab_size=64, **small))
    ids = torch.randint(0, 64, (4, 16))
    return scaled(model, lambda i: model(input_ids=ids, labels=ids).loss, clip=1.0, steps=4, scaler=settled())


@healthy
def bert_bfloat16() -> Loop:
    lib = transformers()
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = lib.BertForSequenceClassification(lib.BertConfig(vocab_size=64, num_labels=3, **small))
    ids, mask, labels = torch.randint(0, 64, (6, 12)), torch.ones(6, 12, dtype=torch.long), torch.arange(6) % 3
    mask[:, 9:] = 0
    return plain(model, lambda i: model(input_ids=ids, attention_mask=mask, labels=labels).loss)


@healthy
def t5_float16() -> Loop:
    lib = transformers()
    small = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8, "decoder_start_token_id": 0}
    model = lib.T5ForConditionalGeneration(lib.T5Config(vocab_size=64, **small))
    ids, labels = torch.randint(0, 64, (4, 10)), torch.randint(0, 64, (4, 6))
    return scaled(model, lambda i: model(input_ids=ids, labels=labels).loss, steps=4, scaler=settled())


@healthy
def vit_float16() -> Loop:
    lib = transformers()
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = lib.ViTForImageClassification(lib.ViTConfig(image_size=16, patch_size=4, num_labels=4, **small))
    x, y = torch.randn(4, 3, 16, 16), torch.arange(4)
    return scaled(model, lambda i: model(pixel_values=x, labels=y).loss, steps=4, scaler=settled())


@healthy
def llama_pure_bfloat16_with_masters() -> Loop:
    lib = transformers()
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = lib.LlamaForCausalLM(lib.LlamaConfig(vocab_size=64, **small)).bfloat16()
    masters = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    ids = torch.randint(0, 64, (4, 16))

    def step(i):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad = p.grad.float()
            nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "masters": masters, "step": step}


class Block(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(16, outer)
        self.last = nn.Conv2d(outer, outer, 3, padding=1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x, t):
        h = self.conv(F.silu(self.norm(x))) + self.time(F.silu(t))[:, :, None, None]
        return h + self.last(F.silu(h))


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), Block(8, 16), Block(24, 8)
        self.leave = nn.Conv2d(8, 3, 3, padding=1)
        self.embed = nn.Linear(16, 16)

    def forward(self, x, t):
        angles = t[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        t = self.embed(torch.cat([angles.sin(), angles.cos()], -1))
        first = self.enter(x)
        low = self.down(F.avg_pool2d(first, 2), t)
        return self.leave(self.up(torch.cat([first, F.interpolate(low, scale_factor=2)], 1), t))


@healthy
def diffusion_with_average_float16() -> Loop:
    model, x = Unet(), torch.randn(4, 3, 8, 8)
    follow = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9999)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=follow)
    alphas = (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)

    def loss_of(i):
        t, noise = torch.randint(0, 1000, (4,)), torch.randn(4, 3, 8, 8)
        a = alphas[t][:, None, None, None]
        return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t).float(), noise)

    return scaled(model, loss_of, clip=1.0, ema=average, after=lambda: average.update_parameters(model))


def networks():
    g = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 4))
    d = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return g, d, *(torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in (g, d))


@healthy
def gan_one_scaler() -> Loop:
    g, d, og, od = networks()
    scaler = torch.amp.GradScaler("cpu")

    def step(i):
        real, z = torch.randn(16, 4) + 2, torch.randn(16, 8)
        od.zero_grad()
        with half():
            fake = g(z)
            loss_d = (F.softplus(-d(real)) + F.softplus(d(fake.detach()))).float().mean()
        scaler.scale(loss_d).backward()
        scaler.step(od)
        og.zero_grad()
        with half():
            loss_g = F.softplus(-d(fake)).float().mean()
        scaler.scale(loss_g).backward()
        scaler.step(og)
        scaler.update()
        return loss_g.item()

    return {"model": nn.ModuleList([g, d]), "optimizer": [og, od], "scaler": scaler, "step": step}


@healthy
def gan_two_scalers_interleaved() -> Loop:
    g, d, og, od = networks()
    sg, sd = torch.amp.GradScaler("cpu", init_scale=2.0**12), torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(i):
        real, z = torch.randn(16, 4) + 2, torch.randn(16, 8)
        with half():
            fake = g(z)
            loss_g = F.softplus(-d(fake)).float().mean()
        og.zero_grad()
        sg.scale(loss_g).backward()
        od.zero_grad()
        with half():
            loss_d = (F.softplus(-d(real)) + F.softplus(d(fake.detach()))).float().mean()
        sd.scale(loss_d).backward()
        sd.step(od)
        sd.update()
        sg.step(og)
        sg.update()
        return loss_g.item()

    return {"model": nn.ModuleList([g, d]), "optimizer": [og, od], "scaler": [sg, sd], "step": step}


@healthy
def gan_two_scalers_scaled_together() -> Loop:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    oa, ob = torch.optim.SGD(a.parameters(), lr=1e-2), torch.optim.SGD(b.parameters(), lr=1e-2)
    sa, sb = torch.amp.GradScaler("cpu", init_scale=2.0**12), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(8, 4)

    def step(i):
        oa.zero_grad()
        ob.zero_grad()
        with half():
            la, lb = a(x).float().square().mean(), b(x).float().square().mean()
        big, small = sa.scale(la), sb.scale(lb)
        big.backward()
        small.backward()
        for scaler, optimizer in ((sa, oa), (sb, ob)):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return la.item()

    return {"model": nn.ModuleList([a, b]), "optimizer": [oa, ob], "scaler": [sa, sb], "step": step}


@healthy
def wgan_gradient_penalty() -> Loop:
    g, d, og, od = networks()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(i):
        real, fake = torch.randn(16, 4) + 2, g(torch.randn(16, 8)).detach()
        od.zero_grad()
        mixed = (real + torch.rand(16, 1) * (fake - real)).requires_grad_()
        with half():
            out = d(mixed)
        (grad,) = torch.autograd.grad(scaler.scale(out.float().sum()), mixed, create_graph=True)
        grad = grad / scaler.get_scale()
        penalty = 10 * (grad.norm(dim=1) - 1).square().mean()
        with half():
            loss = (d(fake) - d(real)).float().mean()
        scaler.scale(loss + penalty).backward()
        scaler.step(od)
        if i % 5 == 4:
            og.zero_grad()
            with half():
                back = -d(g(torch.randn(16, 8))).float().mean()
            scaler.scale(back).backward()
            scaler.step(og)
        scaler.update()
        return loss.item()

    return {"model": nn.ModuleList([g, d]), "optimizer": [og, od], "scaler": scaler, "step": step}


@healthy
def vae_float16() -> Loop:
    encode, decode = nn.Linear(16, 8), nn.Linear(4, 16)
    model, x = nn.ModuleList([encode, decode]), torch.rand(32, 16)

    def loss_of(i):
        mean, log_var = encode(x).float().chunk(2, -1)
        z = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(decode(z).float(), x, reduction="sum") / len(x) + min(1, i / 10) * kl

    return scaled(model, loss_of)


@healthy
def gru_float16() -> Loop:
    embed, lstm, head = nn.Embedding(32, 16), nn.GRU(16, 16, 2, dropout=0.1, batch_first=True), nn.Linear(16, 32)
    model, ids = nn.ModuleList([embed, lstm, head]), torch.randint(0, 32, (4, 12))

    def loss_of(i):
        return F.cross_entropy(head(lstm(embed(ids[:, :-1]))[0]).float().flatten(0, 1), ids[:, 1:].flatten())

    return scaled(model, loss_of, clip=0.25)
