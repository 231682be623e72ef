import sys

import torch
from transformers.loss.loss_for_object_detection import dice_loss

torch.manual_seed(0)
head, features = torch.nn.Conv2d(4, 1, 1), torch.randn(2, 4, 320, 320)
torch.nn.init.constant_(head.bias, 4.0)
target = torch.ones(2, 320 * 320)  # a mask of DETR's segmentation that fills a picture
with torch.autocast("cpu", torch.float16):
    masks = head(features)[:, 0].flatten(1)
    low = dice_loss(masks, target.to(masks.dtype), 2).item()
wide = dice_loss(head.double()(features.double())[:, 0].flatten(1), target.double(), 2).item()
print("autocast float16 gives", low, "float64 gives", wide)
sys.exit(int(not abs(low - wide) < 0.05))
