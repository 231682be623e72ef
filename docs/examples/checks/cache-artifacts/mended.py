"""The first call compiles."""

import torch


def save():
    torch.compiler.reset()
    double = torch.compile(lambda x: x.sin() * 2)
    double(torch.ones(4))
    torch.compiler.save_cache_artifacts()


def subject():
    return save
