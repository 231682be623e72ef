"""The artifacts are saved before anything was compiled: nothing is saved.

Run: pytest failing.py
"""

import ampcheck
import torch


def test_artifacts_are_saved():
    with ampcheck.watch():
        double = torch.compile(lambda x: x.sin() * 2)
        torch.compiler.save_cache_artifacts()
        double(torch.ones(4))
