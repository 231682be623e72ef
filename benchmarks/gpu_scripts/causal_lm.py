"""transformers' run_clm_no_trainer.py under `accelerate launch --mixed_precision fp16`, in a public copy."""

import random
from pathlib import Path

from _driving import run_script


def write_model(folder):
    """A small configuration of GPT-2, and a tokenizer of ten words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(10)} | {"<unk>": 10}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32).save_pretrained(folder)
    GPT2Config(vocab_size=11, n_positions=32, n_embd=16, n_layer=2, n_head=2).save_pretrained(folder)


def main():
    write_model("model")
    lines = [" ".join(f"w{random.randrange(10)}" for _ in range(32)) for _ in range(64)]
    for name in ("train", "validation"):
        Path(f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    run_script(
        "run_clm_no_trainer.py",
        *("--train_file", "train.txt", "--validation_file", "validation.txt", "--config_name", "model"),
        *("--tokenizer_name", "model", "--per_device_train_batch_size", "2", "--block_size", "16"),
        *("--max_train_steps", "8", "--overwrite_cache"),
    )
