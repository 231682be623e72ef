"""A state of a callable without parameters is kept in bfloat16: each step builds a new tensor and rounds it.

Mechanism: 0.999 of the state and 0.001 of the input give the old number as soon as the step is below half a spacing.
Source: https://github.com/sgl-project/sglang/pull/10258
Expected: stagnation or precision-loss.
"""

import torch

ID = "state_functional_bf16"
EXPECTED = {"check": ("stagnation", "precision-loss")}
KIND = "call"


def _decode(dtype, rounds=600):
    torch.manual_seed(0)
    state = torch.zeros(16, dtype=dtype)
    with torch.no_grad():
        for _ in range(rounds):
            x = 1 + 0.1 * torch.randn(16)
            state = (0.999 * state.float() + 0.001 * x).to(dtype)
    return state.float()


def buggy():
    return _decode(torch.bfloat16)


def fixed():
    return _decode(torch.float32)


def manifests():
    low, wide, exact = (_decode(d).mean().item() for d in (torch.bfloat16, torch.float32, torch.float64))
    assert low < 0.7 * exact, (low, exact)
    assert abs(wide - exact) < 1e-3, (wide, exact)
