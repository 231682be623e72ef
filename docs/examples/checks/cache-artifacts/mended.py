"""The first call compiles."""

import ampcheck
import torch


def test_artifacts_are_saved():
    with ampcheck.watch():
        double = torch.compile(lambda x: x.sin() * 2)
        double(torch.ones(4))
        torch.compiler.save_cache_artifacts()
