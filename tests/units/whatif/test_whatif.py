"""Layers in a recipe, in a model's own forward and backward pass."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import ampcheck
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict
from ampcheck.records.whatif import FormatLoss, LayerLoss, Point, WhatIf
from ampcheck.whatif import RECIPES, Recipe, filter_text, measure, whatif
from ampcheck.whatif.linear import LinearMode, Products
from ampcheck.whatif.recipes import ALL, Operand

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


def by_pytorch(x: torch.Tensor, operand: Operand) -> torch.Tensor:
    """A scaled matrix in an 8-bit dtype of PyTorch and back, of operands whose scales are float32 of rows or of all."""
    dtype = getattr(torch, operand.format)
    largest = x.abs().amax() if operand.block == (ALL, ALL) else x.abs().amax(1, keepdim=True)
    factor = (torch.finfo(dtype).max / largest.double()).float()
    factor = torch.exp2(factor.log2().floor()) if operand.scale == "power of two" else factor
    return (x * factor).to(dtype).float() / factor


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "current", "delayed"])
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
        expected = by_pytorch(a, recipe[0]) @ by_pytorch(b, recipe[1]).T if recipe else a @ b.T
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


class Projections(nn.Module):
    """Two matrices of its own, the one of a child, and products that are no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8) * 100)
        self.vector, self.child = nn.Parameter(torch.randn(8)), nn.Embedding(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.up.T + (self.up @ x.T).T
        kept = torch.einsum("ni,io->nio", x, self.down).sum(1) + torch.tensordot(x, self.down, 1)
        return (y + kept) @ self.child.weight.T + (y @ self.vector)[:, None] + (self.down @ self.up).sum()


def test_views_of_weights_are_layers_and_other_products_of_weights_are_counted() -> None:
    net, products = Projections(), Products({"": RECIPES["nvfp4"]})
    gradients(net, inputs(), products)
    assert products.weights == {"": 8 * 16 + 4 * 8}
    assert products.unseen == {"batched einsum of weights": 1, "tensordot of weights": 1, "products of weights": 2}
    pairs = zip(gradients(net, inputs(), Products()), gradients(net, inputs(), None), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-3 * float(b.abs().max())) for a, b in pairs)
    (skipped,) = whatif((Weighted(), inputs()), "nvfp4").findings
    assert skipped.message == "no linear layer ran; not emulated: 1 tensordot of weights"


def test_casts_of_weights_are_layers_and_each_of_their_parts_is_counted_once() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.randn(3, 8, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            narrow = [x.bfloat16() @ self.experts[number % 3].to(torch.bfloat16).T for number in range(6)]
            return sum(narrow).float()  # type: ignore[union-attr]

    net, products = Cast(), Products({"": RECIPES["nvfp4"]})
    (exact,), (narrow,) = (gradients(net, inputs(), run) for run in (Products(), products))
    assert products.weights == {"": 3 * 8 * 16}
    assert products.unseen == {}
    assert 0.01 < float((narrow - exact).norm() / exact.norm()) < 0.5


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensordot(x, self.weight, 1)


@pytest.mark.parametrize(
    ("equation", "shape"),
    [("bsd,df->bsf", (6, 5)), ("bsd, dhk -> bhsk", (6, 2, 5)), ("...d,hd->...h", (7, 6)), ("df,bsd->sfb", (6, 5)),
     ("bsd,sdk->bk", (4, 6, 3))],
)  # fmt: skip
def test_an_einsum_that_projects_is_a_layer(equation: str, shape: tuple[int, ...]) -> None:
    class Projecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(shape))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum(equation, *((self.weight, x) if equation.startswith("df") else (x, self.weight)))

    torch.manual_seed(0)
    net, x, products = Projecting(), torch.randn(3, 4, 6), Products()
    (wide,), (exact,) = gradients(net, x, products), gradients(net, x, None)
    torch.testing.assert_close(wide, exact)
    plain = net(x)
    with LinearMode(net, Products()):
        torch.testing.assert_close(net(x), plain)
    assert (products.weights, products.unseen) == ({"": net.weight.numel()}, {})
    (narrow,) = gradients(net, x, Products({"": RECIPES["mxfp8"]}))
    assert 0 < float((narrow - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize("training", [True, False])
def test_attention_of_pytorch_is_a_layer_with_its_four_matrices(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, norm_first=True
    )  # a last norm has no gradients of this loss
    attention, products = layer.train(training), Products()
    exact = gradients(attention, x := inputs()[:, None], None)
    torch.testing.assert_close(gradients(attention, x, products), exact, rtol=1e-4, atol=1e-6)
    assert products.weights == {"self_attn": 4 * 16 * 16, "linear1": 16 * 32, "linear2": 32 * 16}
    narrow = gradients(attention, x, Products({"self_attn": RECIPES["nvfp4"]}))
    compared = [(a, b) for a, b in zip(narrow, exact, strict=True) if b.norm() > 1e-4]
    assert len(compared) == len(exact) == 12
    assert all(0 < float((a - b).norm() / b.norm()) < 0.5 for a, b in compared)


def test_two_matrices_of_a_module_have_scales_and_bits_of_their_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 4) * 1e4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.small @ self.large

    torch.manual_seed(0)
    calls = (Two(), [inputs(), inputs()])
    what = measure(calls, ["current", "delayed"], budget=8)
    current, delayed = what.losses
    assert current.error == pytest.approx(delayed.error)  # each matrix by its own earlier amax, not by the other's
    assert [(layer.module, layer.weights) for layer in delayed.layers] == [("", 16 * 20)]
    assert {point.bits for point in what.front} == {8.0, 16.0}


def test_a_weight_that_each_call_computes_is_counted_once() -> None:
    net, products = nn.utils.parametrizations.weight_norm(nn.Linear(16, 4)), Products()
    with LinearMode(net, products):
        held = [net(inputs()) for _ in range(3)]
    assert len(held) == 3
    assert products.weights == {"": 64}


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
    wide, narrow = (measure((net, inputs()), "rowwise", front=False, dtype=d).losses[0] for d in (None, "bfloat16"))
    assert (wide.reference, wide.error) != (narrow.reference, narrow.error)


def test_a_model_that_gives_nothing_to_compare_is_refused() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).argmax(-1)

    with pytest.raises(UsageError, match="must give gradients or floating outputs to compare; found neither"):
        whatif((Choice(), inputs()), "rowwise", front=False)


def test_errors_of_a_model_without_gradients_are_those_of_outputs() -> None:
    run = whatif((model().requires_grad_(False), inputs()), "rowwise", front=False)
    assert "move the outputs by" in run.by("format-loss")[0].message


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


def test_filters_have_names_that_python_takes() -> None:
    rows = (Operand("float8_e5m2", block=(1, ALL)), Operand("float8_e5m2", block=(1, ALL)))
    own = [Recipe(name, rows, rows, rows) for name in ("e5m2 by rows", "e5m2-by-rows", "8 bits")]
    choice = dict(zip("abc", (recipe.name for recipe in own), strict=True))
    layers = tuple(LayerLoss(module, 4, {}) for module in choice)
    what = WhatIf("net", (FormatLoss("net", "", 8, layers, 0.1),), (Point("mixed", 8, choice, 0.1, 0.1),))
    exec(filter_text(what, 8), namespace := dict[str, object]())
    filters = [value for key, value in namespace.items() if key.endswith("_filter_fn")]
    assert [[module for module in "abc" if accepts(None, module)] for accepts in filters] == [["c"], ["a"], ["b"]]  # type: ignore[operator]


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


def test_each_run_starts_from_the_same_state() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls, self.seen = nn.Linear(16, 4), 0, [1.0]
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls, self.scale = self.calls + 1, self.scale * 2
            self.seen.append(self.calls * 2.0)
            return self.inner(x.mul_(2)) * self.scale * sum(self.seen)

    what = measure((Stateful(), inputs()), [WIDE, "rowwise"])
    assert what.losses[0].error == 0
    assert what.losses[0].loss == what.losses[0].reference


def test_a_run_that_is_not_finite_is_a_warning() -> None:
    x = inputs()
    x[3] = torch.inf
    for net in (model(), nn.Sequential(Weighted(), nn.Linear(8, 4))):
        run = whatif((net, x), ["rowwise", "nvfp4"])
        assert {finding.verdict for finding in run.findings} == {Verdict.WARN}
        assert not run.of(Verdict.PASS)


def test_a_layer_of_zeros_has_nothing_to_lose() -> None:
    layer = nn.Linear(16, 4)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    (found,) = whatif((layer, inputs()), "rowwise").findings
    assert (found.verdict, "all products that it narrows are zero" in found.message) == (Verdict.SKIP, True)


def test_delayed_scales_come_from_earlier_calls() -> None:
    net = nn.Linear(16, 4)
    calls = (net, [inputs(), inputs() * 64])
    current, delayed = (loss.error for loss in measure(calls, ["current", "delayed"], front=False).losses)
    assert delayed > 4 * current


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ampcheck.UsageError, match="must be a module"):
        whatif((torch.nn.functional.gelu, inputs()))
    with pytest.raises(ampcheck.UsageError, match="must run a backward pass and step an optimizer"):
        whatif(lambda: None)
    with pytest.raises(ampcheck.UsageError, match="raised RuntimeError"):
        whatif((model(), torch.ones(2, 3)))
    with pytest.raises(ampcheck.UsageError, match="leave front=False out"):
        whatif((model(), inputs()), front=False, budget=8)
    run = whatif((nn.GELU(), inputs()))
    assert [finding.verdict for finding in run.findings] == [Verdict.SKIP]
