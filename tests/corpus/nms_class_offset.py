"""The class offset of batched non-maximum suppression overflows float16 boxes.

Mechanism: boxes of different classes are moved apart by label * (largest coordinate + 1); many classes on a large image
pass 65504, and the overlaps become NaN.
Source: https://github.com/pytorch/vision/issues/3371
Expected: overflow at `nms.separate`.
"""

import torch
from torch import nn

ID = "nms_class_offset"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "nms.separate"}


class Separate(nn.Module):
    def forward(self, boxes, labels):
        return boxes + (labels.to(boxes.dtype) * (boxes.amax() + 1))[:, None]


class Overlaps(nn.Module):
    def forward(self, boxes):
        top = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
        bottom = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
        width, height = (bottom - top).clamp(min=0).unbind(-1)
        across, down = (boxes[:, 2:] - boxes[:, :2]).unbind(-1)
        area, shared = (across / 64) * (down / 64), (width / 64) * (height / 64)
        return shared / (area[:, None] + area[None, :] - shared)


class NMS(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.separate, self.overlaps = Separate(), Overlaps()

    def forward(self, boxes, labels):
        return self.overlaps(self.separate(boxes.float() if self.wide else boxes, labels))


class Detector(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        self.nms = NMS(wide)

    def forward(self, boxes, labels):
        return self.nms(boxes, labels)


def inputs():
    boxes = torch.tensor([[100.0, 120, 300, 320], [104, 120, 300, 324], [900, 900, 1020, 1000]])
    return boxes.half(), torch.tensor([79, 79, 3])


def buggy():
    return Detector(), inputs()


def fixed():
    return Detector(wide=True), inputs()


def manifests():
    args = inputs()
    assert buggy()[0](*args)[0, 1].isnan()
    assert fixed()[0](*args)[0, 1] > 0.9
