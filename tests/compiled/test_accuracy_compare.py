"""From the trajectories of the arms to one record of each tensor."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.compiled.accuracy.arms import Key, Trajectory
from ampcheck.compiled.accuracy.compare import Draw, deviations
from ampcheck.compiled.accuracy.stats import Deviation


def arm(**values: list[float]) -> Trajectory:
    """One arm; `gradient_weight=[...]` is the gradient of `weight` at step 0."""
    found = Trajectory()
    for name, numbers in values.items():
        kind, _, rest = name.partition("_")
        key: Key = (kind, rest, 0)
        found.values[key] = torch.tensor(numbers)
        found.size[key] = 1.0
        found.dtypes[key] = torch.float32
        if kind not in ("update", "buffer"):
            del found.size[key]
    return found


def compared(
    eager: Trajectory, compiled: Trajectory, wide: Trajectory, *, masked: bool = False
) -> dict[str, Deviation]:
    found = deviations([Draw(eager, wide)], [compiled], [wide], masked=masked)
    return {f"{d.kind} {d.name}": d for d in found}


def test_an_optimizers_full_steps_on_gradients_that_are_zero_to_rounding_are_left_out() -> None:
    # The second element has no gradient but noise, of which an optimizer such as Adam makes a step of either sign.
    eager = arm(gradient_weight=[1.0, 1e-9], update_weight=[-1.0, -1.0])
    compiled = arm(gradient_weight=[1.0, -1e-9], update_weight=[-1.0, 1.0])
    wide = arm(gradient_weight=[1.0, 0.0], update_weight=[-1.0, 0.0])
    assert compared(eager, compiled, wide)["update weight"].compiled[0] == 1.0
    known = compared(eager, compiled, wide, masked=True)["update weight"]
    assert (known.compiled[0], known.numel) == (0.0, 1)


def test_a_wrong_update_of_a_weight_with_a_clear_gradient_is_kept() -> None:
    eager = arm(gradient_weight=[1.0, 2.0], update_weight=[-1.0, -1.0])
    wrong = arm(gradient_weight=[1.0, 2.0], update_weight=[-1.0, 1.0])
    assert compared(eager, wrong, eager, masked=True)["update weight"].compiled[0] > 1


def test_a_weight_that_compiled_code_alone_changes_or_leaves_is_far_off() -> None:
    moved, still = arm(update_weight=[3.0, 4.0]), arm()
    assert compared(still, moved, still)["update weight"].compiled[0] == 5.0
    assert compared(moved, still, moved)["update weight"].compiled[0] == 1.0


def test_what_compiled_code_does_not_give_is_infinitely_far_off() -> None:
    eager = arm(output_a=[1.0], output_b=[1.0])
    found = compared(eager, arm(output_a=[1.0]), eager)
    assert found["output a"].compiled == (0.0,)
    assert found["output b"].compiled == (math.inf,)
    assert compared(eager, arm(output_a=[1.0], output_b=[1.0, 1.0]), eager)["output b"].compiled == (math.inf,)


def test_beside_an_exact_zero_an_error_is_measured_against_all_tensors_of_its_kind() -> None:
    wide = arm(gradient_weight=[3.0, 4.0], gradient_bias=[0.0])
    noise = arm(gradient_weight=[3.0, 4.0], gradient_bias=[1e-3])
    assert math.isclose(compared(noise, noise, wide)["gradient bias"].compiled[0], 2e-4, rel_tol=1e-6)


def test_infinities_of_the_reference_are_no_error_and_those_of_one_arm_are() -> None:
    wide = arm(output_y=[1.0, -math.inf])
    assert compared(wide, wide, wide)["output y"].compiled == (0.0,)
    found = compared(wide, arm(output_y=[math.inf, -math.inf]), wide)["output y"]
    assert (found.nonfinite, found.eager_nonfinite, found.compiled) == (1, 0, (math.inf,))


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=9), st.floats(-8, 8, width=32))
def test_errors_are_relative_norms_whatever_the_scale(values: list[float], off: float) -> None:
    wide, wrong = arm(output_y=values), arm(output_y=[v + off for v in values])
    found = compared(wide, wrong, wide)["output y"]
    size = math.sqrt(math.fsum(v * v for v in values))
    distance = math.sqrt(sum((float(torch.tensor(v + off)) - float(torch.tensor(v))) ** 2 for v in values))
    assert math.isclose(found.compiled[0], distance / (size or 1.0), rel_tol=1e-6, abs_tol=1e-12)
    assert found.eager == (0.0,)
