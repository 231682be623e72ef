"""Boxes, rays, points, cameras."""

import math

import torch
from torch import nn

from handwritten.case import FLOAT16, LOW, autocast, case, enter, wide


@case("overflow", FLOAT16)
def box_iou(dtype):
    """Areas of boxes of 500 x 400 pixels are 200,000."""
    torch.manual_seed(0)
    corner = 100 * torch.rand(8, 2)
    boxes = torch.cat([corner, corner + 400 + 100 * torch.rand(8, 2)], -1)
    left, right = enter(boxes[:4], dtype), enter(boxes[4:], dtype)
    area = [(box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) for box in (left, right)]  # lost here
    size = (torch.minimum(left[:, 2:], right[:, 2:]) - torch.maximum(left[:, :2], right[:, :2])).clamp_min(0)
    intersection = size[:, 0] * size[:, 1]  # lost here
    return intersection / (area[0] + area[1] - intersection)


@case("absorption", LOW)
def boxes_shifted_by_class(dtype):
    """Boxes are moved apart by class * 641 before suppression, so their sides lose their digits."""
    torch.manual_seed(0)
    corner = 50 + 50 * torch.rand(32, 2)
    boxes = enter(torch.cat([corner, corner + 10 + 10 * torch.rand(32, 2)], -1), dtype)
    shift = torch.arange(48, 80).to(dtype) * 641  # lost here
    moved = boxes + shift[:, None]  # lost here
    return (moved[:, 2] - moved[:, 0]) * (moved[:, 3] - moved[:, 1])  # lost here


@case("cancellation", LOW)
def ray_sphere_intersection(dtype):
    """b^2 - c of a ray that hits a unit sphere 40 away."""
    torch.manual_seed(0)
    origin = torch.tensor([0.0, 0.0, -40.0]).expand(64, 3)
    target = torch.cat([0.4 * torch.rand(64, 2), torch.zeros(64, 1)], -1)
    direction = nn.functional.normalize(enter(target, dtype) - origin.to(dtype), dim=-1)
    b = (direction * origin.to(dtype)).sum(-1)  # lost here
    c = origin.to(dtype).square().sum(-1) - 1  # lost here
    return (b.square() - c).clamp_min(0).sqrt()  # lost here


@case("flush", FLOAT16)
def quaternion_of_small_output(dtype):
    """A network's quaternion of 1e-4 normalised by its squares: they vanish."""
    torch.manual_seed(0)
    quaternion = enter(1e-4 * torch.randn(16, 4), dtype)
    squares = (quaternion * quaternion).sum(-1, keepdim=True)  # lost here
    return quaternion / squares.sqrt()  # lost here


class Camera(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("K", torch.tensor([[1100.0, 0, 960], [0, 1100, 540], [0, 0, 1]], dtype=dtype))

    def forward(self, points):
        projected = points @ self.K.mT  # lost here
        return projected[..., :2] / projected[..., 2:]


@case("cancellation", LOW, parts=(Camera,))
def reprojection_error(dtype):
    """The shift in pixels of points that move by a millimetre; autocast runs the projections in 16 bits."""
    torch.manual_seed(0)
    points = enter(torch.rand(32, 3) + torch.tensor([0.0, 0, 4]), wide(dtype))
    shift = enter(0.001 * torch.randn(32, 3), wide(dtype))
    camera = Camera(wide(dtype))
    with autocast(dtype):
        return camera(points + shift) - camera(points)  # lost here


@case("absorption", LOW)
def neighbours_in_world_coordinates(dtype):
    """Distances of points centimetres apart, 300 m from the origin of the scene."""
    torch.manual_seed(0)
    origin, local = enter(300 + 200 * torch.rand(3), dtype), enter(0.05 * torch.randn(24, 3), dtype)
    world = origin + local  # lost here
    return (world[:12, None] - world[None, 12:]).square().sum(-1).sqrt()  # lost here


@case("cancellation", LOW)
def polygon_area(dtype):
    """The shoelace formula for a polygon of radius 2 with its centre at 200."""
    torch.manual_seed(0)
    angle = torch.arange(12) * (2 * math.pi / 12)
    circle = enter(2 * torch.stack([angle.cos(), angle.sin()], -1), dtype)
    x, y = (circle + enter(torch.tensor([200.0, 150.0]), dtype)).unbind(-1)  # lost here
    return 0.5 * (x * y.roll(-1) - x.roll(-1) * y).sum()  # lost here


@case("flush", FLOAT16)
def normals_of_fine_mesh(dtype):
    """Cross products of edges of 2e-4, normalised."""
    torch.manual_seed(0)
    edges = enter(2e-4 * torch.randn(2, 32, 3), dtype)
    normal = torch.linalg.cross(edges[0], edges[1])  # lost here
    return normal / normal.square().sum(-1, keepdim=True).sqrt()  # lost here


@case("cancellation", LOW)
def angle_by_acos(dtype):
    """The angle of directions that nearly agree, as acos of their product."""
    torch.manual_seed(0)
    direction = torch.randn(32, 128)
    left = nn.functional.normalize(enter(direction, dtype), dim=-1)
    right = nn.functional.normalize(enter(direction + 0.03 * torch.randn(32, 128), dtype), dim=-1)
    return torch.acos((left * right).sum(-1).clamp(-1, 1))  # lost here


@case("overflow", FLOAT16)
def depth_from_disparity(dtype):
    """focal length * baseline / disparity: 720 * 540 is inf before the division."""
    torch.manual_seed(0)
    focal, baseline = enter(torch.tensor(720.0), dtype), enter(torch.tensor(540.0), dtype)
    disparity = enter(20 + 40 * torch.rand(8, 8), dtype)
    return focal * baseline / disparity  # lost here


@case("decision", LOW)
def nearest_neighbour_by_expansion(dtype):
    """The nearest point by |q|^2 - 2qp + |p|^2, points on a grid of 0.2 around 30."""
    torch.manual_seed(0)
    grid = torch.cartesian_prod(torch.arange(5), torch.arange(5)) * 0.2
    centre = enter(torch.tensor([30.0, 30.0]), dtype)
    points = centre + enter(grid, dtype)  # lost here
    queries = centre + enter(grid.flip(0) + 0.02, dtype)  # lost here
    squares = queries.square().sum(-1)[:, None] + points.square().sum(-1)  # lost here
    return (squares - 2 * queries @ points.mT).argmin(-1)  # lost here


@case("collision", LOW)
def voxel_keys(dtype):
    """x + 32 y + 1024 z as key of a voxel."""
    torch.manual_seed(0)
    voxel = torch.randint(0, 32, (500, 3))
    key = voxel.to(dtype) @ torch.tensor([1, 32, 1024]).to(dtype)  # lost here
    return key.long()  # lost here


@case("collision", LOW)
def anchor_centres(dtype):
    """Centres of anchors (i + 0.5) * 4 of a feature map 1024 wide, and offsets of a pixel to them."""
    centre = (torch.arange(900, 1000, dtype=dtype) + 0.5) * 4  # lost here
    pixel = (torch.arange(900, 1000) * 4 + 1).to(dtype)  # lost here
    return centre - pixel  # lost here


@case("cancellation", LOW)
def alpha_of_thin_density(dtype):
    """Volume rendering: 1 - exp(-density * step) where the product is 1e-4."""
    torch.manual_seed(0)
    density = enter(0.02 + 0.02 * torch.rand(4, 64), dtype)
    alpha = 1 - torch.exp(-density * 0.005)  # lost here
    return alpha.sum(-1)


@case("overflow", FLOAT16)
def triangle_determinant(dtype):
    """Barycentric coordinates of triangles in pixels: the doubled area is 400,000."""
    torch.manual_seed(0)
    a, b, c = enter(torch.tensor([[0.0, 0], [800, 10], [20, 600]]), dtype)
    point = enter(200 + 100 * torch.rand(16, 2), dtype)
    area = (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])  # lost here
    part = (b[0] - point[:, 0]) * (c[1] - point[:, 1]) - (b[1] - point[:, 1]) * (c[0] - point[:, 0])  # lost here
    return part / area
