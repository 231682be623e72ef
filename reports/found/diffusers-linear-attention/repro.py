import sys

import torch
from diffusers import AutoencoderDC

torch.manual_seed(0)
blocks, widths, scales = ("ResBlock", "EfficientViTBlock"), (64, 128), ((), (5,))
encoder = {"encoder_block_types": blocks, "encoder_block_out_channels": widths, "encoder_qkv_multiscales": scales}
decoder = {"decoder_block_types": blocks, "decoder_block_out_channels": widths, "decoder_qkv_multiscales": scales}
depths = {"encoder_layers_per_block": (2, 2), "decoder_layers_per_block": (2, 2), "downsample_block_type": "Conv"}
autoencoder = AutoencoderDC(latent_channels=8, **encoder, **decoder, **depths).eval()
image = torch.rand(1, 3, 128, 128) * 2 - 1
with torch.no_grad():
    with torch.autocast("cpu", torch.float16):
        low = autoencoder.encode(image).latent
    wide = autoencoder.encode(image).latent
print(f"autocast float16 gives {int((~low.isfinite()).sum())} of {low.numel()} not finite")
print(f"float32 gives numbers up to {wide.abs().max():.3g}")
sys.exit(int(not low.isfinite().all() and wide.isfinite().all()))
