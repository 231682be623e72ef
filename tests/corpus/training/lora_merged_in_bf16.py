"""A low-rank delta below half a spacing of the bfloat16 weights vanishes when it is merged into them.

Mechanism: one addition into weights that are ten thousand times larger leaves most of them as they were.
Source: https://github.com/huggingface/peft/issues/1388 and https://github.com/meta-pytorch/torchtune/issues/1101
Expected: stagnation or precision-loss.
"""

import torch
from torch import nn
from torch.nn import functional as F

ID = "lora_merged_in_bf16"
EXPECTED = {"check": ("stagnation", "precision-loss")}
KIND = "call"


def _parts():
    torch.manual_seed(0)
    base = nn.Linear(64, 64, bias=False).bfloat16()
    a, b = torch.randn(4, 64) * 0.02, torch.randn(64, 4) * 1e-3
    return base, a, b, torch.randn(16, 64).bfloat16()


def buggy():
    base, a, b, x = _parts()
    with torch.no_grad():
        base.weight.add_((b @ a).to(base.weight.dtype))
    return base(x)


def fixed():
    base, a, b, x = _parts()
    return F.linear(x, base.weight).float() + (x.float() @ a.T) @ b.T


def manifests():
    base, a, b, _ = _parts()
    merged = base.weight + (b @ a).bfloat16()
    assert (merged == base.weight).float().mean() > 0.5
