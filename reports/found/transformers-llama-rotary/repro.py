import sys

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as Rotary

config = LlamaConfig(hidden_size=128, num_attention_heads=1, max_position_embeddings=4096)
x, positions = torch.zeros(1, 1), torch.arange(4096)[None]
inv_freq = Rotary(config).inv_freq.double()
wide = (positions[0, :, None] * inv_freq).cos()
low = Rotary(config).bfloat16()(x, positions)[0][0, :, :64].double()  # as in model.bfloat16(), its output in float32
error = (low - wide).abs().amax(1)
print(f"bfloat16 weights give cosines off by {error[256]:.2f} at position 256, {error[4095]:.2f} at 4095")
print("float64 gives the angles that the weights were trained with")
sys.exit(int(error.max() > 0.1))
