import torch
from torchvision.transforms.v2.functional import affine, perspective, rotate

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torchvision", torch.bfloat16, True, 0.1


def inputs(seed):
    torch.manual_seed(seed)
    return (torch.rand(1, 1, 44, 44).repeat_interleave(4, 2).repeat_interleave(4, 3),)  # tiles of 4 pixels, float32


def f(picture):
    corners = [[0, 0], [175, 0], [175, 175], [0, 175]]
    return perspective(picture, corners, [[10, 5], [170, 3], [175, 170], [0, 175]])


FORMS = {
    "torchvision.transforms.v2.functional.affine": lambda x: affine(x, 10.0, [3, 5], 1.1, [2.0, 0.0]),
    "torchvision.transforms.v2.functional.rotate": lambda x: rotate(x, 10.0),
}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
