"""The thread enters the region itself."""

import threading

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)

    def work():
        with torch.autocast("cpu", torch.bfloat16):
            model(x)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    return step
