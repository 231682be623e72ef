"""OneCycleLR moves beta1, a Python float that the compiled optimizer step is specialised on.

Mechanism: each new value of the float is another graph.
Source: https://github.com/pytorch/pytorch/issues/133898
Expected: recompile.
"""

import torch
from torch import nn

ID = "betas_move_under_compiled_step"
EXPECTED = {"check": "recompile"}
KIND = "call"


def _train(cycle):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.001))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=torch.tensor(0.001), total_steps=100, cycle_momentum=cycle
    )
    step = torch.compile(lambda: optimizer.step())
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        step()
        scheduler.step()


def buggy():
    _train(True)


def fixed():
    _train(False)


def manifests():
    from torch._dynamo.utils import counters

    graphs = []
    for cycle in (True, False):
        torch._dynamo.reset()
        counters.clear()
        _train(cycle)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > graphs[1] + 2, graphs
