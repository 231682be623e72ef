"""Promise: the linear form of a value says what its Jacobian says, in float64 by autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import jacobian

from ampcheck.records.state import Role
from ampcheck.training.lineage import Lineage
from ampcheck.training.loop import Resident

SIZE = 4
FACTORS = st.sampled_from([0.5, 2.0, -1.0, 0.25])
# No reductions: what a parameter gives by one, as a gradient or a norm, does not count as made of it.
OPS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "add": lambda a, b, factor: torch.add(a, b, alpha=factor),
    "add_": lambda a, b, factor: a.add_(b, alpha=factor),
    "sub_": lambda a, b, factor: a.sub_(b, alpha=factor),
    "number": lambda a, b, factor: a + factor,
    "mul": lambda a, b, factor: a * factor,
    "mul_": lambda a, b, factor: a.mul_(factor),
    "div_": lambda a, b, factor: a.div_(factor),
    "product": lambda a, b, factor: a * b,
    "lerp_": lambda a, b, factor: a.lerp_(b, factor),
    "addcmul_": lambda a, b, factor: a.addcmul_(b, b, value=factor),
    "copy_": lambda a, b, factor: a.copy_(b),
    "zero_": lambda a, b, factor: a.zero_(),
    "neg": lambda a, b, factor: -a,
    "tanh": lambda a, b, factor: torch.tanh(a),
    "cast": lambda a, b, factor: a.double().to(a.dtype),
    "clone": lambda a, b, factor: a.clone(),
    "foreach": lambda a, b, factor: torch._foreach_add([a], [b], alpha=factor)[0],
}
STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9), FACTORS, st.sampled_from([2, SIZE])),
    min_size=1,
    max_size=10,
)
Steps = list[tuple[str, int, int, float, int]]


def run(steps: Steps, values: list[torch.Tensor], *, own: bool) -> list[torch.Tensor]:
    """The memories that a program leaves. Each step uses the beginning of two; one that writes, writes the first.

    own: give each step memory of its own, as autograd needs it.
    """
    for name, first, second, factor, length in steps:
        first, second = first % len(values), second % len(values)
        if name.endswith("_"):
            values[first] = values[first].clone() if own else values[first]
            other = values[second].clone() if first == second and own else values[second]
            OPS[name](values[first][:length], other[:length], factor)
        elif length == SIZE:
            values.append(OPS[name](values[first], values[second], factor))
    return values


@given(STEPS)
@settings(deadline=None)
def test_a_gain_is_the_jacobian(steps: Steps) -> None:
    origins = [torch.tensor([0.5, -1.5, 2.0, 0.75]), torch.tensor([1.25, 0.5, -0.5, 3.0])]
    narrow = [origin.bfloat16() for origin in origins]
    lineage = Lineage()
    lineage.begin([Resident(Role.PARAMETER, str(number), tensor) for number, tensor in enumerate(narrow)])
    bits = [lineage.facts.bit_of(tensor) for tensor in narrow]
    with lineage, torch.no_grad():
        ends = run(steps, list(narrow), own=False)
    slopes = jacobian(
        lambda *inputs: torch.stack(run(steps, list(inputs), own=True)),
        tuple(origin.double() for origin in origins),
    )
    for number, end in enumerate(ends):
        form = lineage.facts.form(end)
        for bit, slope in zip(bits, slopes, strict=True):
            if (gain := form.gain(bit)) is not None:  # of every element by itself
                torch.testing.assert_close(slope[number], gain * torch.eye(SIZE, dtype=torch.float64))


LINEAR = ("add", "add_", "sub_", "number", "mul", "mul_", "div_", "lerp_", "copy_", "zero_", "neg", "cast", "clone")


@given(STEPS)
@settings(deadline=None)
def test_of_a_linear_program_on_whole_memories_every_gain_is_known(steps: Steps) -> None:
    steps = [(name, first, second, factor, SIZE) for name, first, second, factor, _ in steps if name in LINEAR]
    narrow = [torch.ones(SIZE, dtype=torch.bfloat16), torch.ones(SIZE, dtype=torch.bfloat16)]
    lineage = Lineage()
    lineage.begin([Resident(Role.PARAMETER, str(number), tensor) for number, tensor in enumerate(narrow)])
    with lineage, torch.no_grad():
        ends = run(steps, list(narrow), own=False)
    bits = [lineage.facts.bit_of(tensor) for tensor in narrow]
    assert all(lineage.facts.form(end).gain(bit) is not None for end in ends for bit in bits)
