from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampcheck.checks.formats.format_loss import CHECK, check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.records.whatif import FormatLoss, LayerLoss, ProductLoss, WhatIf, decibels


def judged(*layers: LayerLoss, error: float = 0.1) -> list[Finding]:
    loss = FormatLoss("net", "nvfp4", 4.5, layers, error, loss=1.01, reference=1.0)
    return list(check(WhatIf("net", (loss,)), Limits()))


def layer(module: str, noise: float, of_rows: float | None = None, **shares: float) -> LayerLoss:
    product = ProductLoss(noise, noise if of_rows is None else of_rows, **shares)
    return LayerLoss(module, 64, {"forward": ProductLoss(0.01, 0.01), "grad_weight": product})


def test_a_recipe_that_keeps_all_layers_passes_with_its_cost() -> None:
    (found,) = judged(layer("a", 0.1), layer("b", 0.2))
    assert (found.check, found.verdict, found.seen) == (CHECK.slug, Verdict.PASS, 2)
    assert "the gradient of the weight of b keeps least, 14.0 dB" in found.message
    assert "by 0.1 of their norm (20 dB) and the loss by +1.0e-02" in found.message


def test_a_lost_gradient_is_a_warning_at_its_layer() -> None:
    (found,) = judged(layer("a", 0.5, flushed=0.9, saturated=0.01), layer("b", 0.1))
    assert (found.verdict, found.where) == (Verdict.WARN, Where("backward", "a"))
    assert round(found.observed or 0, 1) == 6.0
    assert "90% of an operand becomes zero; 1.0% saturates" in found.message


def test_half_of_the_rows_are_enough_to_lose_a_product() -> None:
    (found,) = judged(layer("a", 0.01, of_rows=1.0))
    assert found.verdict is Verdict.WARN


def test_a_result_that_is_not_finite_is_lost() -> None:
    (found,) = judged(layer("a", math.inf), error=math.inf)
    assert found.verdict is Verdict.WARN


def test_nan_is_lost_as_infinity_is() -> None:
    assert decibels(math.nan) == decibels(math.inf) == -math.inf
    for product in (ProductLoss(math.nan, 0.01), ProductLoss(0.01, math.nan)):
        assert product.decibels == -math.inf
    (found,) = judged(layer("a", math.nan), layer("b", 0.1), error=math.inf)
    assert (found.verdict, found.where.module) == (Verdict.WARN, "a")


@pytest.mark.parametrize("values", [{"error": math.inf}, {"loss": math.nan}, {"reference": math.inf}])
def test_a_whole_run_that_is_not_finite_is_a_warning_though_each_layer_keeps_its_products(
    values: dict[str, float],
) -> None:
    loss = replace(FormatLoss("net", "nvfp4", 4.5, (layer("a", 0.1),), 0.1, loss=1.01, reference=1.0), **values)
    (found,) = check(WhatIf("net", (loss,)), Limits())
    assert found.verdict is Verdict.WARN
    assert found.message.startswith("nvfp4 must leave the run of the whole model finite; found gradients off by ")


def test_a_recipe_under_which_no_product_is_other_than_zero_is_skipped() -> None:
    (found,) = judged(LayerLoss("a", 64, {}))
    assert (found.verdict, found.seen) == (Verdict.SKIP, 0)


def test_of_many_lost_layers_the_worst_are_listed_first() -> None:
    found = judged(*(layer(str(number), 0.4 + number / 100) for number in range(9)))
    assert (len(found), found[0].where.module) == (5, "8")
    assert "4 further places are left out" in found[-1].message


def test_a_model_without_linear_layers_is_skipped() -> None:
    (found,) = check(WhatIf("net", ()), Limits())
    assert found.verdict is Verdict.SKIP
