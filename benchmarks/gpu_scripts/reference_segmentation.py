"""The reference of torchvision for segmentation, in the copy of growlix/pytorch-i1k-baseline."""

import torchvision
from _driving import run_script, write_images
from PIL import Image
from torch import nn


class Voc:
    """Images and masks of 21 classes, in the way of `torchvision.datasets.VOCSegmentation`."""

    def __init__(self, root, image_set, transforms):
        write_images("images", 8, 48)
        write_images("masks", 8, 48, high=21, channels=1)
        self.transforms = transforms

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return self.transforms(Image.open(f"images/{number}.png"), Image.open(f"masks/{number}.png"))


class Small(nn.Module):
    """A network with the parts that the script asks for."""

    def __init__(self, num_classes):
        super().__init__()
        convolution = nn.Conv2d(3, 8, 3, stride=16, padding=1)
        self.backbone = nn.Sequential(convolution, nn.BatchNorm2d(8), nn.Hardswish(), nn.Conv2d(8, 16, 3, padding=1))
        self.classifier = nn.Conv2d(16, num_classes, 1)

    def forward(self, x):
        y = self.classifier(self.backbone(x).relu())
        return {"out": nn.functional.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)}


def main():
    torchvision.datasets.VOCSegmentation = Voc
    torchvision.models.segmentation.small = lambda num_classes, **_: Small(num_classes)
    run_script(
        "train.py",
        *("--amp", "--dataset", "voc", "--model", "small", "--device", "cuda", "-b", "2", "-j", "0", "--epochs", "2"),
    )
