"""timm's train.py, in the copy of sail-sg/poolformer, on its own small network."""

import sys

import torch
from _driving import run_script, write_classes


def main():
    sys.path.insert(0, ".")
    import models
    from timm.models import register_model

    @register_model
    def poolformer_small(pretrained=False, **options):
        for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
            options.pop(name, None)
        sizes = {"layers": [1] * 4, "embed_dims": [8, 16, 16, 16], "mlp_ratios": [2] * 4, "downsamples": [True] * 4}
        return models.poolformer.PoolFormer(**sizes, **options)

    torch.manual_seed(0)
    write_classes("data/train")
    write_classes("data/validation")
    run_script(
        "train.py",
        *("data", "--model", "poolformer_small", "-b", "2", "--num-classes", "2", "--img-size", "64", "--native-amp"),
        *("--clip-grad", "1.0", "-j", "1", "--epochs", "2", "--opt", "adamw", "--warmup-epochs", "0"),
        *("--output", "out"),
    )
