"""The scale of an 8-bit cache is calibrated by the first call, a warm-up of equal tokens, and never again.

Mechanism: the keys of real prompts are larger, and the clamp before the cast cuts them off.
Source: https://github.com/kekzl/imp/pull/89
Expected: precision-loss at the clamp.
"""

import torch
from torch import nn
from torch.nn import functional as F

ID = "kv_scale_of_the_warm_up"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "precision-loss", "module": "", "op": "aten::clamp"}


class Attention(nn.Module):
    def __init__(self, grows):
        super().__init__()
        self.grows = grows
        self.qkv = nn.Linear(64, 192)
        self.register_buffer("scale", torch.zeros(()))

    def cached(self, x):
        amax = x.detach().float().abs().amax()
        if self.grows:
            self.scale.copy_(torch.maximum(self.scale, amax / 448))
        elif not bool(self.scale):
            self.scale.copy_(amax / 448)
        return ((x.float() / self.scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * self.scale).to(x.dtype)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k + (self.cached(k) - k).detach(), v)


def _make(grows):
    torch.manual_seed(0)
    model = Attention(grows)
    model(torch.randn(1, 1, 64).expand(1, 8, 64) / 4)
    return model, (torch.randn(2, 8, 64),)


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    errors = []
    for grows in (False, True):
        model, (x,) = _make(grows)
        k = model.qkv(x).chunk(3, -1)[1]
        errors.append(((model.cached(k) - k).norm() / k.norm()).item())
    assert errors[0] > 0.3, errors
    assert errors[1] < 0.05, errors
