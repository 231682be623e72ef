"""The codebook of a VQ-VAE, and how often its codes are used, are averaged in bfloat16 and stand still.

Mechanism: cluster_size.mul_(0.999).add_(count, alpha=0.001) on buffers that model.bfloat16() cast.
Source: no single report; written from the mechanism.
Expected: stagnation.
"""

import torch
from torch import nn

ID = "codebook_average_in_bfloat16"
EXPECTED = {"check": "stagnation"}


class Quantize(nn.Module):
    def __init__(self, k=16, d=4, decay=0.999):
        super().__init__()
        self.decay = decay
        embed = torch.randn(k, d)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(k))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, z):
        flat = z.detach().to(self.embed.dtype)
        index = torch.cdist(flat.float(), self.embed.float()).argmin(1)
        hot = nn.functional.one_hot(index, len(self.embed)).to(flat.dtype)
        with torch.no_grad():
            self.cluster_size.data.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(hot.T @ flat, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            size = (self.cluster_size + 1e-5) / (n + len(self.embed) * 1e-5) * n
            self.embed.data.copy_(self.embed_avg / size[:, None])
        quantized = self.embed[index].to(z.dtype)
        return z + (quantized - z).detach(), nn.functional.mse_loss(z.float(), quantized.float())


def _make(dtype):
    torch.manual_seed(0)
    encoder, decoder, quantize = nn.Linear(8, 4), nn.Linear(4, 8), Quantize().to(dtype)
    model = nn.ModuleDict({"encoder": encoder, "quantize": quantize, "decoder": decoder})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(64, 8)

    def step(i):
        optimizer.zero_grad()
        z, commit = quantize(encoder(x))
        loss = nn.functional.mse_loss(decoder(z), x) + 0.25 * commit
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


def buggy():
    return _make(torch.bfloat16)


def fixed():
    return _make(torch.float32)


def manifests():
    b, f = buggy(), fixed()
    for i in range(200):
        b["step"](i)
        f["step"](i)
    kept = [c["model"]["quantize"].embed_avg.clone() for c in (b, f)]
    b["step"](200), f["step"](200)
    stuck = [(c["model"]["quantize"].embed_avg == old).float().mean() for c, old in zip((b, f), kept, strict=True)]
    assert stuck[0] > 0.6, stuck
    assert stuck[1] < 0.1, stuck
