"""accelerate in float16: diffusers' training without a condition, with an average of the weights."""

import json
from pathlib import Path

from _driving import run_script, write_images

MODEL = {
    "_class_name": "UNet2DModel",
    "sample_size": 16,
    "block_out_channels": [8, 8],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": 4,
}


def main():
    write_images("images", 8, 16)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    run_script(
        "train_unconditional.py",
        *("--train_data_dir", "images", "--model_config_name_or_path", "model", "--resolution", "16"),
        *("--train_batch_size", "2", "--mixed_precision", "fp16", "--use_ema", "--num_epochs", "1"),
        *("--ddpm_num_inference_steps", "2", "--eval_batch_size", "2", "--lr_warmup_steps", "0"),
        *("--cache_dir", "cache", "--output_dir", "out"),
    )
