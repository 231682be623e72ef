"""Real architectures of the ecosystem, made small, with random weights; nothing is downloaded.

Factories for tests and for `ampcheck audit tests/transformers_models.py:gpt2`.
"""

from __future__ import annotations

from typing import Any

import torch


def gpt2() -> tuple[Any, tuple[()], dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=128)
    ids = torch.randint(0, 128, (2, 32))
    return GPT2LMHeadModel(config).eval(), (), {"input_ids": ids, "labels": ids, "use_cache": False}


def t5() -> tuple[Any, tuple[()], dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=128, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    ids = torch.randint(1, 128, (2, 24))
    return T5ForConditionalGeneration(config).eval(), (), {"input_ids": ids, "labels": ids, "use_cache": False}


def vit() -> tuple[Any, tuple[Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8,
        num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config).eval(), (torch.randn(2, 3, 32, 32),)


def t5_hot() -> tuple[Any, tuple[()], dict[str, Any]]:
    """The same T5 with feed-forward weights as large as some trained ones: its output projection leaves float16."""
    model, args, kwargs = t5()
    with torch.no_grad():
        for block in model.encoder.block:
            block.layer[1].DenseReluDense.wi_0.weight.mul_(48)
            block.layer[1].DenseReluDense.wi_1.weight.mul_(48)
            block.layer[1].DenseReluDense.wo.weight.mul_(48)
    return model, args, kwargs
