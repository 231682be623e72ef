"""What is promised of log-probabilities per token: the share of each difference that rounding explains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.pairs import draw

from ampcheck import UsageError, assert_parity
from ampcheck.cli.main import main
from ampcheck.core.run import Table
from ampcheck.parity.assert_parity import sides_of
from ampcheck.parity.compare import compare
from ampcheck.parity.tokens import Tokens

HIDDEN, HEAD = draw(40, 64), draw(64, 50, seed=1, scale=0.3)
IDS = torch.arange(40) % 50


def logprobs(x: Any, dtype: torch.dtype = torch.bfloat16, temperature: float = 1.0) -> Any:
    logits = (x.to(dtype) @ HEAD.to(dtype)).float() / temperature
    return {"logprobs": logits.log_softmax(-1).gather(-1, IDS[:, None])[:, 0].view(4, 10)}


def tokens_of(b: Any) -> Table:
    (table,) = compare(*sides_of(logprobs, b, (HIDDEN,)), tokens=Tokens("logprobs")).tables
    return table


def test_of_an_honest_pair_rounding_explains_the_whole_difference() -> None:
    run = assert_parity(logprobs, lambda x: logprobs(x, torch.float32), (HIDDEN,), tokens="logprobs")
    table = run.tables[0]
    assert (table.title, len(table.rows)) == ("Log-probabilities per token", 12)
    assert table.columns[:5] == ("token", "a", "b", "difference", "share of rounding")
    assert "rounding explains 1 of the difference; 0 beyond their bounds" in table.note
    assert table.note in run.findings[0].message
    apart = [abs(float(row[3])) for row in table.rows]  # type: ignore[arg-type]
    assert apart == sorted(apart, reverse=True)


def test_of_another_function_rounding_explains_little() -> None:
    table = tokens_of(lambda x: logprobs(x, torch.float32, temperature=1.5))
    assert max(float(row[4]) for row in table.rows) < 0.1  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"40 tokens differ by up to .*; rounding explains 0.0"):
        assert_parity(logprobs, lambda x: logprobs(x, temperature=1.5), (HIDDEN,), tokens="logprobs")


@pytest.mark.parametrize("clip", [0.001, 0.2])
def test_ratios_of_probabilities_outside_of_the_band_are_counted_and_those_by_rounding(clip: float) -> None:
    def wide(x: Any) -> Any:
        return logprobs(x, torch.float32)

    ratios = (wide(HIDDEN)["logprobs"] - logprobs(HIDDEN)["logprobs"]).exp()
    share = float(((ratios - 1).abs() > clip).double().mean())
    assert (share > 0) is (clip < 0.2)
    run = assert_parity(logprobs, wide, (HIDDEN,), tokens=Tokens("logprobs", clip))
    text = f"{share:.2%} have a ratio of probabilities outside of 1 ± {clip:g}, {share:.2%} by rounding alone"
    assert text in run.tables[0].note
    other = tokens_of(lambda x: logprobs(x, torch.float32, temperature=1.5))
    assert "outside of 1 ± 0.2, 0.00% by rounding alone" in other.note


def test_a_clip_is_a_number_above_zero() -> None:
    with pytest.raises(UsageError, match="clip of Tokens must be a finite number above 0; found 0"):
        Tokens("logprobs", clip=0)


def test_a_token_that_is_lost_is_beyond_and_comes_first() -> None:
    def lost(x: Any) -> Any:
        values = logprobs(x)["logprobs"]
        values.data[2, 3] = -60.0  # past the shadow
        return {"logprobs": values}

    assert [row[0] for row in tokens_of(lost).rows if row[-1]] == ["2, 3"]
    with pytest.raises(AssertionError, match="1 beyond their bounds"):
        assert_parity(logprobs, lost, (HIDDEN,), tokens="logprobs")


def test_tokens_name_an_output() -> None:
    with pytest.raises(UsageError, match="tokens must be the path of an output of log-probabilities: 'logprobs'"):
        assert_parity(logprobs, logprobs, (HIDDEN,), tokens="")
    with pytest.raises(UsageError, match=r"log-probabilities: none; found '', which is int64$"):
        assert_parity(lambda x: x.argmax(-1), lambda x: x.argmax(-1), (HIDDEN,), tokens="")


SIDES = """
import torch

def side(dtype):
    torch.manual_seed(0)
    head = torch.randn(16, 20).bfloat16()
    return lambda x: (x.to(dtype) @ head.to(dtype)).float().log_softmax(-1)[:, 3], (torch.randn(30, 16).bfloat16(),)

def trainer(): return side(torch.float32)
def engine(): return side(torch.bfloat16)
"""


def test_a_trainer_and_an_engine_are_compared_token_by_token_by_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sides.py").write_text(SIDES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("trainer", "engine"):
        assert main(["record", f"sides.py:{name}", "-o", f"{name}.npz"]) == 0
    assert main(["parity", "trainer.npz", "engine.npz", "--tokens"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Log-probabilities per token" in shown
    assert "30 tokens differ by up to" in shown
    assert "Results of both sides" not in shown
