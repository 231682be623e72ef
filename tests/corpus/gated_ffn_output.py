"""The output projection of a gated feed-forward block overflows float16.

Mechanism: gelu(wi_0 x) * wi_1 x grows with the square of the stream; `wo` sums a few hundred such products.
Source: https://github.com/huggingface/transformers/pull/10956
Expected: overflow at `ffn.wo`, not at the norm that turns the infinity into NaN.
"""

import torch
import torch.nn.functional as F
from torch import nn

ID = "gated_ffn_output"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "ffn.wo", "op": "aten::mm"}


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 4.0))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return wide.to(self.weight.dtype) * self.weight


class GatedFFN(nn.Module):
    def __init__(self, dim=24, hidden=192):
        super().__init__()
        self.wi_0, self.wi_1 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.wo = nn.Linear(hidden, dim, bias=False)
        for gate in (self.wi_0, self.wi_1):
            nn.init.constant_(gate.weight, 1.0)
        with torch.no_grad():
            self.wo.weight.copy_(torch.linspace(-0.06, 0.06, dim)[:, None].expand(dim, hidden))

    def forward(self, x):
        hidden = F.gelu(self.wi_0(x)) * self.wi_1(x)
        return self.wo(hidden.to(self.wo.weight.dtype))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.ffn, self.final_norm = RMSNorm(24), GatedFFN(), RMSNorm(24)

    def forward(self, x):
        return self.final_norm(x + self.ffn(self.norm(x)))


def inputs():
    return ((1 + 0.05 * torch.linspace(-1, 1, 4 * 24).view(1, 4, 24)).half(),)


def buggy():
    return Block().half(), inputs()


def fixed():
    block = Block().half()
    block.ffn.wo.float()
    return block, inputs()


def manifests():
    block, args = buggy()
    finite = {}
    for name in ("ffn.wi_0", "ffn.wi_1", "ffn.wo"):
        block.get_submodule(name).register_forward_hook(
            lambda module, given, out, name=name: finite.update({name: bool(out.isfinite().all())})
        )
    broken, (whole, same) = block(*args), fixed()
    assert finite == {"ffn.wi_0": True, "ffn.wi_1": True, "ffn.wo": False}
    assert not broken.isfinite().all()
    assert whole(*same).isfinite().all()
