import torch
from captum.attr import DeepLift

PACKAGE, DTYPE, AUTOCAST, LIMIT = "captum", torch.float16, False, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    picture = torch.rand(1, 1, 16, 16)
    picture[..., :5] = 0  # a black border, as of a digit, where picture and baseline are equal
    return (picture.to(DTYPE),)


def f(picture):
    torch.manual_seed(0)
    conv, head = torch.nn.Conv2d(1, 4, 3), torch.nn.Linear(4 * 14 * 14, 10)
    model = torch.nn.Sequential(conv, torch.nn.ReLU(), torch.nn.Flatten(), head).to(picture.dtype)
    return DeepLift(model).attribute(picture, torch.zeros_like(picture), target=0)


if __name__ == "__main__":
    args = inputs(0)
    got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
