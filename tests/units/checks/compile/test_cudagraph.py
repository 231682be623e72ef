"""The check cudagraph, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.records.graphs import RunError
from checks.compile.records import CLEAN, failed, found


@pytest.mark.parametrize(
    ("asks", "device", "skips", "verdict"),
    [
        ("", "cuda", {}, None),
        ("", "cuda", {"cpu device": 1}, "skip"),
        ("mode='reduce-overhead'", "cpu", {"cpu device": 1}, "skip"),
        ("mode='reduce-overhead'", "cuda", {}, "pass"),
        ("mode='reduce-overhead'", "cuda:1", {"mutated inputs": 2}, "fail"),
        ("triton.cudagraphs", "cuda", {"mutated inputs": 2}, "fail"),
        ("mode='max-autotune'", "cuda", {"mutated inputs": 2}, "warn"),
        ("", "cuda", {"mutated inputs": 2}, "warn"),
        ("", "cpu", {"no reason given": 1}, "skip"),
    ],
)
def test_cuda_graphs_that_were_asked_for_are_used(
    asks: str, device: str, skips: dict[str, int], verdict: str | None
) -> None:
    findings = found(replace(CLEAN, wants_cudagraphs=asks, device=device, skips=skips), "cudagraph")
    assert [f.verdict.value for f in findings] == ([verdict] if verdict else [])
    assert not skips or verdict in (None, "skip") or "mutated inputs (2)" in findings[0].message


def test_an_output_that_was_overwritten_is_found() -> None:
    text = "RuntimeError: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run"
    stats = replace(CLEAN, error=RunError(text, "RuntimeError"))
    assert failed(stats) == ["cudagraph"]
    assert "mark_step_begin" in found(stats, "cudagraph")[0].hint
