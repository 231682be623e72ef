"""The log-probabilities of a rollout are kept in bfloat16: the ratio of a sequence is not 1 for an equal policy.

Mechanism: each is off by up to half a spacing, 1/64, and the ratio is the exponential of a sum of 64 of them.
Source: https://github.com/THUDM/slime/pull/892, https://github.com/PrimeIntellect-ai/prime-rl/pull/568
Expected: precision-loss.
"""

import torch
from torch import nn

ID = "old_logps_bf16"
EXPECTED = {"check": "precision-loss"}
KIND = "call"

V, T = 128, 64


def _log_probabilities(model, x, a):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    return torch.log_softmax(logits.float(), -1).gather(-1, a[..., None])[..., 0]


def _train(narrow, rounds=6, epochs=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 32), nn.Linear(32, V))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ratios = []
    for _ in range(rounds):
        x, a, advantage = torch.randint(0, V, (16, T)), torch.randint(0, V, (16, T)), torch.randn(16)
        with torch.no_grad():
            old = _log_probabilities(model, x, a)
            if narrow:
                old = old.bfloat16()
        for _ in range(epochs):
            ratio = torch.exp((_log_probabilities(model, x, a) - old).sum(-1))
            ratios += ratio.detach().tolist() if len(ratios) < 16 else []
            loss = -torch.min(ratio * advantage, ratio.clamp(0.97, 1.03) * advantage).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return ratios


def buggy():
    _train(True)


def fixed():
    _train(False)


def manifests():
    b, f = (max(abs(ratio - 1) for ratio in _train(narrow, 1, 1)) for narrow in (True, False))
    assert b > 0.02, b
    assert f < 1e-4, f
