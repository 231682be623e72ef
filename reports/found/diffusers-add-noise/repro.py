import sys

import torch
from diffusers import DDPMScheduler

torch.manual_seed(0)
encoder, image = torch.nn.Conv2d(3, 4, 8, stride=8), torch.randn(1, 3, 64, 64)
scheduler, step = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"), torch.tensor([0])
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    latents = encoder(image)
    noise = torch.randn_like(latents)
    low = scheduler.add_noise(latents, noise, step).double() - latents.double()
    velocity = scheduler.get_velocity(latents, noise, step).double()
wide = scheduler.add_noise(latents.double(), noise.double(), step) - latents.double()
velocity64 = scheduler.get_velocity(latents.double(), noise.double(), step)
print(
    f"autocast bfloat16 gives noise of {low.std():.4f} at step 0, velocity {(velocity - noise).std():.4f} beside noise"
)
print(f"float64 gives {wide.std():.4f} and {(velocity64 - noise).std():.4f}")
sys.exit(int(abs(low.std() - wide.std()) > 0.2 * wide.std()))
