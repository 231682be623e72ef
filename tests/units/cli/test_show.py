"""`ampcheck show`: what a run says of its findings, one of them, a module, an op and an arm; `ampcheck guide`."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from runs import HOSTILE_RUN, RUNS

import ampcheck
from ampcheck.checks import REGISTRY, VERDICTS
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.range.headroom import CHECK as HEADROOM
from ampcheck.checks.range.nonfinite_gradient import CHECK as GRADIENT
from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.cli.main import _parser, main
from ampcheck.cli.show import Question
from ampcheck.core.arm import Arm, armed
from ampcheck.core.excerpt import Excerpt
from ampcheck.core.json_files import tag_nonfinite
from ampcheck.core.run import Coverage, ModelMap, Run, Site, Table, Verdict, Where
from ampcheck.core.settings import Target
from ampcheck.tools.sweep.results import AUDIT, Result, ResultFolder, Task

HALF, BRAIN = (armed("m.py:net", Arm(dtype, "eager")) for dtype in ("float16", "bfloat16"))
AT = Where("forward", "blocks.0.ffn", "aten::mul.Tensor", "m.py", 7)
FAILED = replace(
    OVERFLOW.fail(HALF, "results must be finite; 3 are inf", where=AT, observed=3.0, limit=0.0, hint="scale it down"),
    excerpt=Excerpt(("y = a * b",), 7, 7, 4, 9),
    reproduce="ampcheck audit m.py:net --select overflow",
)
FOLLOWS = replace(GRADIENT.fail(HALF, "gradients must be finite", where=Where("backward", "head")), cause=FAILED.key)
WARNED = HEADROOM.warn(BRAIN, "near the end", where=Where("forward", "", "aten::exp", "m.py", 3))
UNPLACED = COVERAGE.incomplete("m.py:net", "no step ran", hint="let it step")
PASSED, SKIPPED = OVERFLOW.passed(BRAIN, "finite", 3), HEADROOM.skip(HALF, "nothing grew")
SITES = (
    Site(
        "forward", "blocks.0.ffn", "aten::mul.Tensor", "m.py", 7, "float16", amax=math.inf, nonfinite=3, lost="overflow"
    ),
    Site("forward", "", "aten::exp", "m.py", 3, "float16", amax=9.0),
)
TABLE = Table("Ops", ("module", "op", "amax"), (("blocks.0.ffn", "aten::mul.Tensor", 5.0), ("head", "aten::mm", 1.0)))
RUN = Run(
    {"torch": "2.13"},
    (PASSED, SKIPPED, WARNED, FOLLOWS, FAILED, UNPLACED),
    Coverage({"ops": 12}, {"a C++ extension": 2}),
    (TABLE, replace(TABLE, title=f"Compiled: {BRAIN}")),
    title="audit of m.py:net",
    maps=(ModelMap(HALF, SITES),),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    RUN.save("run.json")
    return tmp_path


def shown(capfd: pytest.CaptureFixture[str], *words: str, run: str = "run.json") -> str:
    code = main(["show", run, *words])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    return out


def test_a_run_is_its_verdict_counts_and_a_line_for_each_finding(folder: Path, capfd) -> None:
    lines = shown(capfd).splitlines()
    assert lines[0] == "audit of m.py:net: 2 failed, 1 warning, 1 incomplete, 1 skipped, 1 passed"
    row = next(line for line in lines if line.startswith("overflow "))
    assert [word for word in row.split() if word != "·"] == ["overflow", "pass", "FAIL"]
    assert "looked at: 12 ops" in lines
    assert "not seen: a C++ extension (2)" in lines
    assert lines[-4:] == [
        "1 FAIL overflow [float16, eager, m.py:7, blocks.0.ffn]: results must be finite; 3 are inf",
        "2 WARN headroom [bfloat16, eager, m.py:3]: near the end",
        "3 INCOMPLETE coverage: no step ran",
        "in full: ampcheck show run.json finding 1",
    ]


def test_a_finding_has_evidence_what_follows_fix_command_and_how_to_accept_it(folder: Path, capfd) -> None:
    out = shown(capfd, "finding", "1")
    for text in (
        "FAIL overflow: m.py:net [float16, eager]",
        "results must be finite; 3 are inf",
        "where: forward, blocks.0.ffn, aten::mul.Tensor, m.py:7",
        "7 | y = a * b",
        "^^^^^",
        "observed: 3, limit: 0",
        "hint: scale it down",
        "reproduce: ampcheck audit m.py:net --select overflow",
        "it explains:",
        "FAIL nonfinite-gradient",
        f"how to fix it: {OVERFLOW.fix[:40]}",
        "to accept it: # ampcheck: ignore[overflow] REASON, in or above m.py:7",
    ):
        assert text in out
    assert "headroom" not in out


def test_a_finding_without_a_line_is_accepted_by_the_baseline(folder: Path, capfd) -> None:
    command = shown(capfd, "finding", "3").strip().splitlines()[-1].partition(": ")[2]
    assert _parser().parse_args(shlex.split(command)[1:]).runs == ["run.json"]
    replace(RUN, findings=(replace(FAILED, verdict=Verdict.ACCEPTED, accepted="by a comment"),)).save("run.json")
    assert "accepted by a comment" in shown(capfd, "finding", "1")


def test_one_cause_in_several_arms_is_one_finding_and_an_arm_shows_its_own(folder: Path, capfd) -> None:
    other = replace(FAILED, subject=BRAIN, arm=Arm("bfloat16", "eager"), message="results must be finite; 1 is inf")
    replace(RUN, findings=(FAILED, other)).save("run.json")
    assert "1 FAIL overflow [float16 and bfloat16, eager, m.py:7" in shown(capfd)
    assert "1 is inf" in shown(capfd, "finding", "1")
    assert "1 FAIL overflow [bfloat16, eager, m.py:7, blocks.0.ffn]: results must be finite; 1 is inf" in shown(
        capfd, "arm", "bfloat16"
    )


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["module", "blocks.0.ffn"], ["1"]),
        (["module", "ffn"], ["1"]),
        (["module", "blocks"], ["1"]),
        (["module", "(root)"], ["2"]),
        (["module", ""], ["2"]),
        (["module", "head"], ["1"]),  # by what follows from it
        (["op", "mul"], ["1"]),
        (["op", "aten::mul.Tensor"], ["1"]),
        (["op", "mul.Tensor"], ["1"]),
        (["op", "exp"], ["2"]),
        (["arm", "bfloat16"], ["2"]),
        (["arm", "float16", "eager"], ["1"]),
        (["arm", "float16, eager", "op", "mul"], ["1"]),
        (["arm", "bfloat16", "op", "mul"], []),
        (["check", "headroom"], ["2"]),
        (["arm", "eager"], ["1", "2"]),
    ],
)
def test_findings_of_a_place_and_an_arm_keep_their_numbers(folder: Path, capfd, words, numbers) -> None:
    out = shown(capfd, *words)
    assert re.findall(r"^(\d+) [A-Z]", out, re.MULTILINE) == numbers
    assert ("nothing to mend: " in out) == (not numbers)
    assert [str(finding["number"]) for finding in json.loads(shown(capfd, *words, "--json"))["findings"]] == numbers


def test_a_module_has_the_values_and_rows_that_the_run_holds_of_it(folder: Path, capfd) -> None:
    out = shown(capfd, "module", "ffn")
    assert f"Values: {HALF}" in out
    assert (
        "module blocks.0.ffn; op aten::mul.Tensor; file m.py; line 7; dtype float16; amax inf; nonfinite 3; lost" in out
    )
    assert out.count("module blocks.0.ffn; op aten::mul.Tensor; amax 5") == 2
    assert "aten::exp" not in out
    assert "aten::mm" not in out
    assert "Compiled" not in shown(capfd, "module", "ffn", "arm", "float16")
    assert "Values" not in shown(capfd, "op", "mul", "arm", "bfloat16")
    assert "aten::mm" in shown(capfd, "module", "head", "op", "mm")


def test_what_only_passed_at_a_place_is_no_silence(folder: Path, capfd) -> None:
    replace(RUN, findings=(replace(PASSED, where=AT), FAILED)).save("run.json")
    assert "nothing to mend: pass 1" in shown(capfd, "module", "ffn", "arm", "bfloat16")


def test_long_answers_are_cut_and_say_by_how_much(folder: Path, capfd) -> None:
    many = tuple(replace(WARNED, where=replace(WARNED.where, line=line)) for line in range(60))
    rows = [("head", "aten::mm", float(number)) for number in range(30)]
    replace(RUN, findings=many, tables=(replace(TABLE, rows=rows),)).save("run.json")
    assert "20 more: check, module, op and arm choose among them, --json has all" in shown(capfd)
    assert "20 more: --json has all" in shown(capfd, "module", "head")
    answer = json.loads(shown(capfd, "module", "head", "--json"))
    assert len(answer["evidence"][0]["rows"]) == 30
    assert len(json.loads(shown(capfd, "--json"))["findings"]) == 60


def test_the_answer_as_data_is_strict_json_with_all_of_a_finding(folder: Path, capfd) -> None:
    answer = json.loads(shown(capfd, "module", "ffn", "--json"), parse_constant=pytest.fail)
    assert answer["counts"] == {"fail": 2, "warn": 1, "incomplete": 1, "skip": 1, "pass": 1}
    (finding,) = answer["findings"]
    assert finding["number"] == 1
    assert finding["where"]["line"] == 7
    assert finding["arms"] == ["float16, eager"]
    assert [follower["check"] for follower in finding["explains"]] == ["nonfinite-gradient"]
    assert finding["accept"].startswith("to accept it: # ampcheck: ignore[overflow]")
    values = answer["evidence"][0]
    assert values["rows"][0][values["columns"].index("amax")] == {"float": "inf"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["finding", "4"], "run.json has no finding '4'; it has 1, 2, 3"),
        (["finding", "one"], "run.json has no finding 'one'"),
        (["finding"], "finding needs a value: finding N"),
        (["module", "blocks.0.fnn"], "run.json has no module 'blocks.0.fnn'; did you mean blocks.0.ffn?"),
        (["module", "decoder"], "run.json has no module 'decoder'; it has "),
        (["op", "mull"], "run.json has no op 'mull'; did you mean mul?"),
        (["arm", "flaot16"], "run.json has no arm 'flaot16'; did you mean float16?"),
        (["arm", "eager", "compield"], "run.json has no arm 'compield'"),
        (["check", "overfow"], "run.json has no check 'overfow'; did you mean overflow?"),
        (["modul", "ffn"], "found 'modul', did you mean module?"),
        (["overflow"], "found 'overflow', it is a check: ask for check overflow"),
        (["1"], "found '1', it is a finding: ask for finding 1"),
        (["finding", "overflow"], "run.json has no finding 'overflow'; it is a check: ask for check overflow"),
        (
            ["check", "blocks.0.ffn"],
            "run.json has no check 'blocks.0.ffn'; it is a module: ask for module blocks.0.ffn",
        ),
        (["check", "exp"], "run.json has no check 'exp'; it is an op: ask for op exp"),
        (["finding", "1", "arm", "eager"], "finding 1 is one finding: leave out what else chooses"),
        (["finding", "1", "2"], "found '2', a word more than it takes"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_unknown_name_is_answered_with_the_nearest(folder: Path, capfd, words, said, form) -> None:
    assert main(["show", "run.json", *words, *form]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no run of ampcheck could be read from other.json: there is no such file"),
        ("", "no run of ampcheck could be read from other.json: it is no JSON, or not all of it: Expecting value"),
        (json.dumps(RUN.to_json())[:900], "from other.json: it is no JSON, or not all of it: "),
        ("\udcff", "no run of ampcheck could be read from other.json: it is no text in UTF-8"),
        ("{}", "other.json: this is no run of ampcheck"),
        ("[1, 2]", "other.json: this is no run of ampcheck"),
        (json.dumps({**RUN.to_json(), "schema": 99}), "has schema 99, newer than this ampcheck reads"),
        (json.dumps({"schema": 2, "findings": []}), "other.json: this run of ampcheck is damaged"),
        (
            json.dumps(Run(title="audit").to_json()),
            "other.json is a run without findings to show; it looked at nothing",
        ),
    ],
)
def test_a_file_that_answers_nothing_is_one_sentence(folder: Path, capfd, text, said) -> None:
    if text is not None:
        Path("other.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    assert main(["show", "other.json", "finding", "1"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_folder_is_the_sweep_in_it(folder: Path, capfd) -> None:
    task, results = Task(AUDIT, Target("m.py:net")), ResultFolder("swept")
    results.begin([(task, "")], shared=False)
    results.save(task, Result(AUDIT, "m.py:net", RUN))
    assert "sweep of 1 target, 1 failed" in shown(capfd, run="swept")
    assert shown(capfd, "finding", "1", run="swept").startswith("FAIL overflow: m.py:net [float16, eager]")
    Path("empty").mkdir()
    for name, said in {
        "empty": "empty has no sweep: there is no sweep.manifest in it",
        "": "from an empty name",
    }.items():
        assert main(["show", name]) == 2
        assert said in capfd.readouterr().err


def test_what_is_required_is_the_run_alone(folder: Path, capfd) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["show"])
    assert capfd.readouterr().err.endswith("the following arguments are required: RUN.json\n")


def test_a_run_of_the_first_schema_is_read(folder: Path, capfd) -> None:
    plain = RUN.to_json()
    old = [{k: v for k, v in f.items() if k not in ("arm", "kind", "names")} for f in plain["findings"]]
    Path("old.json").write_text(json.dumps({**plain, "schema": 1, "findings": old}), encoding="utf-8")
    assert shown(capfd, run="old.json").replace("old.json", "run.json") == shown(capfd)


def test_several_subjects_are_named(folder: Path, capfd) -> None:
    other = replace(FAILED, subject=armed("n.py:net", Arm("float16", "eager")), message="too large")
    replace(RUN, findings=(FAILED, other)).save("run.json")
    out = shown(capfd)
    assert "1 FAIL overflow [m.py:net [float16, eager], m.py:7, blocks.0.ffn]: results" in out
    assert "2 FAIL overflow [n.py:net [float16, eager], m.py:7, blocks.0.ffn]: too large" in out


def is_safe(lines: list[str]) -> bool:
    return not [
        line for line in lines if line.lstrip().startswith("::") or re.search("[\x00-\x08\x0b-\x1f\u202e]", line)
    ]


@given(RUNS, st.integers(20, 160))
@example(HOSTILE_RUN, 80)
def test_any_run_is_answered_in_lines_that_control_nothing(run: Run, width: int) -> None:
    question = Question("run.json", run, {})
    assert is_safe(list(question.lines(width)))
    numbered = question.numbered()
    for number in numbered:
        asked = Question("run.json", run, {"finding": [str(number)]})
        asked.require_answer()
        assert is_safe(list(asked.lines(width)))
    for finding in run.findings:
        for kind, value in (("module", finding.where.module), ("op", finding.where.op), ("check", finding.check)):
            at = Question("run.json", run, {kind: [value]})
            assert is_safe(list(at.lines(width)))
            json.dumps(tag_nonfinite(at.as_json()), allow_nan=False)
    shown_once = [id(twin) for cause in numbered.values() for twin in cause.twins]
    assert len(shown_once) == len(set(shown_once))


def test_a_name_of_any_length_takes_no_time(folder: Path, capfd) -> None:
    replace(RUN, tables=(replace(TABLE, rows=[("x." * 50_000, "aten::mul", 1.0)]),)).save("run.json")
    assert "x.x.x" in shown(capfd, "op", "mul")


def test_it_reads_what_audit_lint_and_watch_write(folder: Path, capfd) -> None:
    source = "import torch\nclass M(torch.nn.Module):\n def forward(self, x): return (x * 60).exp()\n"
    Path("big.py").write_text(f"{source}def net(): return M(), torch.ones(4)\nscaler = torch.cuda.amp.GradScaler()\n")
    assert main(["audit", "big.py:net", "--fast", "--dtype", "float16", "--json", "audit.json", "-q"]) in (1, 2)
    assert main(["lint", "big.py", "--json", "lint.json"]) == 1
    capfd.readouterr()
    assert "how to fix it: " in shown(capfd, "finding", "1", run="lint.json")
    assert "AMP101" in shown(capfd, run="lint.json")
    with ampcheck.watch(fail_on="never") as seen:
        kept = torch.full((4,), 300.0, dtype=torch.float16).square()
    seen.run.save("watch.json")
    capfd.readouterr()
    assert re.search(r"^1 FAIL overflow \[.*test_show\.py:\d+", shown(capfd, run="watch.json"), re.MULTILINE), kept


def test_torch_is_not_imported(folder: Path) -> None:
    program = (
        "import sys; from ampcheck.cli.main import main; codes = [main(['show', 'run.json', 'finding', '1']), "
        "main(['guide'])]; sys.exit(codes != [0, 0] or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


# The guide -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def guide(capfd: pytest.CaptureFixture[str]) -> str:
    assert main(["guide"]) == 0
    return capfd.readouterr().out


def test_the_guide_is_short_and_without_what_is_for_tests(guide: str) -> None:
    assert len(guide.splitlines()) < 120
    assert "<!--" not in guide
    assert guide.startswith("# ampcheck")


def test_the_guide_names_checks_and_verdicts_that_there_are(guide: str) -> None:
    rows = guide.partition("## Mend by class")[2].partition("## Do not")[0]
    named = [name for row in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]
    assert len(named) > 20
    assert [pattern for pattern in named if not any(fnmatchcase(check, pattern) for check in REGISTRY)] == []
    assert [name for name in VERDICTS if f"**{name}**" not in guide] == ["accepted"]


def commands_in_text(guide: str) -> list[str]:
    """The commands outside of blocks, which tests/contract/docs runs, with real names in place of placeholders."""
    text = re.sub(r"```.*?```", "", guide, flags=re.DOTALL)
    named = [code for code in re.findall(r"`([^`\n]+)`", text) if code.startswith(("ampcheck ", "pytest "))]
    places = {"FILE.py:FUNCTION": "subject.py:scores", "PATHS": "subject.py", "A.py:f": "subject.py:scores"}
    places["B.py:g"] = "subject.py:scores"
    for place, name in places.items():
        named = [command.replace(place, name) for command in named]
    return named


def test_the_commands_of_the_guide_have_their_options(guide: str) -> None:
    commands = [shlex.split(command) for command in commands_in_text(guide)]
    assert len(commands) >= 7
    for program, *words in commands:
        if program == "ampcheck":
            assert _parser().parse_args(words).command is not None


def test_the_commands_of_the_guide_run(guide: str, tmp_path: Path) -> None:
    file = re.search(r'```python title="subject.py"\n(.*?)```', guide, re.DOTALL)
    assert file is not None
    (tmp_path / "subject.py").write_text(file[1], encoding="utf-8")
    (tmp_path / "test_it.py").write_text(
        "def test_it():\n    import torch\n    torch.ones(2).sum()\n", encoding="utf-8"
    )
    for command in dict.fromkeys(commands_in_text(guide)):
        if "transformers:" in command and find_spec("transformers") is None:
            continue
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode in (0, 1), f"{command}\n{done.stdout}{done.stderr}"


def test_a_run_of_lint_without_reports_says_what_it_read(folder: Path, capfd) -> None:
    Path("sound.py").write_text("import torch\n", encoding="utf-8")
    assert main(["lint", "sound.py", "--no-cache", "--json", "lint.json"]) == 0
    capfd.readouterr()
    lines = shown(capfd, run="lint.json").splitlines()
    assert lines[0].startswith("lint of sound.py: ")
    assert lines[-2:] == ["looked at: 1 file, 15 rules", "nothing to mend: no finding names it"]
    assert main(["show", "lint.json", "finding", "1"]) == 2
