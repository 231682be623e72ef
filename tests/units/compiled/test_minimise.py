"""The smallest set of modules to keep in float32, the code that keeps them, and what it costs."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ampcheck import Subject, emulate
from ampcheck.causes.blame import cost_of, measure_cost
from ampcheck.causes.minimise import float32_code, smallest_set, subject_in_float32
from ampcheck.speed.steps import StepConfig

TREE = [""] + [f"{a}" for a in "abc"] + [f"{a}.{b}" for a in "abc" for b in "xyz"] + [f"b.y.{c}" for c in "pq"]
LEAVES = [name for name in TREE if not any(other.startswith(f"{name}.") for other in TREE) and name]


def inside(name: str, kept: tuple[str, ...]) -> bool:
    return any(not k or name == k or name.startswith(f"{k}.") for k in kept)


# The search --------------------------------------------------------------------------------------------------------


@given(st.sets(st.sampled_from(LEAVES), min_size=1), st.lists(st.sets(st.sampled_from(TREE)), max_size=2))
def test_the_set_that_is_found_passes_and_nothing_can_be_left_out(needed: set[str], guesses: list[set[str]]) -> None:
    def passes(kept: tuple[str, ...]) -> bool:
        return all(inside(leaf, kept) for leaf in needed)

    found = smallest_set(TREE, passes, guesses=guesses, budget=1000)
    assert found.names is not None
    assert found.minimal
    assert passes(found.names)
    for out in found.names:
        assert not passes(tuple(name for name in found.names if name != out))


@given(st.sets(st.sampled_from(LEAVES), min_size=1))
def test_no_module_is_kept_of_which_a_part_of_the_children_would_do(needed: set[str]) -> None:
    def passes(kept: tuple[str, ...]) -> bool:
        return all(inside(leaf, kept) for leaf in needed)

    found = smallest_set(TREE, passes, budget=1000).names
    assert found is not None
    for name in found:
        rest = tuple(other for other in found if other != name)
        prefix = f"{name}." if name else ""
        depth = prefix.count(".") + 1
        children = [n for n in TREE if n and n != name and n.startswith(prefix) and n.count(".") == depth - 1]
        if children:
            parts = itertools.combinations(children, len(children) - 1)
            assert not any(passes((*rest, *part)) for part in parts), (name, children)


def test_the_guess_that_passes_saves_the_search_from_the_root() -> None:
    tried: list[tuple[str, ...]] = []

    def passes(kept: tuple[str, ...]) -> bool:
        tried.append(kept)
        return inside("b.y.p", kept)

    found = smallest_set(TREE, passes, guesses=[["b.y.p"]])
    assert found.names == ("b.y.p",)
    assert tried == [("b.y.p",)]


def test_each_set_is_tried_once() -> None:
    tried: list[tuple[str, ...]] = []

    def passes(kept: tuple[str, ...]) -> bool:
        tried.append(kept)
        return inside("a.x", kept) and inside("c.z", kept)

    found = smallest_set(TREE, passes, guesses=[["a"], ["a", "c"], ["a"]], budget=1000)
    assert found.names == ("a.x", "c.z")
    assert len(tried) == len(set(tried)) == found.runs


def test_where_not_even_everything_in_float32_passes_there_is_no_set() -> None:
    found = smallest_set(TREE, lambda kept: False)
    assert found.names is None
    assert found.minimal
    assert found.runs == 1


@pytest.mark.parametrize("budget", range(1, 12))
def test_a_search_out_of_budget_gives_the_best_set_so_far_and_says_so(
    budget: int,
) -> None:
    def passes(kept: tuple[str, ...]) -> bool:
        return inside("a.x", kept) and inside("b.y.p", kept) and inside("c.z", kept)

    found = smallest_set(TREE, passes, budget=budget)
    assert found.runs <= budget
    assert found.names is not None
    assert passes(found.names)
    assert found.minimal == (found.names == ("a.x", "b.y.p", "c.z"))


def test_a_failure_that_comes_and_goes_with_the_set_still_gives_a_set_that_passes() -> None:
    """Nothing says that a larger set passes where a smaller one does."""
    good = {("",), ("a", "b", "c"), ("a", "b"), ("b.x", "b.z")}
    found = smallest_set(TREE, lambda kept: tuple(sorted(kept)) in good, budget=1000)
    assert found.names in good


# The code ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.seen: dict[str, list[torch.dtype]] = {}

    def forward(self, x: Tensor) -> Any:
        return self.down(self.norm(self.up(x)))


def changed(model: nn.Module, names: list[str], *, native: bool, device: str = "cpu") -> nn.Module:
    space: dict[str, Any] = {}
    exec(float32_code(names, device, native=native), space)
    kept = space["keep_in_float32"](model)
    assert kept is model
    return model


def dtypes(model: nn.Module, x: Tensor) -> dict[str, torch.dtype]:
    """In which dtype each layer gave its result."""
    seen: dict[str, torch.dtype] = {}
    hooks = [
        module.register_forward_hook(lambda m, args, out, name=name: seen.update({name: out.dtype}))
        for name, module in model.named_modules()
        if name
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return seen


X = torch.linspace(-1, 1, 16).view(2, 8)


def test_under_autocast_the_named_modules_run_in_float32_and_the_others_do_not() -> None:
    model = changed(Net(), ["down"], native=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert dtypes(model, X) == {"up": torch.bfloat16, "norm": torch.bfloat16, "down": torch.float32}


def test_of_a_16_bit_model_the_named_modules_become_float32_and_the_others_cast_what_they_get() -> None:
    model = changed(Net().half(), ["norm"], native=True)
    assert model.norm.weight.dtype is torch.float32
    assert dtypes(model, X.half()) == {"up": torch.float16, "norm": torch.float32, "down": torch.float16}


def test_the_whole_model_can_be_named() -> None:
    model = changed(Net().half(), [""], native=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model(X.half()), Net().half().float()(X.half().float()))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            changed(Net(), [""], native=False)(X), Net()(X.clone()).float(), rtol=0.05, atol=0.05
        )


@pytest.mark.parametrize("native", [False, True])
def test_a_changed_model_can_be_copied_and_the_copy_has_weights_of_its_own(native: bool) -> None:
    model = changed(Net().half() if native else Net(), ["down"], native=native)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.down.weight.zero_()
        twin.down.bias.zero_()
    x = X.half() if native else X
    assert not twin(x).any()
    assert model(x).any()


@pytest.mark.parametrize("native", [False, True])
def test_a_changed_model_compiles_without_a_graph_break_and_trains(native: bool) -> None:
    model = changed(Net().half() if native else Net(), ["norm"], native=native)
    names = [name for name, _ in model.named_parameters()]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=not native):
        compiled(X.half() if native else X).float().square().mean().backward()
    torch.compiler.reset()
    assert names == [name for name, _ in Net().named_parameters()]
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_arguments_in_keywords_lists_and_dicts_are_widened_and_other_dtypes_left() -> None:
    class Reads(nn.Module):
        def forward(self, a: Any, *, b: Any) -> Any:
            self.seen = [a["x"].dtype, a["y"][0].dtype, a["ids"].dtype, b.dtype]
            return b

    model = changed(Reads(), [""], native=False)
    half = torch.ones(2, dtype=torch.bfloat16)
    model({"x": half, "y": [half], "ids": torch.ones(2, dtype=torch.int64)}, b=half.double())
    assert model.seen == [torch.float32, torch.float32, torch.int64, torch.float64]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, which is used then")
def test_on_an_emulated_device_the_code_for_that_device_switches_its_autocast_off() -> None:
    model = changed(Net(), ["down"], native=False, device="cuda")
    with emulate("cuda"), torch.autocast("cuda", torch.float16):
        assert dtypes(model, X) == {"up": torch.float16, "norm": torch.float32, "down": torch.float32}


def test_a_subject_is_changed_in_a_copy() -> None:
    model = Net()
    subject = Subject((model, (X,)), name="net")
    twin = subject_in_float32(subject, float32_code(["down"], "cpu", native=False))
    assert "forward" not in vars(model.down)
    assert "forward" in vars(twin.model.down)
    assert twin.name == "net"


# The cost ----------------------------------------------------------------------------------------------------------


def test_a_cost_within_the_noise_is_undecided_and_one_beyond_it_is_not() -> None:
    noisy = cost_of(0.01, (0.7, 1.4) * 10 + (1.05,), "eager step")
    assert not noisy.decided
    assert str(noisy).startswith("undecided")
    clear = cost_of(0.01, (1.2, 1.3) * 10 + (9.0,), "eager step")
    assert clear.decided
    assert str(clear).startswith("1.30x the time of a plain eager step of 10 ms")


def test_the_interval_is_that_of_the_sign_test() -> None:
    """With 21 pairs the 6th and the 16th hold the median in 97 of 100 cases (tables of the sign test)."""
    cost = cost_of(1.0, tuple(float(n) for n in range(1, 22)), "step")
    assert cost.median == 11
    assert cost.interval == (6, 16)


def test_a_slower_step_is_measured_as_slower() -> None:
    small, large = nn.Linear(8, 8), nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    x, y = torch.ones(2, 8), torch.ones(256, 256)
    cost = measure_cost(Subject((small, (x,))), Subject((large, (y,))), StepConfig())
    assert cost.median > 1
    assert cost.decided
    assert all(p.grad is None for p in small.parameters())
