"""Data transforms before a model sees the data."""

import torch
from torch import nn

from handwritten.case import BFLOAT16, FLOAT16, LOW, case, enter


@case("overflow", FLOAT16)
def image_mean_by_sum(dtype):
    """The mean of an image of 0..255 as sum / count."""
    torch.manual_seed(0)
    image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8).to(dtype)
    mean = image.sum((1, 2), keepdim=True) / 4096  # lost here
    return (image - mean) / 64


@case("overflow", FLOAT16)
def image_deviation_by_squares(dtype):
    """The deviation of 12-bit pixels from their squares."""
    torch.manual_seed(0)
    image = torch.randint(0, 4096, (3, 32, 32)).to(dtype)
    centred = image - image.mean((1, 2), keepdim=True)
    return centred / (centred * centred).mean((1, 2), keepdim=True).sqrt()  # lost here


@case("collision", LOW)
def panoptic_ids(dtype):
    """Segment ids r + 256 g from colours, as COCO stores them."""
    torch.manual_seed(0)
    colour = torch.randint(0, 100, (64, 2), dtype=torch.uint8).to(dtype)
    return (colour[:, 0] + 256 * colour[:, 1]).long()  # lost here


@case("collision", LOW)
def instance_ids(dtype):
    """class * 1000 + instance as Cityscapes stores them, compared to cut out masks."""
    classes, instances = torch.arange(20, 30).to(dtype), torch.arange(16).to(dtype)
    ids = (classes[:, None] * 1000 + instances).flatten()  # lost here
    return ids[:, None] == ids[None, :]  # lost here


class Lookup(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.table = nn.Parameter(enter(torch.randn(5000, 8), dtype))

    def forward(self, features):
        return self.table[features[:, 0].long()] * features[:, 1:]  # lost here


@case("collision", LOW, parts=(Lookup,))
def category_ids_in_feature_matrix(dtype):
    """A tabular batch in half: the first column holds ids that look up an embedding."""
    torch.manual_seed(0)
    ids, lookup = torch.randint(3000, 5000, (32,)), Lookup(dtype)
    features = torch.cat([ids.to(dtype)[:, None], torch.ones(32, 8, dtype=dtype)], -1)  # lost here
    return lookup(features)


@case("collision", BFLOAT16)
def labels_through_bfloat16(dtype):
    """Labels of 0..999 in a batch that a data loader casts to bfloat16."""
    labels = torch.arange(1000)
    return labels.to(dtype).long()  # lost here


@case("silent-zero", FLOAT16)
def quantisation_scale_of_zero_row(dtype):
    """amax / 127 clamped to 1e-8: a row of zeros is divided by zero."""
    torch.manual_seed(0)
    weight = torch.randn(8, 32)
    weight[5] = 0.0
    x = enter(weight, dtype)
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-8)  # lost here
    return x / scale  # lost here


@case("cancellation", LOW)
def box_filter_by_summed_areas(dtype):
    """A box filter from the summed-area table of an image."""
    torch.manual_seed(0)
    table = enter(torch.rand(96, 96), dtype).cumsum(0).cumsum(1)  # lost here
    return (table[5:, 5:] - table[:-5, 5:] - table[5:, :-5] + table[:-5, :-5]) / 25  # lost here


@case("overflow", FLOAT16)
def tone_mapping(dtype):
    """x / (1 + x) of radiance times exposure: inf / inf in the sun."""
    torch.manual_seed(0)
    radiance = enter(2000 * torch.rand(8, 8) + 10, dtype)
    x = radiance * 64.0  # lost here
    return x / (1 + x)  # lost here


@case("cancellation", LOW)
def detrended_series(dtype):
    """A price of 1800 plus ticks of 0.1 in half, from which returns are taken."""
    torch.manual_seed(0)
    price = 1800.0 + enter(0.1 * torch.randn(128), dtype)  # lost here
    return price[1:] - price[:-1]  # lost here


@case("overflow", FLOAT16)
def inverse_document_frequency(dtype):
    """log(documents / (1 + frequency)) with a million documents."""
    frequency = torch.tensor([3, 40, 900, 20_000]).to(dtype)
    return torch.log(torch.tensor(1_000_000).to(dtype) / (1 + frequency))  # lost here


@case("cancellation", BFLOAT16)
def minutes_of_the_day(dtype):
    """The gap of two events from minutes of the day: bfloat16 has steps of eight minutes."""
    torch.manual_seed(0)
    start = torch.randint(600, 1400, (64,))
    return (start + torch.randint(1, 10, (64,))).to(dtype) - start.to(dtype)  # lost here


@case("cancellation", LOW)
def coordinates_of_a_map(dtype):
    """Offsets in degrees from a city at 13.4 east, whose quarters are 0.01 degrees apart."""
    torch.manual_seed(0)
    offset = enter(0.01 * torch.randn(64, 2), dtype)
    position = torch.tensor([52.5, 13.375]).to(dtype) + offset  # lost here
    return position - position.mean(0)  # lost here


@case("overflow", FLOAT16)
def image_moments(dtype):
    """The centre of mass of a mask: sums of coordinates over 64 x 64 pixels."""
    torch.manual_seed(0)
    mask = (torch.rand(64, 64) < 0.8).to(dtype)
    row = torch.arange(64).to(dtype)[:, None]
    return (mask * row).sum() / mask.sum()  # lost here


@case("flush", FLOAT16)
def linear_light(dtype):
    """Gamma 2.4 of dark pixels of 1e-3, raised by an exposure of 2^14."""
    torch.manual_seed(0)
    pixel = enter(1e-3 * (1 + torch.rand(64)), dtype)
    return pixel**2.4 * 2.0**14  # lost here
