"""Promise: one cause is one finding with all its arms, in the user's words, and what does not apply takes one line."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import ampcheck
from ampcheck import audit
from ampcheck.checks.causes import with_causes
from ampcheck.core.arm import Arm, armed
from ampcheck.core.check import Check
from ampcheck.core.excerpt import name_at
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where
from ampcheck.report.html import render_html
from ampcheck.report.sections import arrange
from ampcheck.report.terminal import summary_lines

PLACE = Where("forward", "ffn", "aten::mul.Tensor", "m.py", 3)
CHECK = Check("overflow", "range", "")
HALF = CHECK.fail(armed("net", Arm("float16", "eager")), "41 became inf in float16", where=PLACE)
BRAIN = CHECK.fail(armed("net", Arm("bfloat16", "eager")), "2 became inf in bfloat16", where=PLACE)
SEEN = Coverage({"ops": 3})


def text_of(*findings: Finding, verbose: bool = False) -> str:
    run = Run(findings=with_causes(findings), coverage=SEEN)
    return "\n".join(summary_lines(run, width=100, verbose=verbose))


def test_a_failure_in_two_dtypes_is_shown_once_with_both() -> None:
    text = text_of(HALF, BRAIN)
    assert text.count("FAIL overflow") == 1
    assert "FAIL overflow: net [float16 and bfloat16, eager]" in text
    assert "2 failed" in text  # the verdicts of both arms count
    assert BRAIN.message in text_of(HALF, BRAIN, verbose=True)
    assert str(Run(findings=(HALF, BRAIN))).count("[overflow]") == 1


def test_arms_that_differ_in_more_than_one_word_are_listed() -> None:
    compiled = CHECK.fail(armed("net", Arm("bfloat16", "compiled")), "2 became inf in bfloat16", where=PLACE)
    assert "net [float16, eager; bfloat16, compiled]" in text_of(HALF, compiled)


def test_other_places_other_verdicts_and_other_texts_without_a_place_stay_apart() -> None:
    elsewhere = replace(BRAIN, where=replace(PLACE, line=4))
    warned = replace(BRAIN, verdict=Verdict.WARN)
    nowhere = [replace(finding, where=Where()) for finding in (HALF, BRAIN)]
    for pair in ((HALF, elsewhere), (HALF, warned), nowhere, (HALF, replace(HALF, message="something else"))):
        assert len(arrange(Run(findings=tuple(pair))).problems) == 2


def test_two_warnings_of_one_text_are_one() -> None:
    warned = Finding("coverage", Verdict.WARN, "loop", "backward was not looked at")
    assert text_of(warned, warned).count("WARN coverage") == 1


def test_each_arm_of_a_cause_is_found_on_the_page() -> None:
    page = render_html(Run(findings=(HALF, BRAIN), coverage=SEEN))
    assert page.count('<article class="card fail"') == 1
    assert page.count('href="#finding-1"') >= 2  # the cells of both arms in the table of verdicts


def test_a_banned_op_explains_what_it_raises_and_comes_first() -> None:
    line = Where("forward", file="m.py", line=3)
    emulated = armed("net", Arm("float16", "eager", "cuda"))
    raised = replace(CHECK, slug="low-precision-error").fail(emulated, "it raised", where=line)
    policy = armed("net", Arm("float16", "policy", "cuda"))
    banned = replace(CHECK, slug="policy-banned").fail(policy, "banned", where=replace(line, op="bce"))
    gap = replace(CHECK, slug="policy-gap").warn(policy, "another dtype on cpu", where=line)
    text = text_of(raised, banned, gap)
    assert "FAIL policy-banned" in text
    assert "FAIL low-precision-error" not in text
    assert "it explains low-precision-error, policy-gap" in text
    assert "FAIL low-precision-error" in text_of(replace(raised, where=replace(line, line=9)), banned)
    assert "FAIL low-precision-error" in text_of(replace(raised, subject="other [float16]"), banned)


def test_a_finding_says_its_arm_in_fields() -> None:
    model = nn.Linear(4, 4)
    subject = ampcheck.Subject((model, (torch.ones(2, 4),)), name="net")
    run = audit(subject, device="cuda", dtype=["float16", "bfloat16"], compile=False)
    with ampcheck.emulate("cuda"), ampcheck.watch(model, name="net") as watched:
        model(torch.ones(2, 4))
    found = [*run.findings, *watched.run.findings]
    assert {finding.name for finding in found} == {"net"}
    assert all(finding.subject == f"net [{finding.arm}]" for finding in found)
    arms = {replace(finding.arm, release="") for finding in found}
    values = [Arm("float64", device="cuda"), *(Arm(dtype, "eager", "cuda") for dtype in ("float16", "bfloat16"))]
    rules = [Arm(dtype, "policy", "cuda") for dtype in ("float16", "bfloat16")]
    assert arms == {*values, *rules, Arm(device="cuda")}
    assert {finding.arm.release for finding in found} == {".".join(torch.__version__.split(".")[:2])}


class Chain(nn.Module):
    """A cast to 8 bits that flushes, and what divides by its result later."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64) * 2e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = self.weight.float().view(32, 4, 16)
        scale = (blocks.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
        unit = torch.where(scale > 0, blocks / scale.clamp(min=1e-30), torch.zeros_like(blocks))
        nearest = (unit.detach().abs().unsqueeze(-1) - torch.arange(7.0)).abs().argmin(-1)
        back = (nearest * unit.sign() * scale).view_as(self.weight)
        return x @ (self.weight + (back - self.weight).detach()).t()


def test_the_first_fault_of_a_run_is_shown_before_those_that_follow() -> None:
    torch.manual_seed(0)
    run = audit((Chain(), (torch.randn(8, 64),)), dtype="bfloat16", compile=False)
    first, *later = arrange(run).problems
    assert first.check == "flush"
    assert later
    lines = [finding.where.line for finding in (first, *later)]
    assert lines == sorted(lines, key=lambda line: line or 0)


class OwnHalf(nn.Module):
    """Casts to float16 whatever dtype autocast has."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (self.project(x) * 300).half()
        return (wide * wide).float().square().mean()


def test_a_format_that_is_not_the_run_s_is_said_to_be_the_code_s_own() -> None:
    torch.manual_seed(0)
    own = audit((OwnHalf(), (torch.randn(8, 16) * 3,)), dtype=["bfloat16", "float16"], compile=False)
    texts = {finding.subject: finding.message for finding in own.of(Verdict.FAIL) if finding.check == "overflow"}
    (brain,) = (text for subject, text in texts.items() if "bfloat16" in subject)
    assert "the code itself casts to float16, this run is in bfloat16" in brain
    assert all("the code itself" not in text for subject, text in texts.items() if "[float16" in subject)


def test_an_op_is_called_as_the_user_wrote_it() -> None:
    assert name_at(["y = x.square().mean()\n"], 1, "aten::pow.Tensor_Scalar") == "square"
    assert name_at(["y = F.linear(x, w)\n"], 1, "aten::addmm") == "linear"
    assert name_at(["y = x.exp_()\n"], 1, "aten::exp") == ""
    assert name_at(["y = torch.square(x) + x**2\n"], 1, "aten::pow.Tensor_Scalar") == ""
    assert name_at(["y = helper(x)\n"], 1, "aten::pow.Tensor_Scalar") == ""


def test_skips_that_concern_nothing_of_the_subject_are_counted_in_one_line() -> None:
    absent = [replace(CHECK, slug=slug).absent("net", f"no {slug}") for slug in ("integer-cast", "loss-dtype")]
    text = text_of(*absent, CHECK.passed("net", "finite", 3))
    assert "2 checks do not apply (-v says why)" in text
    assert "no integer-cast" not in text
    assert "no integer-cast" in text_of(*absent, verbose=True)


def test_checks_with_one_reason_share_a_line_which_is_whole_where_there_is_room() -> None:
    reason = "the run raised before it was complete, in a sentence that is longer than a line of this terminal: see it"
    skipped = [replace(CHECK, slug=slug).skip("net", reason) for slug in ("flush", "overflow", "flush")]
    lines = text_of(*skipped, CHECK.passed("net", "finite", 3)).split("\n")
    assert " ".join(" ".join(lines).split()).count(f"skip flush ×2, overflow: {reason}") == 1
