"""DistributedDataParallel with NCCL and a GradScaler: facebookresearch/dino, with a small vision transformer."""

import sys
from functools import partial

import torch
from _driving import run_script, write_classes


def main():
    torch.hub.list = lambda *_, **__: []  # names of models for the help text, from the network
    sys.path.insert(0, ".")
    import vision_transformer

    options = {"embed_dim": 96, "depth": 2, "num_heads": 2, "qkv_bias": True}
    vision_transformer.vit_tiny = partial(vision_transformer.VisionTransformer, **options)
    vision_transformer.DINOHead = partial(vision_transformer.DINOHead, hidden_dim=512, bottleneck_dim=64)
    write_classes("train_images", count=6)
    run_script(
        "main_dino.py",
        *("--arch", "vit_tiny", "--patch_size", "32", "--out_dim", "32", "--use_fp16", "true", "--epochs", "2"),
        *("--batch_size_per_gpu", "2", "--local_crops_number", "2", "--warmup_epochs", "0", "--num_workers", "0"),
        *("--warmup_teacher_temp_epochs", "0", "--data_path", "train_images", "--output_dir", "."),
    )
