import torch
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torchvision", torch.bfloat16, True, 0.02


def inputs(seed):
    torch.manual_seed(seed)
    return (torch.randn(1, 3, 800, 1088),)


def f(image):
    generator = AnchorGenerator(sizes=((32,),), aspect_ratios=((0.5, 1.0, 2.0),))  # the finest level of Faster R-CNN
    features = torch.nn.functional.conv2d(image, torch.ones(1, 3, 4, 4, dtype=image.dtype), stride=4)
    boxes = generator(ImageList(image, [(800, 1088)]), [features])[0]
    return boxes[:, 2] - boxes[:, 0]  # widths


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
