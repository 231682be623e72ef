"""torch.quantile takes no 16-bit input.

Mechanism: an entropy threshold over bfloat16 logits raises where float32 runs.
Source: https://github.com/huggingface/trl/issues/3666
Expected: low-precision-error at `threshold`.
"""

import pytest
import torch
from torch import nn

ID = "quantile_of_half"
RUN = "native"
EXPECTED = {"check": "low-precision-error", "module": "threshold"}


class Threshold(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, entropy):
        level = torch.quantile(entropy.float() if self.wide else entropy, 0.8)
        return entropy - level


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.threshold = nn.Linear(4, 10), Threshold(wide)
        with torch.no_grad():
            self.head.weight.mul_(6)

    def forward(self, x):
        log_p = self.head(x).log_softmax(-1)
        return self.threshold(-(log_p.exp() * log_p).sum(-1))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(20, 4).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    model, args = buggy()
    assert fixed()[0](*args).isfinite().all()
    with pytest.raises(RuntimeError, match="float or double"):
        model(*args)
