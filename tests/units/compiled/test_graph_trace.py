"""What PyTorch's words say: guards by kind and family, graph breaks by place, reason and advice."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.compiled.graph.guards import HINTS, closest, hint, read_guards
from ampcheck.compiled.graph.trace import CompileLog, read_break
from ampcheck.torchtools.dynamo import TraceRecord

SAID = {
    "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 5": "shape",
    "1/1: 2 <= x.size()[0]  # def g(x):  # a.py:19 in g (user code shown is first use)": "shape",
    "0/0: tensor 'args[0]' rank mismatch. expected 2, actual 3": "rank",
    "0/0: tensor 'x' stride mismatch at index 0. expected 3, actual 1": "stride",
    "0/0: tensor 'x' dtype mismatch. expected Float, actual Double": "dtype",
    "0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0": "requires_grad",
    "0/3: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, AutogradCPU), actual DispatchKeySet(CPU)":
        "inference mode",
    "0/1: GLOBAL_STATE changed: grad_mode ": "grad mode",
    "0/2: GLOBAL_STATE changed: grad_mode autocast(cpu)_enabled ": "grad mode and autocast",
    "0/0: fn._modules['1'].training == True   # return F.dropout(  # dropout.py:73 in forward": "training flag",
    "0/7: self.i == 7   # return x * self.i  # a.py:28 in forward (HINT: torch.compile considers ...)":
        "constant attribute",
    "0/7: s.i == 7   # def forward(s, x): # (HINT: set torch._dynamo.config.allow_unspec_int_on_nn_module = True)":
        "constant attribute",
    "1/5: n == 2   # def g(x, n):  # a.py:19 in g": "constant",
    "1/6: d is None   # def g(x, d):  # a.py:19 in g": "constant",
    "0/0: ___check_obj_id(step, 140247)  # a.py:1": "identity",
    "2/0: len(self.aux) == 2  # return sum(self.aux)  # a.py:9": "length",
    "1/0: Cache line invalidated because L['stack'] got deallocated": "invalidated",
    "0/0: BACKEND_MATCH failure: torch.compile detected different backend callables.": "backend",
    "0/1: 'NoneType' object has no attribute 'stride'": "type",
    "0/0: not G['LOG']": "other",
    # As PyTorch 2.6 writes them.
    "0/0: ___check_obj_id(L['fn']._modules['1'].training, 1397735)": "training flag",
    "0/6: L['self'].place == 6                        ": "constant attribute",
    "0/0: tensor 'L['x']' dispatch key set mismatch. expected DispatchKeySet(CPU), actual DispatchKeySet(AutocastCPU)":
        "autocast",
}  # fmt: skip


@pytest.mark.parametrize(("said", "kind"), SAID.items())
def test_a_failed_guard_is_of_the_kind_that_it_watches(said: str, kind: str) -> None:
    (guard,) = read_guards(said)
    assert guard.kind == kind
    assert "#" not in guard.text
    assert guard.text == guard.text.strip()
    assert kind == "other" or hint(kind)


@pytest.mark.parametrize("kind", HINTS)
def test_each_hint_names_what_to_do(kind: str) -> None:
    assert len(hint(kind)) > 20


@given(st.integers(), st.integers())
def test_the_value_of_a_guard_is_no_part_of_its_family(one: int, other: int) -> None:
    first, second = (read_guards(f"0/0: self.i == {value}")[0] for value in (one, other))
    assert first.families == second.families


@given(st.lists(st.sampled_from(list(SAID)), min_size=1))
def test_a_list_of_reasons_is_read_in_its_order(said: list[str]) -> None:
    assert [g.text for g in read_guards(json.dumps(said))] == [read_guards(one)[0].text for one in said]


@given(st.lists(st.sampled_from(list(SAID)), min_size=1))
def test_what_had_varied_before_is_repeated_and_only_that(said: list[str]) -> None:
    guards = read_guards(json.dumps(said))
    families = frozenset().union(*(guard.families for guard in guards))
    best, repeated = closest(guards, ())
    assert not repeated
    assert best in guards
    assert closest(guards, families)[1]


def test_the_guard_that_tells_most_is_named() -> None:
    said = ["0/2: GLOBAL_STATE changed: grad_mode autocast(cpu)_enabled ", "0/1: GLOBAL_STATE changed: grad_mode "]
    assert closest(read_guards(json.dumps(said)), ())[0].kind == "grad mode"
    deeper = [*said, "0/0: tensor 'x' rank mismatch. expected 2, actual 3"]
    assert closest(read_guards(json.dumps(deeper)), ())[0].kind == "rank"
    assert closest(read_guards(json.dumps(deeper)), {("rank", "x", "")})[0].kind == "grad mode"


BREAK = """Graph break in user code at /models/net.py:29
Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):

Data-dependent branching
  Explanation: Detected data-dependent branching.
  Hint: Use `torch.cond` to express dynamic control flow.
  Hint: This graph break is fundamental - it is unlikely that Dynamo will ever be able to trace through your code.

  Developer debug context: attempted to jump with TensorVariable()

User code traceback:
  File "/site/torch/_dynamo/eval_frame.py", line 1090, in compile_wrapper
    return fn(*args, **kwargs)
  File "/models/net.py", line 40, in forward
    return self.block(x)
  File "/models/net.py", line 29, in forward
    if x.sum() > 0:

Traceback (most recent call last):
  File "/site/torch/_dynamo/symbolic_convert.py", line 788, in inner
"""


def test_a_break_is_read_with_place_reason_advice_and_the_functions_that_it_cuts() -> None:
    found = read_break(BREAK)
    assert (found.where.file, found.where.line) == ("/models/net.py", 29)
    assert found.reason == "Data-dependent branching: Detected data-dependent branching."
    assert found.hint == "Use `torch.cond` to express dynamic control flow."
    assert found.frames == {("/models/net.py", "forward")}


def test_a_break_without_an_explanation_has_the_first_line_of_its_message_and_no_link_as_its_reason() -> None:
    said = "Could not guard on u0 > 1.\n\nCaused by: x.item()\nFor more information about this error, see: https://a.b"
    assert read_break(said).reason == "Could not guard on u0 > 1."


def older(reason: str, *frames: str) -> str:
    """The text of a break of PyTorch 2.6."""
    stack = "".join(
        f'  File "{path}", line 29, in {name}\n    ...\n' for path, _, name in (f.partition(":") for f in frames)
    )
    return f"Graph break in user code at /models/net.py:29\nReason: {reason}\nUser code traceback:\n{stack}\n"


def test_a_break_in_a_function_that_another_calls_is_one_in_pytorch_2_6_as_well() -> None:
    log = CompileLog()
    outer = (
        "Unsupported: Dynamic control flow is not supported at the moment. Please use functorch.experimental."
        "control_flow.cond to explicitly capture the control flow. For more information about this error, see: https://a.b"
    )
    for reason, frames in (
        (outer, ("/models/net.py:outer", "/models/net.py:f")),
        ("Data-dependent jump", ("/models/net.py:f",)),
    ):
        log(TraceRecord("dynamo_graph_break_reason", "0/0", {}, older(reason, *frames)))
    (found,) = log.breaks.values()
    assert found.reason.startswith("Data-dependent branching: ")
    assert "torch.cond" in found.hint
    assert found.frames == {("/models/net.py", "outer"), ("/models/net.py", "f")}


def test_a_break_that_an_optimizer_of_pytorch_2_6_asks_for_is_not_the_users() -> None:
    asked = "Unsupported: 'skip function graph_break in file /site/torch/_dynamo/decorators.py'"
    assert read_break(older(asked, "/models/net.py:f", f"{torch.__path__[0]}/optim/optimizer.py:_use_grad")) is None
    found = read_break(older(asked, "/models/net.py:f"))
    assert found is not None
    assert found.reason == "Call to `torch._dynamo.graph_break()`"


@given(st.text())
def test_no_text_of_a_break_is_too_odd_to_be_read(text: str) -> None:
    assert read_break(text).times == 1


def metrics(compile_id: str, **fields: object) -> TraceRecord:
    known = {"co_name": "f", "co_filename": "/models/net.py", "co_firstlineno": 3, "has_guarded_code": True}
    return TraceRecord("compilation_metrics", compile_id, {**known, "graph_op_count": 2, **fields}, "")


def test_a_frame_that_hits_the_limit_is_known_by_its_earlier_compilations() -> None:
    log = CompileLog()
    log(metrics("5/0"))
    limit = "Dynamo recompile limit exceeded\n  Explanation: ..."
    log(metrics("5/8", fail_reason=limit, fail_type="Unsupported", co_name=None, recompile_reason="5/7: self.i == 7"))
    (failure,) = log.failures
    assert failure.cause == "recompile limit"
    assert failure.code == ("/models/net.py", "f", 3)
    assert "self.i == 7" in failure.reason


def test_a_frame_that_hits_the_limit_without_metrics_is_known_at_the_end() -> None:
    log = CompileLog()
    log(metrics("5/0"))
    log(TraceRecord("recompile_reasons", "5/8", {}, "[\"5/7: L['self'].i == 7\"]"))
    assert log.failures == []
    for _ in range(2):
        log.end()
        (failure,) = log.failures
    assert (failure.cause, failure.code) == ("recompile limit", ("/models/net.py", "f", 3))
    assert "self.i == 7" in failure.reason


def test_a_frame_that_failed_softly_is_a_break_and_one_that_failed_hard_is_not() -> None:
    log = CompileLog()
    log(metrics("0/0", fail_type="Unsupported", fail_reason="Attempt to trace generator\n  Explanation: no."))
    log(metrics("1/0", fail_type="BackendCompilerFailed", fail_reason="boom"))
    assert [found.reason for found in log.breaks.values()] == ["Attempt to trace generator: no."]
    assert [failure.cause for failure in log.failures] == ["graph break", "backend error"]
    assert log.graphs == []


def test_cached_results_are_counted_with_their_keys() -> None:
    log = CompileLog()
    for name in ("fx_graph_cache_hit", "fx_graph_cache_miss", "aotautograd_cache_hit", "aotautograd_cache_bypass"):
        log(TraceRecord(name, "0/0", {}, json.dumps({"key": name})))
    assert log.caches == {
        "FX graph cache hits": 1,
        "FX graph cache misses": 1,
        "AOTAutograd cache hits": 1,
        "AOTAutograd cache bypassed": 1,
    }
    assert log.hits == ["fx_graph_cache_hit", "aotautograd_cache_hit"]


@pytest.mark.parametrize("local", ["x", "L['x']"], ids=["2.13", "2.6"])
@pytest.mark.parametrize(("size", "alone"), [(1, True), (0, True), (5000, False)])
def test_a_size_of_one_is_told_from_one_beyond_the_limit_of_the_code(local: str, size: int, alone: bool) -> None:
    static = f"0/0: tensor '{local}' size mismatch at index 0. expected 8, actual {size}"
    guards = read_guards(json.dumps([f"0/1: 2 <= {local}.size()[0] <= 4096", static]))
    assert (guards[0].families.isdisjoint(guards[1].families)) is alone
    assert guards[0].text == "2 <= x.size()[0] <= 4096"
