"""diffusers' fine-tuning of text to image, on a small pipeline with random weights."""

import json
from pathlib import Path

from _driving import run_script, write_images


def write_pipeline(folder):
    """The parts that the script loads, with random weights."""
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    sizes = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    UNet2DConditionModel(
        **sizes, down_block_types=down, up_block_types=up, cross_attention_dim=16, attention_head_dim=4, sample_size=8
    ).save_pretrained(f"{folder}/unet")
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    AutoencoderKL(**sizes, **blocks).save_pretrained(f"{folder}/vae")
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    CLIPTextModel(CLIPTextConfig(**text, vocab_size=64)).save_pretrained(f"{folder}/text_encoder")
    letters = [*"abcdefghijklmnopqrstuvwxyz", *(f"{letter}</w>" for letter in "abcdefghijklmnopqrstuvwxyz")]
    vocabulary = {name: number for number, name in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    Path(folder, "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    Path(folder, "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    names = f"{folder}/vocab.json", f"{folder}/merges.txt"
    CLIPTokenizer(*names, model_max_length=77).save_pretrained(f"{folder}/tokenizer")
    DDPMScheduler().save_pretrained(f"{folder}/scheduler")


def main():
    write_images("images", 8, 32)
    captions = [json.dumps({"file_name": f"{number}.png", "text": "a picture"}) for number in range(8)]
    Path("images/metadata.jsonl").write_text("\n".join(captions), encoding="utf-8")
    write_pipeline("pipeline")
    run_script(
        "train_text_to_image.py",
        *("--pretrained_model_name_or_path", "pipeline", "--train_data_dir", "images", "--resolution", "16"),
        *("--train_batch_size", "2", "--mixed_precision", "fp16", "--max_train_steps", "8", "--use_ema"),
        *("--cache_dir", "cache", "--output_dir", "out", "--seed", "0", "--gradient_accumulation_steps", "1"),
    )
