"""A GAN with one GradScaler for two optimizers and a prefetcher on a stream: Lornatang/SRGAN-PyTorch."""

from pathlib import Path

import torch
import yaml
from _driving import run_script, write_images
from torchvision import models


def main():
    config = yaml.safe_load(Path("configs/train/SRGAN_x4-ImageNet.yaml").read_text(encoding="utf-8"))
    folders = {"train": 96, "test_gt": 32, "test_lr": 8}
    for name, size in folders.items():
        write_images(f"data/{name}", 4, size)
    torch.save(models.vgg11(num_classes=2).state_dict(), "vgg.pth")  # random weights
    config["MODEL"]["G"].update(CHANNELS=8, NUM_RCB=1)
    config["MODEL"]["D"].update(CHANNELS=4)
    config["TRAIN"]["DATASET"]["TRAIN_GT_IMAGES_DIR"] = "data/train"
    config["TRAIN"]["CHECKPOINT"]["PRETRAINED_G_MODEL"] = ""
    config["TRAIN"]["HYP"].update(IMGS_PER_BATCH=1, NUM_WORKERS=0, PERSISTENT_WORKERS=False)
    config["TRAIN"]["LOSSES"]["CONTENT_LOSS"].update(
        NET_CFG_NAME="vgg11", NUM_CLASSES=2, MODEL_WEIGHTS_PATH="vgg.pth", FEATURE_NODES=["features.4"]
    )
    config["TEST"]["DATASET"].update(PAIRED_TEST_GT_IMAGES_DIR="data/test_gt", PAIRED_TEST_LR_IMAGES_DIR="data/test_lr")
    config["TEST"]["HYP"].update(NUM_WORKERS=0, PERSISTENT_WORKERS=False)
    Path("small.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run_script("train_gan.py", "--config_path", "small.yaml")
