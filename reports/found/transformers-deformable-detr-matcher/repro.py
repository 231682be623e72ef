import sys

import torch
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher as Matcher

torch.manual_seed(0)
head, queries = torch.nn.Linear(8, 3, bias=False), torch.eye(8)[None]
boxes = torch.rand(1, 8, 4) / 4 + 0.3
with torch.no_grad():
    head.weight.zero_()[1, 5] = 12.0  # query 5 is sure of class 1, and its box is right
targets = [{"class_labels": torch.tensor([1]), "boxes": boxes[0, 5:6]}]
matcher = Matcher(class_cost=2, bbox_cost=5, giou_cost=2)
with torch.autocast("cpu", torch.float16):
    low = matcher({"logits": head(queries), "pred_boxes": boxes}, targets)[0][0].item()
logits = head.double()(queries.double())
wide = matcher({"logits": logits, "pred_boxes": boxes.double()}, [{**targets[0], "boxes": boxes[0, 5:6].double()}])
print("autocast float16 matches query", low, "float64 matches", wide[0][0].item())
sys.exit(int(low != wide[0][0].item()))
