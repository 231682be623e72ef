"""Trains a small GPT on characters: autocast, GradScaler, accumulation, clipping, a cosine schedule, checkpoints."""

import math
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

PRECISION = "float16"  # float32, bfloat16, float16, or pure bfloat16 with master weights

OUT_DIR = Path("out")
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
BLOCK_SIZE, BATCH_SIZE, ACCUMULATION = 16, 8, 2
MAX_ITERS, EVAL_INTERVAL, EVAL_ITERS = 26, 12, 1
LEARNING_RATE, MIN_LR, WARMUP_ITERS = 3e-3, 3e-4, 4
GRAD_CLIP = 1.0

pure = PRECISION == "pure bfloat16"
low = torch.float16 if PRECISION == "float16" else torch.bfloat16
ctx = nullcontext() if pure or PRECISION == "float32" else torch.autocast("cpu", dtype=low)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab, width=32, heads=2, layers=1):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(BLOCK_SIZE, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.08)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.reshape(-1))

    def configure_optimizer(self, parameters):
        decay = [p for p in parameters if p.dim() >= 2]
        plain = [p for p in parameters if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def get_batch(data):
    starts = torch.randint(len(data) - BLOCK_SIZE - 1, (BATCH_SIZE,)).tolist()
    x = torch.stack([data[start : start + BLOCK_SIZE] for start in starts])
    y = torch.stack([data[start + 1 : start + BLOCK_SIZE + 1] for start in starts])
    return x, y


def get_lr(it):
    if it < WARMUP_ITERS:
        return LEARNING_RATE * (it + 1) / WARMUP_ITERS
    ratio = (it - WARMUP_ITERS) / (MAX_ITERS - WARMUP_ITERS)
    return MIN_LR + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (LEARNING_RATE - MIN_LR)


@torch.no_grad()
def estimate_loss(model, data):
    model.eval()
    losses = torch.zeros(EVAL_ITERS)
    for k in range(EVAL_ITERS):
        x, y = get_batch(data)
        with ctx:
            loss = model(x, y)
        losses[k] = loss.item()
    model.train()
    return losses.mean().item()


def main():
    torch.manual_seed(1337)
    OUT_DIR.mkdir(exist_ok=True)
    chars = sorted(set(TEXT))
    data = torch.tensor([chars.index(char) for char in TEXT * 20])

    model = GPT(len(chars))
    if pure:
        model.to(torch.bfloat16)
    weights = list(model.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights] if pure else weights
    optimizer = model.configure_optimizer(masters)
    scaler = torch.amp.GradScaler("cpu", enabled=PRECISION == "float16")

    best_val_loss = float("inf")
    running_loss = 0.0
    for iter_num in range(MAX_ITERS):
        lr = get_lr(iter_num)
        for group in optimizer.param_groups:
            group["lr"] = lr

        if iter_num % EVAL_INTERVAL == 0:
            val_loss = estimate_loss(model, data)
            if val_loss < best_val_loss:
                best_val_loss = val_loss
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                    "iter_num": iter_num,
                }
                torch.save(checkpoint, OUT_DIR / "ckpt.pt")

        for _ in range(ACCUMULATION):
            x, y = get_batch(data)
            with ctx:
                loss = model(x, y)
                loss = loss / ACCUMULATION
            scaler.scale(loss).backward()
            running_loss += loss.item()
        if pure:
            for master, weight in zip(masters, weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters, GRAD_CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if pure:
            with torch.no_grad():
                for master, weight in zip(masters, weights, strict=True):
                    weight.copy_(master)
    print(f"iter {iter_num}: mean loss {float(running_loss) / MAX_ITERS:.4f}, best val loss {best_val_loss:.4f}")


if __name__ == "__main__":
    main()
