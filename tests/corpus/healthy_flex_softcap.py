"""FlexAttention with a cap on its scores in bfloat16: on the CPU it has no backward, and inference needs none."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

ID = "healthy_flex_softcap"
RUNS = ("native",)


def _capped(score, *_):
    return 20 * torch.tanh(score / 20)


def _causal(b, h, q, k):
    return q >= k


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.mask = create_block_mask(_causal, None, None, 128, 128, device="cpu")

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, score_mod=_capped, block_mask=self.mask)


def healthy():
    torch.manual_seed(0)
    return Model().bfloat16().requires_grad_(False), (torch.randn(1, 128, 32).bfloat16(),)
