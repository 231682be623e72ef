import torch
import torch.nn.functional as F
from kornia.feature import CornerGFTT, CornerHarris, gftt_response, harris_response

PACKAGE, DTYPE, AUTOCAST, LIMIT = "kornia", torch.float16, True, 0.5


def inputs(seed):
    torch.manual_seed(seed)
    return (0.1 * F.interpolate(torch.rand(1, 1, 12, 12), size=(96, 96), mode="bicubic").clamp(0, 1),)  # a dark image


def f(image):
    return harris_response(image)


FORMS = {
    "kornia.feature.CornerHarris": lambda image: CornerHarris(0.04)(image),
    "kornia.feature.gftt_response": lambda image: gftt_response(image),
    "kornia.feature.CornerGFTT": lambda image: CornerGFTT()(image),
}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
