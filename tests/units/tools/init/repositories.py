"""Small repositories in the shapes that people have, written into a folder."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

NANOGPT = {
    "model.py": """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.norm = config.n_head, nn.LayerNorm(config.n_embd)
        self.qkv, self.out = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        batch, length, width = x.shape
        heads = (part.view(batch, length, self.heads, -1).mT.transpose(2, 3).transpose(1, 2)
                 for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return logits, loss
""",
    "train.py": """
import torch
from model import GPT, GPTConfig

config = {"n_layer": 12}
model = GPT(GPTConfig(**config))
for step in range(1):
    logits, loss = model(torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
    loss.backward()
""",
}
"""A model with a configuration class, and a script that trains when it is imported."""

SRC = {
    "pyproject.toml": '# my settings\n[project]\nname = "shapes"   # mine\nversion = "1"\n',
    "src/shapes/__init__.py": "from .net import Net\n",
    "src/shapes/layers.py": """
from torch import nn

class Inner(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).relu()
""",
    "src/shapes/net.py": """
from torch import nn
from .layers import Inner

class Net(nn.Module):
    def __init__(self, in_channels, num_classes, *, width=8):
        super().__init__()
        self.conv, self.inner = nn.Conv2d(in_channels, width, 3), Inner(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.inner(self.conv(x).mean((2, 3))))
""",
    "tests/test_net.py": "def test_nothing(): pass\n",
}
"""A package below src/, with required arguments that have the field's names."""

UNGUESSABLE = {
    "net.py": """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, wavelengths, grid):
        super().__init__()
        self.linear = nn.Linear(len(wavelengths), grid.size)

    def forward(self, x):
        return self.linear(x)
"""
}
"""A model whose arguments nobody can guess."""

TRAINING = {
    "train.py": """
import torch
from pathlib import Path

def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        Path("checkpoint.pt").write_text("weights")

if __name__ == "__main__":
    main()
"""
}
"""A script alone, which leaves files behind."""

TRANSFORMERS = {
    "finetune.py": """
import argparse
from transformers import AutoModelForSequenceClassification

def train(options, loader):
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
    for batch in loader:
        model(**batch).loss.backward()

def main():
    parser = argparse.ArgumentParser()
    train(parser.parse_args(), [])

if __name__ == "__main__":
    main()
"""
}
"""A script that fine-tunes a checkpoint from the network."""


def write(folder: Path, files: Mapping[str, str], *, git: bool = True) -> Path:
    """Write the files; with git, as a repository of their own."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    folder.mkdir(exist_ok=True)
    if git:
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder
