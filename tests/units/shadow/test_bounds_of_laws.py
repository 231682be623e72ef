"""Near-equal candidates, integers, casts that cut off, bounds that decide and lost writes: defects and neighbours."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from ampcheck.shadow import Fault, Shadow

Case = Callable[[torch.dtype], object]


def reaching(case: Case, dtype: torch.dtype) -> list[Fault]:
    torch.manual_seed(0)
    with Shadow() as shadow:
        result = case(dtype)
        shadow.reach({"result": result} if isinstance(result, torch.Tensor) else {})
    return [fault for fault in shadow.faults if fault.reaches or fault.kind == "decision"]


def routed(dtype: torch.dtype) -> object:
    """The eight experts of a token, where a common bias takes the digits that rank them."""
    scores = F.linear(torch.randn(64, 32).bfloat16(), (torch.randn(128, 32) * 0.02).bfloat16()).to(dtype).sigmoid()
    return (scores + (6.8 + 0.24 * torch.rand(128)).to(dtype)).topk(8).indices


def nearest(dtype: torch.dtype) -> object:
    """The nearest of points that are far from the origin, by distances that have a large part in common."""
    points, queries = torch.randn(128, 2) * 0.05 + 3, torch.randn(64, 2) * 0.05 + 3
    common = (points.square().sum(1) + 20).to(dtype)
    return (common - (2 * queries @ points.T).to(dtype)).argmin(1)


def in_8_bits(dtype: torch.dtype) -> object:
    """Values over a scale that was rounded down in 16 bits and halved, where twice the range is needed."""
    values = torch.randn(16, 32)
    scale = values.abs().amax(1, keepdim=True) / 448
    if dtype is torch.bfloat16:
        scale = torch.exp2(scale.log2().floor()) * 0.5
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def merged(dtype: torch.dtype) -> object:
    """A small delta that is added to a weight."""
    layer = torch.nn.Linear(64, 64, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.add_((torch.randn(64, 64) * 1e-5).to(dtype))
    return layer(torch.randn(4, 64).to(dtype))


def merged_by_data(dtype: torch.dtype) -> object:
    """The same as adapters are merged: past autograd."""
    layer = torch.nn.Linear(64, 64, bias=False).to(dtype)
    layer.weight.data -= (torch.randn(64, 64) * 1e-5).to(dtype)
    return layer(torch.randn(4, 64).to(dtype))


def of_a_buffer(dtype: torch.dtype) -> object:
    """A buffer that is shifted by what it does not hold."""
    norm = torch.nn.BatchNorm1d(64, dtype=dtype)
    norm.running_var.add_(torch.full((64,), 1e-3).to(dtype))
    return norm.eval()(torch.randn(4, 64).to(dtype))


def hinged(dtype: torch.dtype) -> object:
    """Half a million hinge losses, of which a few lie nearer to zero than they are rounded."""
    anchors, others = (F.normalize(torch.randn(n, 64)) for n in (512, 1024))
    losses = F.relu(F.linear(anchors.to(dtype), others.to(dtype)) - 0.01)
    return losses.float().sum() / (losses > 0).sum()


DEFECTS: list[Case] = [routed, nearest, merged, merged_by_data, of_a_buffer]


@pytest.mark.parametrize("case", DEFECTS)
def test_the_case_in_16_bits_is_a_fault(case: Case) -> None:
    assert reaching(case, torch.bfloat16)


@pytest.mark.parametrize("case", [*DEFECTS, hinged, in_8_bits])
def test_the_case_in_float32_is_none(case: Case) -> None:
    assert reaching(case, torch.float32) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_few_near_ties_of_many_are_no_fault(dtype: torch.dtype) -> None:
    assert reaching(hinged, dtype) == []


def test_an_update_of_a_weight_that_is_large_enough_is_no_fault() -> None:
    def case(dtype: torch.dtype) -> object:
        weight = torch.nn.Parameter(torch.randn(64, 64).to(dtype))
        with torch.no_grad():
            weight.add_((torch.randn(64, 64) * 0.1).to(dtype))
        return weight * 2

    assert reaching(case, torch.bfloat16) == []


def test_values_beyond_the_end_of_8_bits_are_a_fault_where_float64_fits() -> None:
    faults = reaching(in_8_bits, torch.bfloat16)
    assert [fault.kind for fault in faults][:1] == ["overflow"], [str(fault) for fault in faults]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("op", [torch.round, torch.floor, torch.ceil, torch.trunc])
def test_honest_roundings_to_integers_are_no_fault(op: Callable[..., torch.Tensor], scale: float) -> None:
    def case(dtype: torch.dtype) -> object:
        values = (torch.randn(64, 64) * scale).to(dtype)
        return op(values / (values.abs().amax(1, keepdim=True) / 127))

    for dtype in (torch.bfloat16, torch.float16):
        assert reaching(case, dtype) == []


def test_codes_of_a_scale_that_is_lost_are_a_decision() -> None:
    def case(dtype: torch.dtype) -> object:
        weights = (torch.randn(64, 64) * 1e-3).to(dtype)
        floor = torch.finfo(dtype).eps
        return torch.round(weights / (weights.abs().amax(1, keepdim=True) / 7).clamp(min=floor)).float().sum()

    assert any("round" in reach for fault in reaching(case, torch.bfloat16) for reach in fault.reaches)
    assert reaching(case, torch.float32) == []


def normalized(size: float) -> Case:
    return lambda dtype: F.normalize((torch.randn(32, 64).to(dtype) * size).float(), eps=1e-7).to(dtype)


def clamped(size: float) -> Case:
    return lambda dtype: (
        (torch.randn(32, 64).to(dtype) * size).float().clamp_(-448, 448).to(torch.float8_e4m3fn).float()
    )


def scaled_by_blocks(size: float, floor: float) -> Case:
    """Blocks divided by scales that are kept in float8_e4m3fn, and clamped to a smallest number of it before."""

    def case(dtype: torch.dtype) -> object:
        blocks = (torch.randn(32, 4, 16).to(dtype) * size).float()
        scales = (blocks.abs().amax(-1, keepdim=True) / 6).clamp(floor, 448).to(torch.float8_e4m3fn)
        return blocks / scales.float()

    return case


@pytest.mark.parametrize(
    "case",
    [
        normalized(1e-12),
        scaled_by_blocks(1e-3, 2**-6),
        scaled_by_blocks(1e-3, 2**-9),
        clamped(2000.0),
        clamped(450.0),
        clamped(200.0),
    ],
    ids=[
        "floor",
        "smallest normal number",
        "smallest number",
        "end of most",
        "end of much",
        "end of more than a rounding",
    ],
)
def test_a_bound_that_most_values_do_not_keep_is_a_fault(case: Case) -> None:
    assert "bound that decides" in {fault.kind for fault in reaching(case, torch.bfloat16)}


def confident(dtype: torch.dtype) -> object:
    """Probabilities of which most are below the floor of their logarithm, whose gradient is divided by them."""
    logits = (30 * torch.randn(16, 100)).to(dtype).requires_grad_()
    losses = logits.float().softmax(-1).clamp(min=1e-7).log()
    losses.sum().backward()
    return losses


@pytest.mark.parametrize(
    "case",
    [normalized(1.0), normalized(0.0), scaled_by_blocks(1.0, 2**-6), clamped(100.0), clamped(150.0), confident],
    ids=["above", "zeros", "scales above", "inside", "nearly inside", "logarithm"],
)
def test_a_bound_that_guards_is_no_fault(case: Case) -> None:
    assert reaching(case, torch.bfloat16) == []


def ratios(kept: torch.dtype, use: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """Sums of log-probabilities in the format of the run less the same, kept in another."""

    def case(dtype: torch.dtype) -> object:
        values = F.linear(torch.randn(16, 64, 32).to(dtype), torch.randn(128, 32).to(dtype)).float().log_softmax(-1)
        now = values[..., 0]
        return use((now - now.to(kept)).sum(-1))

    return case


@pytest.mark.parametrize("use", [torch.exp, torch.exp2], ids=["exp", "exp2"])
def test_a_ratio_of_rounded_probabilities_is_a_fault(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert reaching(ratios(torch.bfloat16, use), torch.bfloat16)
    assert reaching(ratios(torch.float32, use), torch.bfloat16) == []


def test_the_size_of_the_same_difference_is_no_fault() -> None:
    assert reaching(ratios(torch.bfloat16, lambda difference: difference.abs().max()), torch.bfloat16) == []
    assert reaching(ratios(torch.bfloat16, lambda difference: difference.square().mean().log()), torch.bfloat16) == []


def test_what_is_lost_on_a_temporary_value_is_no_fault_of_the_weights_that_come_after_it() -> None:
    def case(dtype: torch.dtype) -> object:
        layers = [torch.nn.Linear(32, 32).to(dtype) for _ in range(8)]
        for layer in layers:
            temporary = torch.randn(4, 32).to(dtype)
            temporary.add_((torch.randn(4, 32) * 1e-5).to(dtype))
            del temporary
            layer.weight.data.mul_(0.5)
        values = torch.randn(4, 32).to(dtype)
        for layer in layers:
            values = layer(values)
        return values

    assert not [fault for fault in reaching(case, torch.bfloat16) if fault.kind == "drift"]


@pytest.mark.parametrize("bound", [1.0, 0.5, 0.125])
def test_a_floor_that_code_has_for_another_reason_is_none_of_a_format(bound: float) -> None:
    def ball(dtype: torch.dtype) -> object:
        x = torch.randn(16, 32).to(dtype) * 0.01
        return x / x.norm(dim=-1, keepdim=True).clamp(min=bound)

    assert reaching(ball, torch.bfloat16) == []


@pytest.mark.parametrize("end", [448.0, 240.0])
def test_boxes_that_leave_an_image_keep_to_its_size(end: float) -> None:
    assert reaching(lambda dtype: (end * torch.randn(16, 4)).abs().to(dtype).clamp(0, end), torch.bfloat16) == []


@pytest.mark.parametrize("bound", [6.0, 28.0, 1.0])
def test_an_end_that_code_has_for_another_reason_is_none_of_a_format(bound: float) -> None:
    assert reaching(lambda dtype: (torch.rand(16, 32) + 40).to(dtype).clamp(max=bound), torch.bfloat16) == []
