"""Token ids travel in a bfloat16 tensor beside the features.

Mechanism: ids above 256 are rounded when they are concatenated; the embedding looks up other tokens.
Source: https://github.com/lucidrains/vector-quantize-pytorch/issues/114
Expected: integer-cast at `pack`.
"""

import torch
from torch import nn

ID = "ids_beside_features"
RUN = "native"
EXPECTED = {"check": "integer-cast", "module": "pack"}


class Pack(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, features, ids):
        dtype = torch.float32 if self.wide else features.dtype
        return torch.cat((features.to(dtype), ids[..., None].to(dtype)), -1)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.pack, self.embed = Pack(wide), nn.Embedding(1000, 4)

    def forward(self, features, ids):
        packed = self.pack(features, ids)
        return packed[..., :-1].to(features.dtype) + self.embed(packed[..., -1].long())


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 6, 4).bfloat16(), torch.randint(500, 1000, (2, 6))


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.1 * wanted.norm()
