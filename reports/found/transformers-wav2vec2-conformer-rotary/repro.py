import sys

import torch
from transformers import Wav2Vec2ConformerConfig
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerRotaryPositionalEmbedding as Rotary,
)

config = Wav2Vec2ConformerConfig(hidden_size=64, num_attention_heads=1)
frames = torch.zeros(1, 1500, 64)  # 30 seconds of speech
wide = Rotary(config).double()(frames.double())
low = Rotary(config).bfloat16()(frames.bfloat16()).double()
same = int((low[0, 1000:1500, 0, 0].unique()).numel())
print(f"bfloat16 weights give {same} cosines for frames 1000 to 1500, off by up to {(low - wide).abs().max():.2f}")
print(f"float64 gives {wide[0, 1000:1500, 0, 0].unique().numel()}")
sys.exit(int((low - wide).abs().max() > 0.1))
