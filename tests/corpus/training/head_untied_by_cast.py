"""The head is cast to float32 by a new parameter: it is tied to the embedding no more, and no optimizer steps it.

Mechanism: a parameter that is made anew for its dtype leaves the one that the optimizer knows.
Source: https://github.com/huggingface/trl/pull/4446, https://github.com/allenai/open-instruct/pull/1387
Expected: master-weights or stagnation.
"""

import torch
from torch import nn

ID = "head_untied_by_cast"
EXPECTED = {"check": ("master-weights", "stagnation")}
KIND = "call"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.wide = False

    def forward(self, x):
        h = torch.tanh(self.mid(self.embed(x)))
        if self.wide:
            return nn.functional.linear(h.float(), self.head.weight.float())
        return self.head(h.to(self.head.weight.dtype))


def _train(untie, steps=24):
    torch.manual_seed(0)
    model = Model().bfloat16()
    named = dict(model.named_parameters())
    if untie:
        model.head.float()
        model.head.weight = nn.Parameter(model.head.weight.detach().clone().float())
        model.embed.weight = nn.Parameter(model.embed.weight.detach().bfloat16())
        named["embed.weight"] = model.embed.weight
    else:
        model.wide = True
    masters = {name: nn.Parameter(p.detach().float()) for name, p in named.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    x, y = torch.randint(0, 64, (16, 12)), torch.randint(0, 64, (16, 12))
    for _ in range(steps):
        nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten()).backward()
        for name, p in named.items():
            masters[name].grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(masters[name])
    return (model.head.weight.float() - model.embed.weight.float()).abs().max().item()


def buggy():
    _train(True)


def fixed():
    _train(False)


def manifests():
    b, f = _train(True), _train(False)
    assert b > 0.01, b
    assert f == 0, f
