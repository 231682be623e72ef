import sys

import torch

torch.manual_seed(0)
x = torch.randn(2, 64, 64, dtype=torch.bfloat16).transpose(1, 2)
y = torch.randn(2, 64, 64, dtype=torch.bfloat16)


def normalise(x, y):
    return torch.nn.functional.layer_norm((x + y).float(), (64,))


with torch.no_grad():
    eager, compiled = normalise(x, y), torch.compile(normalise)(x, y)
lost = int((~compiled.isfinite()).sum())
print(f"largest magnitude: {eager.abs().max():.3g} in eager mode, {compiled.abs().max():.3g} compiled")
print(
    f"{lost:,} of {compiled.numel():,} elements are not finite, {int((eager - compiled).abs().gt(0.1).sum()):,} are off"
)
sys.exit(int(lost > 0))
