import sys

import torch
from diffusers.models.embeddings import GaussianFourierProjection

torch.manual_seed(0)
embed = GaussianFourierProjection(128, scale=16)  # of UNet2DModel(time_embedding_type="fourier"), NCSN++
sigma = torch.tensor([0.01, 1.0, 50.0, 1348.0])  # float32, as the scheduler gives them
wide = embed.double()(sigma.double())
low = embed.float().bfloat16()(sigma)
print("bfloat16 weights give", low[3, :4].tolist(), f"off by up to {(low.double() - wide).abs().max():.2f}")
print("float64 gives", wide[3, :4].tolist())
sys.exit(int((low.double() - wide).abs().max() > 0.1))
