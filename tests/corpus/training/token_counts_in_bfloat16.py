"""Token counts of the ranks are summed in bfloat16: the loss is divided by a wrong number of tokens.

Mechanism: counts of 1000 and more have a spacing of 4 to 8 and of 4096 in the sum.
Source: no single report; written from the mechanism.
Expected: reduce-precision.
"""

import torch

ID = "token_counts_in_bfloat16"
EXPECTED = {"check": "reduce-precision"}
KIND = "call"


def _counts(world=256):
    torch.manual_seed(0)
    return torch.randint(900, 1100, (world, 1))


def buggy():
    total = torch.zeros(1, dtype=torch.bfloat16)
    for count in _counts().bfloat16():
        total = total + count
    return total.item()


def fixed():
    total = torch.zeros(1, dtype=torch.int64)
    for count in _counts():
        total = total + count
    return total.item()


def manifests():
    assert abs(buggy() / fixed() - 1) > 0.02, (buggy(), fixed())
