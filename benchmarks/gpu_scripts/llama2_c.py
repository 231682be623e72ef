"""A script in the way of nanoGPT: karpathy/llama2.c, in float16."""

import tempfile

import torch
from _driving import run_script

SIZES = {"dim": 48, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "batch_size": 4, "max_seq_len": 32, "vocab_size": 512}


def batches(batch_size, max_seq_len, vocab_size, device, **_):
    while True:
        tokens = torch.randint(0, vocab_size, (batch_size, max_seq_len + 1))
        x, y = (part.to(device, non_blocking=True) for part in (tokens[:, :-1], tokens[:, 1:]))
        yield x, y


def main():
    import sys

    sys.path.insert(0, ".")
    import tinystories

    tinystories.Task.iter_batches = staticmethod(batches)
    sizes = [f"--{name}={value}" for name, value in SIZES.items()]
    run_script(
        *("train.py", "--dtype=float16", "--vocab_source=custom", "--eval_iters=1"),
        *("--gradient_accumulation_steps=2", f"--out_dir={tempfile.mkdtemp()}", *sizes),
    )
