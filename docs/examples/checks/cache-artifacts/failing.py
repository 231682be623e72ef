"""The artifacts are saved before anything was compiled: nothing is saved.

Run: ampcheck audit failing.py:subject
"""

import torch


def save():
    torch.compiler.reset()
    double = torch.compile(lambda x: x.sin() * 2)
    torch.compiler.save_cache_artifacts()
    double(torch.ones(4))


def subject():
    return save
