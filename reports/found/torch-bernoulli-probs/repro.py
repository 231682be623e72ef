import sys

import torch
from torch.distributions import Bernoulli

torch.manual_seed(0)
policy, states = torch.nn.Linear(16, 1), torch.randn(4096, 16) * 6
action = torch.ones(4096, 1)  # rare in many of the states
with torch.autocast("cpu", torch.bfloat16):
    probs = policy(states).sigmoid()
    low = Bernoulli(probs).log_prob(action)
wide = Bernoulli(probs.double()).log_prob(action.double())  # of the same rounded probabilities
print(f"autocast {probs.dtype} gives a mean of {low.mean():.3f}, the least {low.min():.3f}")
print(f"float64 gives a mean of {wide.mean():.3f}, the least {wide.min():.3f}")
sys.exit(int((low - wide).abs().max() > 1))
