"""The features of JSON Schema one by one: obeyed, or refused by name; never ignored.

Each row has a schema, documents that it allows and documents that it does not; `jsonschema` is asked whether that is
so. The JSON Schema Test Suite's drafts 4 to 2020-12, optional formats included, were run against the same code: of its
invalid documents only those are allowed that `jsonschema` allows too.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jsonschema
import pytest

from engine.errors import InvalidGrammar
from tests.structured_output.conftest import accepts, start


class Feature(NamedTuple):
    """A schema, and documents on both sides of it."""

    schema: dict[str, Any]
    allowed: list[Any]
    forbidden: list[Any]


OBEYED = {
    "type": Feature({"type": "integer"}, [0, -7], ["1", 1.5, None, True, [], {}]),
    "types": Feature({"type": ["string", "null"]}, ["a", None], [1, False]),
    "number": Feature({"type": "number"}, [0, -1.5, 1e30], ["1", None]),
    "enum": Feature({"enum": [1, "a", None, {"k": [1]}]}, [1, "a", None, {"k": [1]}], [2, "b", {"k": [2]}, False]),
    "const": Feature({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, {}, None]),
    "minimum": Feature({"type": "integer", "minimum": -2}, [-2, 100], [-3]),
    "exclusive bounds": Feature(
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5, 0.001], [0, 1, 1.5, -0.5]
    ),
    "multipleOf": Feature({"type": "integer", "multipleOf": 7}, [0, 49, -14], [1, 50]),
    "multipleOf a fraction": Feature({"type": "number", "multipleOf": 0.25}, [0.25, 3, 7.75], [0.3, 1.1]),
    "lengths": Feature({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é😀", "abc"], ["a", "abcd", "😀"]),
    "pattern": Feature({"type": "string", "pattern": "^a[0-9]+"}, ["a1", "a12x"], ["a", "b1", "xa1"]),
    "pattern anywhere": Feature({"type": "string", "pattern": "b{2}"}, ["abba", "bb"], ["b", "bab"]),
    "pattern of classes": Feature({"type": "string", "pattern": "^[^\\d\\s]+$"}, ["aé", "日"], ["1", "a1", ""]),
    "format date": Feature(
        {"type": "string", "format": "date"},
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2024-13-01", "x", "2021-02-29", "1900-02-29", "2024-04-31", "0000-01-01"],
    ),
    "format beside others": Feature(
        {"format": "date", "pattern": "^2", "allOf": [{"maxLength": 10}]},
        ["2024-02-29", 5],
        ["1999-12-31", "2023-02-29"],
    ),
    "format uuid": Feature(
        {"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", ""]
    ),
    "properties": Feature(
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        [{}, {"a": 1}, {"a": 1, "b": "x"}, {"z": None}],
        [{"a": "1"}, {"b": 1}],
    ),
    "required": Feature({"type": "object", "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    "additionalProperties": Feature(
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}]
    ),
    "additionalProperties of a kind": Feature(
        {"type": "object", "additionalProperties": {"type": "boolean"}}, [{"x": True}], [{"x": 1}]
    ),
    "patternProperties": Feature(
        {"type": "object", "patternProperties": {"^n_": {"type": "number"}}, "additionalProperties": False},
        [{"n_a": 1}, {}],
        [{"n_a": "x"}, {"b": 1}],
    ),
    "a property that is forbidden": Feature({"type": "object", "properties": {"a": False}}, [{}, {"b": 1}], [{"a": 1}]),
    "items": Feature({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, None]]),
    "counts of items": Feature({"type": "array", "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    "prefixItems": Feature(
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[1, "a"], [1], []],
        [["a"], [1, 2], [1, "a", 3]],
    ),
    "anyOf": Feature({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", None]),
    "oneOf": Feature({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a"]),
    "allOf": Feature({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5]),
    "$ref and $defs": Feature(
        {"$defs": {"a/b": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/a~1b"}}, [[1]], [["a"]]
    ),
    "$ref beside others": Feature({"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "minimum": 5}, [5], [4]),
    "$ref to the whole": Feature(
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        [{}, {"next": {"next": {}}}],
        [{"next": 1}, {"other": {}}],
    ),
    "definitions": Feature({"definitions": {"a": {"const": 1}}, "$ref": "#/definitions/a"}, [1], [2]),
    "$anchor": Feature(
        {"$defs": {"a": {"$anchor": "here", "type": "integer"}}, "items": {"$ref": "#here"}}, [[1], "x"], [["a"]]
    ),
    "$id": Feature({"$id": "urn:a", "$defs": {"b": {"$id": "urn:b", "const": 1}}, "$ref": "urn:b"}, [1], [2]),
    "an older draft": Feature(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "integer"}, {"$ref": "#/definitions/text", "maxLength": 1}],
            "additionalItems": {"type": "null"},
            "definitions": {"text": {"type": "string"}},
        },
        [[], [1], [1, "a"], [1, "a", None]],
        [["a"], [1, 2], [1, "a", 3]],
    ),
    "notes": Feature(
        {"type": "integer", "title": "t", "description": "d", "default": 1, "examples": [2], "$comment": "c"},
        [1],
        ["a"],
    ),
    "text with quotes": Feature({"const": 'a"\\\n😀'}, ['a"\\\n😀'], ["a"]),
}

REFUSED = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "minContains": {"type": "array", "contains": {}, "minContains": 2},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicAnchor": {"$dynamicAnchor": "x", "properties": {"a": {"$dynamicRef": "#x"}}},
    "$dynamicRef": {"$defs": {"a": {}}, "$dynamicRef": "#/$defs/a"},
    "$recursiveRef": {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "properties": {"a": {"$recursiveRef": "#"}},
    },
    "maxContains": {"type": "array", "contains": {}, "maxContains": 2},
    "lenient": {"not": {}, "x-guidance": {"lenient": True}},
    "idn-email": {"type": "string", "format": "idn-email"},
    "urn:elsewhere": {"$ref": "urn:elsewhere"},
    "nowhere": {"$ref": "#nowhere"},
    "minProperties": {"type": "object", "minProperties": 2},
    "regex": {"type": "string", "format": "regex"},
    "look-around": {"type": "string", "pattern": "^(?=a)a"},
    "nonsense": {"type": "nonsense"},
    "missing": {"$ref": "#/$defs/missing"},
}


@pytest.mark.parametrize("name", OBEYED)
def test_a_feature_is_obeyed(name: str) -> None:
    schema, allowed, forbidden = OBEYED[name]
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=jsonschema.FormatChecker(["date", "uuid"]))
    for is_allowed, documents in ((True, allowed), (False, forbidden)):
        for document in documents:
            assert validator.is_valid(document) is is_allowed, document
            assert accepts({"json": schema}, json.dumps(document, ensure_ascii=False)) is is_allowed, document


FORMATS = {  # those of which `jsonschema` alone knows nothing
    "time": (["23:59:59Z", "01:02:03.25+05:30"], ["22:59:60Z", "24:00:00Z", "1:00:00Z", "10:00:00", "10:00:00+24:00"]),
    "date-time": (["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "1998-12-31T23:58:60Z", "2024-02-29"]),
    "hostname": (
        ["a", "a-b", "example.com", "a" * 63],
        ["", "-a", "a-", "a..b", "xn--x", "a" * 64, ".".join(["a" * 63] * 4)],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_exact_also_in_a_grammar(name: str) -> None:
    for is_allowed, texts in zip((True, False), FORMATS[name], strict=True):
        for text in map(json.dumps, texts):
            schema = {"type": "string", "format": name}
            assert accepts({"json": schema}, text) is is_allowed, text
            lark = f"start: %json {json.dumps(schema, indent=1)} END\nEND: /x/"
            assert accepts({"grammar": lark}, text + "x") is is_allowed, text


@pytest.mark.parametrize("name", REFUSED)
def test_a_feature_that_is_not_obeyed_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidGrammar, match=name.replace("$", r"\$")):
        start({"json": REFUSED[name]})


def test_a_schema_inside_of_a_grammar_is_refused_likewise() -> None:
    for schema in ('{"type": "object", "minProperties": 2}', '{"items": {"type": "object", "minProperties": 3}}'):
        with pytest.raises(InvalidGrammar, match="minProperties"):
            start({"grammar": f'start: "a" %json {schema}'})
    start({"grammar": 'start: %json {"type": "object", "minProperties": 1}'})
