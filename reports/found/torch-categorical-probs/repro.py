import sys

import torch
from torch.distributions import Categorical

torch.manual_seed(0)
policy, states, actions = torch.nn.Linear(16, 50), torch.randn(256, 16) * 4, torch.randint(0, 50, (256,))
with torch.autocast("cpu", torch.bfloat16):
    probs = policy(states).softmax(-1)
    low = Categorical(probs, validate_args=False).log_prob(actions)  # validated, bfloat16 probs are refused
wide = Categorical(policy.double()(states.double()).softmax(-1)).log_prob(actions)
print(f"autocast {low.dtype} gives a mean of {low.double().mean():.3f}, the least {low.min():.3f}")
print(f"float64 gives a mean of {wide.mean():.3f}, the least {wide.min():.3f}")
sys.exit(int((low.double().mean() - wide.mean()).abs() > 0.2))
