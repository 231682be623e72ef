"""Lightning with `precision="16-mixed"`: the template for ImageNet of Lightning-AI/pytorch-lightning."""

from _driving import run_script, write_classes
from torch import nn
from torchvision.models._api import register_model


class Small(nn.Sequential):
    """A network for pictures of 224 by 224 pixels and 1000 classes."""

    def __init__(self, **_):
        super().__init__(nn.Conv2d(3, 8, 3, stride=32), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(8, 1000))


def main():
    register_model("small")(Small)
    write_classes("data/train", count=4)
    write_classes("data/val", count=2)
    run_script(
        "imagenet.py",
        *("fit", "--model.arch", "small", "--model.lr", "0.001", "--model.data_path", "data"),
        *("--model.batch_size", "2", "--model.workers", "0"),
        *("--trainer.precision", "16-mixed", "--trainer.accelerator", "gpu", "--trainer.max_epochs", "2"),
    )
