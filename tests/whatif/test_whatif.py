"""Layers in a recipe, in a model's own forward and backward pass."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import ampcheck
from ampcheck.core.run import Run, Verdict
from ampcheck.whatif import RECIPES, Recipe, filter_text, measure, whatif
from ampcheck.whatif.casts import cast
from ampcheck.whatif.linear import LinearMode, Products

WIDE = Recipe("wide", None)


def model(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4))


def inputs(outlier: float = 0.0) -> torch.Tensor:
    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    x[0, 0] += outlier
    return x


def gradients(net: nn.Module, x: torch.Tensor, products: Products | None) -> list[torch.Tensor]:
    net.zero_grad()
    if products is None:
        net(x).square().mean().backward()
    else:
        with LinearMode(net, products):
            net(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def test_without_a_recipe_a_run_is_as_it_was() -> None:
    net, products = model(), Products()
    torch.testing.assert_close(gradients(net, inputs(), products), gradients(net, inputs(), None))
    assert products.weights == {"0": 512, "2": 1024, "4": 128}


@pytest.mark.parametrize("name", RECIPES)
def test_the_products_of_a_layer_are_those_of_its_cast_operands(name: str) -> None:
    layer, x = nn.Linear(32, 8), torch.randn(16, 32, requires_grad=True)
    upstream = torch.randn(16, 8)
    with LinearMode(layer, Products({"": RECIPES[name]})):
        output = layer(x)
        output.backward(upstream)
    operands = {
        "forward": (x.detach(), layer.weight.detach()),
        "grad_input": (upstream, layer.weight.detach().T),
        "grad_weight": (upstream.T, x.detach().T),
    }
    results = {"forward": output.detach() - layer.bias.detach(), "grad_input": x.grad, "grad_weight": layer.weight.grad}
    for product, (a, b) in operands.items():
        recipe = RECIPES[name][product]
        if recipe is None or recipe[0].stochastic:
            continue
        expected = cast(a, recipe[0]).values @ cast(b, recipe[1]).values.T
        torch.testing.assert_close(results[product], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, upstream.sum(0))


def test_other_ways_to_multiply_by_a_weight_are_layers_too() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.zeros(4))
            self.experts = nn.Parameter(torch.randn(2, 4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.addmm(self.bias, x, self.weight) + x @ self.weight + torch.matmul(x, self.weight)
            return torch.bmm(y.expand(2, *y.shape), self.experts)

    own, products = Own(), Products({"": RECIPES["nvfp4"]})
    exact = gradients(own, inputs(), None)
    narrow = gradients(own, inputs(), products)
    assert products.weights == {"": 64}
    assert products.unseen == {"batched products of weights": 1}
    assert all(0 < float((a - b).norm() / a.norm()) < 0.5 for a, b in zip(exact, narrow, strict=True))


def test_experts_of_one_module_are_one_layer_with_all_their_weights() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 8, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(nn.functional.linear(x, self.up[number % 3]) for number in range(6))  # type: ignore[return-value]

    products = Products()
    with LinearMode(experts := Experts(), products):
        experts(inputs())
    assert products.weights == {"": 3 * 8 * 16}


def test_what_no_recipe_can_narrow_is_left_as_it_is() -> None:
    net = nn.Linear(4, 4)
    with LinearMode(net, Products({"": RECIPES["nvfp4"]}, observed=[RECIPES["mxfp8"]])):
        assert net(torch.ones(0, 4)).shape == (0, 4)  # an expert without tokens
        with pytest.raises(RuntimeError):
            net(torch.ones(2, 4).double())

    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x.cfloat(), torch.ones(4, 4).cfloat())

    turned, products = Turned(), Products()
    with LinearMode(turned, products):
        turned(torch.ones(2, 4))
    assert not products.weights
    double, x = model().double(), inputs().double()
    pairs = zip(gradients(double, x, Products()), gradients(double, x, None), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-15) for a, b in pairs)


def test_recomputed_layers_are_in_the_recipe_too() -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    saving, plain = (measure((net, inputs()), "mxfp8", front=False).losses[0] for net in (Saving(), model()))
    assert saving.error == plain.error > 0


def test_autocast_decides_the_dtype_of_the_result() -> None:
    net = model()
    with torch.autocast("cpu", torch.bfloat16), LinearMode(net, Products()):
        assert net(inputs()).dtype is torch.bfloat16
    run = whatif((net, inputs()), "rowwise", front=False, dtype="bfloat16")
    assert run.by("format-loss")


def test_a_run_ranks_recipes_by_what_they_lose() -> None:
    what = measure((model(), inputs()), ["rowwise", "mxfp8", "nvfp4", WIDE], front=False)
    errors = {loss.recipe: loss.error for loss in what.losses}
    assert 0 == errors["wide"] < errors["mxfp8"] < errors["nvfp4"] < 1
    layers = next(loss.layers for loss in what.losses if loss.recipe == "nvfp4")
    assert all(12 < layer.products[p].decibels < 30 for layer in layers for p in layer.products)


def test_an_outlier_loses_the_others_of_one_scale() -> None:
    run = whatif((model(), inputs(1e6)), ["tensorwise", "rowwise"], front=False)
    warning, *_ = run.of(Verdict.WARN)
    assert (warning.where.module, warning.check, warning.name) == ("0", "format-loss", "Sequential")
    assert "tensorwise must leave the output of 0 10 dB above its noise; it leaves -0.0 dB; 96%" in warning.message
    (passed,) = run.of(Verdict.PASS)
    assert passed.message.startswith("rowwise: ")
    assert not run.failed


def test_a_front_ends_at_both_ends_and_its_choices_are_measured() -> None:
    what = measure((model(), inputs()), ["mxfp8", "nvfp4"])
    mixed = [point for point in what.front if point.name == "mixed"]
    assert (mixed[0].bits, mixed[0].measured) == (16.0, 0.0)
    assert mixed[-1].bits == 4.5
    uniform = next(point for point in what.front if point.name == "nvfp4")
    assert mixed[-1].measured == uniform.measured == what.losses[1].error
    assert all(0.5 < point.measured / point.predicted < 2 for point in mixed[1:])


def test_a_filter_converts_the_layers_of_the_budget() -> None:
    what = measure((model(), inputs()), ["mxfp8", "nvfp4"], budget=9.0)
    text, namespace = filter_text(what, 9.0), dict[str, object]()
    exec(text, namespace)
    filters = [value for key, value in namespace.items() if key.endswith("_filter_fn")]
    converted = {name for name in ("0", "2", "4") for accepts in filters if accepts(None, name)}  # type: ignore[operator]
    point = min((p for p in what.front if p.bits <= 9.0), key=lambda p: p.measured)
    assert converted == set(point.choice)
    assert filter_text(what, 3.0) == ""


def test_a_run_is_saved_and_a_second_is_equal() -> None:
    first, second = (whatif((model(), inputs()), ["te-nvfp4", "delayed"]) for _ in range(2))
    assert first.tables == second.tables
    assert Run.from_json(first.to_json()) == first


def test_the_user_s_model_is_as_before() -> None:
    net = model()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    whatif((net, inputs()), "nvfp4", front=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_delayed_scales_come_from_earlier_calls() -> None:
    net = nn.Linear(16, 4)
    calls = (net, [inputs(), inputs() * 64])
    current, delayed = (loss.error for loss in measure(calls, ["current", "delayed"], front=False).losses)
    assert delayed > 4 * current


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ampcheck.UsageError, match="must be a module"):
        whatif((torch.nn.functional.gelu, inputs()))
    with pytest.raises(ampcheck.UsageError, match="must be a model with its inputs"):
        whatif(lambda: None)
    with pytest.raises(ampcheck.UsageError, match="raised RuntimeError"):
        whatif((model(), torch.ones(2, 3)))
    with pytest.raises(ampcheck.UsageError, match="leave front=False out"):
        whatif((model(), inputs()), front=False, budget=8)
    run = whatif((nn.GELU(), inputs()))
    assert [finding.verdict for finding in run.findings] == [Verdict.SKIP]
