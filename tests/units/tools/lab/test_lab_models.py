"""What the lab says of autocast, dtypes, products and the compiler, and that planted defects are told."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from ampcheck import demo
from ampcheck.autocast.observe import OpDtype, OpDtypes
from ampcheck.autocast.views import diff_view, source_of
from ampcheck.core.formats import format_of
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Call
from ampcheck.demo import CharTransformer
from ampcheck.numerics.compiled import dynamo_warnings_suppressed
from ampcheck.records.speed import TWIN, ArmTimes, SpeedStats
from ampcheck.records.tf32 import ConfounderStats
from ampcheck.report.charts import draw_chart
from ampcheck.tools.lab import compiling, confounders, flow, policy


def bad(findings: list[Finding]) -> list[str]:
    return [finding.message for finding in findings if finding.verdict in (Verdict.FAIL, Verdict.WARN)]


# Policy ---------------------------------------------------------------------------------------------------------------


def facts(compute: str = "bfloat16", drift: tuple[Finding, ...] = (), probed: int = 5) -> policy.PolicyStats:
    ops = OpDtypes(
        "demo", "cpu", "bfloat16", False, (OpDtype("aten::mm", "lower_precision", ("float32",), (compute,)),)
    )
    told = drift or (Finding("policy-drift", Verdict.PASS, "cpu", "5 overloads are treated as before"),)
    return policy.PolicyStats("cpu", {"cpu": probed}, {"cpu": 5}, 3, told, {"cpu": ops})


def test_the_policy_as_it_should_be_passes_and_each_departure_is_told() -> None:
    assert bad(policy.check_policies(facts())) == []
    assert "0 of 1 do" in bad(policy.check_policies(facts("float32")))[0]
    moved = Finding("policy-drift", Verdict.FAIL, "cpu", "aten::mm is left alone")
    assert "aten::mm is left alone" in bad(policy.check_policies(facts(drift=(moved,))))[0]
    for probed in (0, 1, 4):
        assert f"{probed} of 5 do" in bad(policy.check_policies(facts(probed=probed)))[0]


def test_a_snapshot_that_was_not_compared_is_skipped_with_the_reason() -> None:
    lacking = Finding("policy-drift", Verdict.SKIP, "cpu", "another build")
    found = policy.check_policies(facts(drift=(lacking,)))
    assert [one.message for one in found if one.verdict is Verdict.SKIP] == ["another build"]
    assert not any("snapshot" in one.message for one in found)


def test_the_table_of_ops_tells_floating_dtypes_by_device() -> None:
    table = policy.ops_table(facts().ops)
    assert table.columns == ["op", "cpu: rule", "cpu: computes in"]
    assert table.rows[0] == ("aten::mm", "lower_precision", "bfloat16")


def test_every_device_of_this_pytorch_has_a_table_of_its_ops_and_cpu_and_cuda_differ() -> None:
    source = source_of("installed", "float16")
    tables = [table for view in policy.device_views(source, "cpu") for table in view.tables]
    assert {table.title.rpartition(" on ")[2] for table in tables} == set(source.devices) >= set(policy.PAIR)
    assert all(table.rows for table in tables)
    assert diff_view(source, source, *policy.PAIR).data["changes"]


# Flow -----------------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.norm(self.up(x).float()))


@pytest.fixture(scope="module")
def tiny() -> flow.Flow:
    torch.manual_seed(0)
    return flow.measure_flow(Tiny(), Call((torch.randn(2, 4),)), name="tiny")


def test_the_dtypes_told_are_those_that_torch_gives(tiny: flow.Flow) -> None:
    model, x = Tiny(), torch.randn(2, 4)
    seen = {one.module: one for one in tiny.arms["bfloat16"]}
    with torch.autocast("cpu", torch.bfloat16):
        up = model.up(x)
        norm = model.norm(up.float())
        down = model.down(norm)
    names = [str(t.dtype).removeprefix("torch.") for t in (x, up, norm, down)]
    assert (seen["up"].inputs, seen["up"].outputs) == ((names[0],), (names[1],))
    assert (seen["norm"].inputs, seen["norm"].outputs) == (("float32",), (names[2],))
    assert (seen["down"].inputs, seen["down"].outputs) == ((names[2],), (names[3],))


def test_a_cast_back_to_float32_is_counted_where_it_is_made(tiny: flow.Flow) -> None:
    widened = {one.module: one.widened for one in tiny.arms["bfloat16"]}
    assert widened == {"": 1, "up": 0, "norm": 0, "down": 0}
    assert {one.widened for one in tiny.arms[""]} == {0}


def test_without_autocast_all_is_float32_and_what_is_not_is_told(tiny: flow.Flow) -> None:
    assert bad(flow.check_flow(tiny)) == []
    arms = {arm: tuple(replace(one, outputs=("float64",)) for one in held) for arm, held in tiny.arms.items()}
    assert len(bad(flow.check_flow(replace(tiny, arms=arms)))) == 3
    assert bad(flow.check_flow(replace(tiny, arms={"": ()}))) != []


def test_a_model_of_the_users_cache_is_described_and_never_judged(tiny: flow.Flow) -> None:
    wide = {arm: tuple(replace(one, outputs=("float32",)) for one in held) for arm, held in tiny.arms.items()}
    none = {arm: tuple(replace(one, kind="Quantised") for one in held) for arm, held in tiny.arms.items()}
    for arms, told in ((wide, "0 of 2 linear layers"), (none, "0 of 0 linear layers")):
        assert bad(flow.check_flow(replace(tiny, arms=arms))) != []
        theirs = replace(tiny, arms=arms, known=False)
        assert flow.check_flow(theirs) == []
        assert told in flow.classes_table(theirs).note


def test_a_cached_model_that_cannot_be_run_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ("their/model", Tiny(), Call((torch.randn(2, 3),)))  # the wrong width
    monkeypatch.setattr(flow, "random_lm", lambda: "not looked at")
    monkeypatch.setattr(flow, "pretrained_lm", lambda full: found)
    run = flow.run()
    assert not run.failed
    assert any("their/model" in one.message and "could not be run" in one.message for one in run.of(Verdict.SKIP))


def test_a_library_that_is_missing_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert str(flow.pretrained_lm()).startswith("transformers is not installed")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_said_of_parameters_layers_norms_losses_and_residual_sums_holds_of_the_demo(device: str) -> None:
    subject = demo.subject()
    seen = flow.measure_flow(subject.model, subject.calls[0], name="the demo", device=device)
    assert {parameter.dtype for parameter in subject.model.parameters()} == {torch.float32}
    gave = {
        kind: {one.outputs for one in seen.arms["bfloat16"] if one.kind == kind} for kind in ("Linear", "LayerNorm")
    }
    assert gave == {"Linear": {("bfloat16",)}, "LayerNorm": {("float32",)}}
    blocks = [one for one in seen.arms["bfloat16"] if one.kind == "Block"]  # float32 plus a linear layer's bfloat16
    assert [(one.inputs, one.outputs) for one in blocks] == [(("float32",), ("float32",))] * 2
    (root,) = [one for one in seen.arms["bfloat16"] if one.module == ""]
    assert root.outputs == ("bfloat16", "float32")  # logits and loss
    messages = [finding.message for finding in flow.check_flow(seen)]
    assert all(f"the demo on {seen.device}" in message for message in messages)


def test_cudas_policy_shows_without_the_device() -> None:
    seen = flow.measure_flow(Tiny(), Call((torch.randn(2, 4),)), name="tiny", device="cuda")
    assert {one.outputs for one in seen.arms["bfloat16"] if one.kind == "Linear"} == {("bfloat16",)}


def test_the_tables_of_classes_and_modules_hold_every_module(tiny: flow.Flow) -> None:
    assert [row[0] for row in flow.modules_table(tiny).rows] == ["(root)", "up", "norm", "down"]
    assert sum(int(str(row[1])) for row in flow.classes_table(tiny).rows) == 4


def test_a_random_language_model_is_made_and_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    import socket

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the lab reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    made = flow.random_lm()
    assert not isinstance(made, str)
    assert isinstance(made[1], nn.Module)
    assert isinstance(flow.pretrained_lm(), (str, tuple))


# Confounders ----------------------------------------------------------------------------------------------------------


def test_operands_are_rounded_as_ml_dtypes_and_tf32_by_its_bits() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 100
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        wanted = values.numpy().astype(dtype).astype(np.float64)
        assert np.array_equal(confounders.rounded_to(values, format_of(name)).numpy(), wanted)
    bits = values.view(torch.int32)
    kept = bits + 0x0FFF + ((bits >> 13) & 1)  # to nearest, ties to even, at bit 13
    tf32 = (kept & ~0x1FFF).view(torch.float32).double()
    assert torch.equal(confounders.rounded_to(values, format_of("tf32")), tf32)


def test_operands_that_tensor_cores_cut_off_instead_of_rounding_keep_the_bound_of_tf32() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(confounders.SIZE, confounders.SIZE, generator=generator) for _ in range(2))
    cut = [(values.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for values in (a, b)]
    seen = confounders.product_stats("high", a, b, cut[0] @ cut[1], format_of("tf32"))
    assert bad(confounders.check_lab_confounders(stats(seen))) == []
    assert 0.3 < seen.worst / seen.bound < 0.4


def product(how: str, form: str) -> confounders.ProductStats:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator) for _ in range(2))
    out = confounders.rounded_to(a, format_of(how)) @ confounders.rounded_to(b, format_of(how))
    return confounders.product_stats("highest", a, b, out, format_of(form))


def stats(*products: confounders.ProductStats, same: bool = True) -> confounders.LabConfounders:
    runs = (
        confounders.SpreadStats("the first run", (1.0, 0.5), True),
        confounders.SpreadStats("again", (1.0, 0.5 if same else 0.25), True),
    )
    return confounders.LabConfounders("cpu", ConfounderStats("float32", "cpu", {}, ()), products, runs)


def test_tf32_in_a_product_that_is_called_float32_is_told() -> None:
    assert bad(confounders.check_lab_confounders(stats(product("float32", "float32")))) == []
    assert bad(confounders.check_lab_confounders(stats(product("tf32", "tf32")))) == []
    assert len(bad(confounders.check_lab_confounders(stats(product("tf32", "float32"))))) == 1
    assert len(bad(confounders.check_lab_confounders(stats(product("bfloat16", "tf32"))))) == 1


def test_a_repetition_that_differs_is_warned_of_with_its_distance() -> None:
    (told,) = bad(confounders.check_lab_confounders(stats(same=False)))
    assert "0.25 off" in told


def test_settings_and_threads_are_afterwards_as_they_were() -> None:
    def settings() -> list[object]:
        own = [
            getattr(getattr(part, "matmul", None), "fp32_precision", None)
            for part in (torch.backends.cuda, torch.backends.mkldnn)
        ]
        return [torch.get_float32_matmul_precision(), torch.get_num_threads(), *own]

    before = settings()
    seen = confounders.measure_lab_confounders(steps=1)
    assert settings() == before
    assert [product.setting for product in seen.products][:3] == list(confounders.SETTINGS)
    assert seen.spread[1].losses == seen.spread[0].losses
    assert not bad(confounders.check_lab_confounders(seen))


def test_cuda_graphs_are_compared_where_there_are_some() -> None:
    on_cpu, on_cuda = (compiling.modes_on(device, full=True) for device in ("cpu", "cuda:0"))
    assert on_cuda == (*on_cpu, compiling.CUDA_GRAPHS)
    assert compiling.CUDA_GRAPHS.options == {"mode": "reduce-overhead"}
    assert compiling.modes_on("cuda") == compiling.MODES == on_cpu[: len(compiling.MODES)]


# Compiling ------------------------------------------------------------------------------------------------------------


def stats_of(**changed: object) -> compiling.CompilingStats:
    eager = compiling.ModeStats("eager", 0.1, 0, 0, 1e-3, 2e-3)
    other = replace(compiling.ModeStats("compiled, autocast inside", 5.0, 1, 0, 1e-3, 2e-3), **changed)
    return compiling.CompilingStats("cpu", (eager, other), None, Run())


def test_one_graph_as_right_as_eager_passes_and_each_departure_is_told() -> None:
    assert bad(compiling.check_compiling(stats_of())) == []
    assert "2 graphs, 1 breaks" in bad(compiling.check_compiling(stats_of(graphs=2, breaks=1)))[0]
    assert len(bad(compiling.check_compiling(stats_of(gradient=1e-2)))) == 1
    assert len(bad(compiling.check_compiling(stats_of(gradient=math.nan)))) == 1


def test_a_way_that_this_machine_lacks_and_starts_that_were_not_measured_are_skipped_with_the_reason() -> None:
    lacking = stats_of(raised="no compiler", lacking=True)
    found = compiling.check_compiling(replace(lacking, startup="no room"))
    assert [one.verdict for one in found] == [Verdict.SKIP, Verdict.SKIP]
    assert "no compiler" in found[0].message
    assert "no room" in found[1].message


class Broken(CharTransformer):
    def forward(self, *args):
        torch._dynamo.graph_break()
        return super().forward(*args)


def test_a_graph_break_under_fullgraph_is_a_failure_and_no_lack_of_a_tool() -> None:
    whole = tuple(mode for mode in compiling.MODES if mode.name in (compiling.EAGER, "compiled, fullgraph"))
    with dynamo_warnings_suppressed():
        seen = compiling.measure_compiling(
            modes=whole, model=Broken(layers=1, width=16, heads=2), budget=0.05, startup=False
        )
    found = [one for one in compiling.check_compiling(seen) if "fullgraph" in one.message]
    assert [one.verdict for one in found] == [Verdict.FAIL]


def test_the_whole_run_shows_every_way_and_draws_its_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = tuple(ArmTimes(name, (0.01,) * 20) for name in ("eager", TWIN, "compiled, autocast inside"))
    held = replace(stats_of(), speeds=SpeedStats("a step of the demo", arms))
    broken = compiling.ModeStats("compiled, fullgraph", raised="Unsupported: a break")
    monkeypatch.setattr(compiling, "measure_compiling", lambda *_, **__: replace(held, modes=(*held.modes, broken)))
    run = compiling.run()
    assert run.coverage.total == 2
    assert [row[0] for row in run.tables[0].rows] == [
        *(mode.name for mode in held.modes),
        f"{broken.name}: {broken.raised}",
    ]
    assert run.tables[0].rows[-1][1:] == (None,) * 8
    assert all(draw_chart(chart) and TWIN in chart.note for chart in run.charts)


def test_autocast_outside_and_inside_of_the_compiled_function_give_one_graph_each() -> None:
    with dynamo_warnings_suppressed():
        seen = compiling.measure_compiling(
            model=CharTransformer(layers=1, width=16, heads=2), budget=0.05, startup=False
        )
    by_name = {mode.name: mode for mode in seen.modes}
    if by_name["compiled, autocast outside"].raised:
        pytest.skip(by_name["compiled, autocast outside"].raised)
    assert [(mode.graphs, mode.breaks) for mode in seen.modes] == [(0, 0), (1, 0), (1, 0), (1, 0)]
    assert all(0 < mode.gradient < 0.1 for mode in seen.modes)
    assert seen.speeds is not None
    assert [arm.name for arm in seen.speeds.compared] == [mode.name for mode in compiling.MODES[1:]]
