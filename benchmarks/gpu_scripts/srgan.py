"""A GAN with one GradScaler for two optimizers and a prefetcher on a stream: Lornatang/SRGAN-PyTorch."""

import sys
from pathlib import Path

import torch
import yaml
from _driving import run_script, write_images
from torch import nn


class Features(nn.Module):
    """The network of the content loss, without the 120 million weights that it does not use."""

    def __init__(self, *_):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))

    def forward(self, x):
        return self.features(x)


def main():
    sys.path.insert(0, ".")
    import model

    model._FeatureExtractor = Features
    config = yaml.safe_load(Path("configs/train/SRGAN_x4-ImageNet.yaml").read_text(encoding="utf-8"))
    folders = {"train": 96, "test_gt": 32, "test_lr": 8}
    for name, size in folders.items():
        write_images(f"data/{name}", 4, size)
    torch.save(Features().state_dict(), "vgg.pth")  # random weights
    config["MODEL"]["G"].update(CHANNELS=8, NUM_RCB=1)
    config["MODEL"]["D"].update(CHANNELS=4)
    config["TRAIN"]["DATASET"]["TRAIN_GT_IMAGES_DIR"] = "data/train"
    config["TRAIN"]["CHECKPOINT"]["PRETRAINED_G_MODEL"] = ""
    config["TRAIN"]["HYP"].update(IMGS_PER_BATCH=1, NUM_WORKERS=0, PERSISTENT_WORKERS=False)
    config["TRAIN"]["LOSSES"]["CONTENT_LOSS"].update(
        NET_CFG_NAME="vgg11", NUM_CLASSES=2, MODEL_WEIGHTS_PATH="vgg.pth", FEATURE_NODES=["features.3"]
    )
    config["TEST"]["DATASET"].update(PAIRED_TEST_GT_IMAGES_DIR="data/test_gt", PAIRED_TEST_LR_IMAGES_DIR="data/test_lr")
    config["TEST"]["HYP"].update(NUM_WORKERS=0, PERSISTENT_WORKERS=False)
    Path("small.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run_script("train_gan.py", "--config_path", "small.yaml")
