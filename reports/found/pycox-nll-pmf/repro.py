import torch
from pycox.models.loss import nll_pmf

PACKAGE, DTYPE, AUTOCAST, LIMIT = "pycox", torch.bfloat16, True, 0.2


def inputs(seed):
    torch.manual_seed(seed)
    logits = torch.randn(256, 100)
    logits[:, :40] += 4  # of a trained network: most events are early
    return logits.to(DTYPE), torch.randint(70, 100, (256,)), torch.zeros(256)  # censored late


def f(phi, durations, events):
    return nll_pmf(phi, durations, events)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
