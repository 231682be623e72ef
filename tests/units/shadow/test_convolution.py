"""Convolutions with few positions have a rule of their own: it gives what float64 gives."""

import pytest
import torch
from torch import nn

from ampcheck.shadow import Shadow


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [(3, 1, 1, (4, 4)), (3, 2, 1, (7, 7)), ((3, 5), (2, 1), (1, 2), (6, 4)), (3, 1, 0, (5, 3)), (3, 1, 1, (9, 9))],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_equals_that_in_float64(
    kernel: int, stride: int, padding: int, size: tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(128, 24, kernel, stride, padding, bias=bias)
    wide = nn.Conv2d(128, 24, kernel, stride, padding, bias=bias).double()
    wide.load_state_dict(layer.state_dict())
    x = torch.randn(3, 128, *size, requires_grad=True)
    x_wide = x.detach().double().requires_grad_()
    with Shadow(layer) as shadow:
        result = layer(x)
        result.square().sum().backward()
    expected = wide(x_wide)
    expected.square().sum().backward()
    pairs = [(result, expected), (x.grad, x_wide.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(layer.parameters(), wide.parameters(), strict=True)]
    for value, reference in pairs:
        assert value is not None
        assert reference is not None
        torch.testing.assert_close(shadow.exact(value), reference.detach(), rtol=1e-12, atol=1e-9)
    assert not shadow.unruled


def test_a_count_of_groups_is_no_magnitude_that_goes_in() -> None:
    data, weight = torch.full((1, 64, 4, 4), 1e-4).half(), torch.full((64, 1, 1, 1), 1e-4).half()
    with Shadow() as shadow:
        torch.nn.functional.conv2d(data, weight, groups=64)
    assert shadow.judge is not None
    (fault,) = shadow.judge.faults
    assert fault.amax_in < 1e-3
