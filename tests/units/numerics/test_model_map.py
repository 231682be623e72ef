"""The map of a model: every module in order of execution, with the values that it has."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from ampcheck import Run, audit, demo
from ampcheck.core.errors import UsageError
from ampcheck.core.run import ModelMap, Site


@pytest.fixture(scope="module")
def run() -> Run:
    return audit(demo.subject(), dtype="float16", compile=False)


class Net(nn.Module):
    """The modules run in another order than they are declared in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 4)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(x))


def module_of(model_map: ModelMap, module: str, phase: str) -> Site:
    (site,) = [s for s in model_map.sites if (s.module, s.phase, s.op) == (module, phase, "")]
    return site


def test_modules_stand_in_order_of_execution_after_those_that_contain_them() -> None:
    run = audit((Net(), torch.randn(2, 8)), dtype="bfloat16", compile=False)
    (model_map,) = run.maps
    assert list(dict.fromkeys(s.module for s in model_map.sites)) == ["", "block", "block.0", "block.1", "last"]


def test_the_map_has_the_subject_of_its_findings_and_both_directions(run: Run) -> None:
    (model_map,) = run.maps
    assert model_map.subject in {finding.subject for finding in run.findings}
    assert {site.phase for site in model_map.sites} == {"forward", "backward"}
    assert [band.label for band in model_map.bands][:2] == ["float16 subnormal", "float16 normal"]
    assert {"blocks.0.qkv", "blocks.1.down", "head", ""} <= {site.module for site in model_map.sites}


def test_ops_stand_with_their_module_and_line(run: Run) -> None:
    (model_map,) = run.maps
    ops = [site for site in model_map.sites if site.op and site.module == "blocks.0.qkv"]
    assert "aten::addmm" in {site.op for site in ops}
    assert all(site.dtype == "float16" and site.file.endswith("model.py") for site in ops if site.phase == "forward")


def test_the_values_of_a_module_are_those_that_it_has() -> None:
    linear = nn.Linear(4, 4)
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    x = torch.tensor([[3.0, 1.0, 0.5, 0.25], [0.0, 2.0, 2.5, 1.5]])
    (model_map,) = audit((linear, x), dtype="bfloat16", compile=False).maps
    site = module_of(model_map, "", "forward")
    assert (site.amax, site.amin, site.flushed, site.error) == (3.0, 0.25, 0.0, 0.0)
    assert {site.first + n: count for n, count in enumerate(site.bins)} == {-2: 1, -1: 1, 0: 2, 1: 3}


def test_the_error_and_the_flushed_share_are_those_against_float64() -> None:
    class Tiny(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2.0**-10

    x = torch.tensor([[1.0, 3.0, 2.0**-15, -(2.0**-16)]]).half().requires_grad_()
    (model_map,) = audit((Tiny(), x), compile=False, autocast=False, dtype="float16").maps
    site = module_of(model_map, "", "forward")
    exact = x.detach().double() * 2.0**-10
    low = (x.detach() * 2.0**-10).double()
    assert site.flushed == 0.5
    assert int(((low == 0) & (exact != 0)).sum()) == 2
    assert site.error == pytest.approx(float((low - exact).norm() / exact.norm()))
    assert site.limit is not None
    assert site.limit > site.error


def test_an_op_that_overflows_says_what_goes_in_and_what_float64_has() -> None:
    class Big(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 300.0).float()

    run = audit((Big(), torch.tensor([400.0, 1.0]).half()), compile=False)
    (model_map,) = [m for m in run.maps if "float16" in m.subject]
    (site,) = [s for s in model_map.sites if s.lost]
    assert (site.op, site.lost, site.nonfinite) == ("aten::mul.Tensor", "overflow", 1)
    assert (site.inputs, site.exact, site.amax) == (400.0, 120000.0, 300.0)
    assert site.file.endswith("test_model_map.py")


def test_a_callable_has_a_map_of_its_ops() -> None:
    def call() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.functional.linear(torch.ones(2, 4), torch.ones(4, 4)).sum()

    (model_map,) = audit(call, compile=False).maps
    assert {site.op for site in model_map.sites} >= {"aten::mm"}


def test_a_map_survives_json_and_a_run_of_before_has_none(run: Run) -> None:
    data = json.loads(json.dumps(run.to_json()))
    assert Run.from_json(data).maps == run.maps
    del data["maps"]
    assert Run.from_json(data).maps == ()


@pytest.mark.parametrize("bad", [{"first": 5000, "bins": [1]}, {"bins": [-1]}])
def test_a_histogram_that_cannot_be_drawn_is_a_usage_error(bad: dict[str, object]) -> None:
    data = Run(maps=(ModelMap("m", (Site("forward", amax=math.inf),)),)).to_json()
    data["maps"][0]["sites"][0].update(bad)
    with pytest.raises(UsageError, match="must count elements of exponents between"):
        Run.from_json(data)
