"""Promise: the published schema of runs describes what ampcheck writes and reads, no more and no less.

After a change of the dataclasses, `PYTHONPATH=tests python tests/contract/test_run_schema.py` writes the schema again;
new fields then need descriptions, which are written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import example, given
from jsonschema import Draft202012Validator
from runs import HOSTILE_RUN, RUNS
from sample_run import sample_run

from ampcheck.core import run as records
from ampcheck.core.charts import AXES, KINDS, SCALES, Chart
from ampcheck.core.errors import UsageError
from ampcheck.core.run import SCHEMA, Finding, Run, Scalar, Verdict

FILE = Path(records.__file__).with_name("run.schema.json")
PUBLISHED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(PUBLISHED)
CHOICES = {
    (Chart, "kind"): KINDS,
    (Chart, "scale"): SCALES,
    (Chart, "x_scale"): AXES,
    (Chart, "y_scale"): AXES,
}


# Drift ---------------------------------------------------------------------------------------------------------------


def described(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a dataclass as its annotations have it; those of dataclasses inside go to `definitions`."""
    hints = get_type_hints(kind)
    properties = {
        field.name: {"enum": list(CHOICES[kind, field.name])}
        if (kind, field.name) in CHOICES
        else of_hint(hints[field.name], definitions)
        for field in fields(kind)
    }
    has_default = {f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING}
    required = [name for name in properties if name not in has_default or name in records._ALWAYS]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def of_hint(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint == Scalar:
        return {"$ref": "#/$defs/scalar"}
    if hint is float:
        return {"$ref": "#/$defs/number"}
    if origin in (Union, UnionType):
        return {"anyOf": [of_hint(argument, definitions) for argument in arguments]}
    if is_dataclass(hint):
        definitions[hint.__name__] = described(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        definitions[hint.__name__] = {"enum": [member.value for member in hint]}
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        value = of_hint(arguments[1], definitions)
        return {"type": "object", "additionalProperties": {**value, "minimum": 0} if arguments[1] is int else value}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": of_hint(arguments[0], definitions)}
    return {"type": {str: "string", int: "integer", bool: "boolean", NoneType: "null"}[hint]}


def expected() -> dict[str, Any]:
    """The published schema without its descriptions."""
    nonfinite = {"$ref": "#/$defs/nonfinite"}
    definitions: dict[str, Any] = {
        "nonfinite": {
            "type": "object",
            "properties": {"float": {"enum": ["nan", "inf", "-inf"]}},
            "required": ["float"],
            "additionalProperties": False,
        },
        "number": {"anyOf": [{"type": "number"}, nonfinite]},
        "scalar": {"anyOf": [{"type": ["string", "number", "boolean", "null"]}, nonfinite]},
    }
    schema = described(Run, definitions)
    return {
        "$schema": Draft202012Validator.META_SCHEMA["$id"],
        "$id": f"urn:ampcheck:run:{SCHEMA}",
        **schema,
        "properties": {"schema": {"const": SCHEMA}, **schema["properties"]},
        "required": ["schema", *schema["required"]],
        "$defs": definitions,
    }


def with_descriptions(schema: Any, published: Any) -> Any:
    """`schema` with the descriptions that `published` has at the same places."""
    if not isinstance(schema, dict) or not isinstance(published, dict):
        return schema
    text = {"description": published["description"]} if isinstance(published.get("description"), str) else {}
    return {**text, **{name: with_descriptions(part, published.get(name)) for name, part in schema.items()}}


def without_descriptions(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            k: without_descriptions(v) for k, v in schema.items() if not (k == "description" and isinstance(v, str))
        }
    return [without_descriptions(item) for item in schema] if isinstance(schema, list) else schema


def test_the_schema_follows_the_dataclasses() -> None:
    assert without_descriptions(PUBLISHED) == expected()


def test_the_schema_is_a_schema_and_describes_each_record() -> None:
    Draft202012Validator.check_schema(PUBLISHED)
    assert all(definition["description"] for definition in PUBLISHED["$defs"].values())
    assert all(field["description"] for field in PUBLISHED["$defs"]["Finding"]["properties"].values())


# Runs ----------------------------------------------------------------------------------------------------------------


@given(run=RUNS)
@example(run=Run())
@example(run=HOSTILE_RUN)
@example(run=sample_run())
def test_what_is_written_is_valid(run: Run) -> None:
    data = json.loads(json.dumps(run.to_json(), allow_nan=False))
    assert sorted(VALIDATOR.iter_errors(data), key=str) == []


def test_every_field_of_a_finding_is_covered_by_the_runs_of_these_tests() -> None:
    data = Run(findings=(Finding("overflow", Verdict.FAIL, "m", "x"),)).to_json()
    assert data["findings"][0].keys() == PUBLISHED["$defs"]["Finding"]["properties"].keys()


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 3},
        {"schema": None},
        {"findings": [{}]},
        {"findings": 3},
        {"title": 3},
        {"unknown": 1},
        {"environment": {"torch": ["2.13"]}},
        {"environment": {"share": {"float": "much"}}},
        {"coverage": {"seen": {"ops": -1}, "unseen": {}}},
        {"charts": [{"kind": "pie", "title": "", "x_label": "", "series": [], "bands": []}]},
    ],
    ids=str,
)
def test_what_the_schema_rejects_ampcheck_does_not_read(change: dict[str, Any]) -> None:
    data = {**sample_run().to_json(), **change}
    assert not VALIDATOR.is_valid(data)
    with pytest.raises(UsageError):
        Run.from_json(data)


if __name__ == "__main__":
    FILE.write_text(json.dumps(with_descriptions(expected(), PUBLISHED), indent=2) + "\n", encoding="utf-8")
