"""Every document that a schema's grammar allows is valid by the `jsonschema` package."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import InvalidGrammar
from tests.structured_output.conftest import accepts, start, write

NAMES = ["a", "b", "name", "é", "x y", "$ref", "properties", '"q"', "10"]
PATTERNS = ["^[a-z]+$", "ab", "^a|b$", "[0-9]{2,4}", r"^\d+$", "^(foo|bar)*$", "^[^x]*$", r"\w+@\w+", r"^\S{1,3}$"]
FORMATS = ["date", "date-time", "time", "ipv4", "uuid", "email", "ipv6"]
CONSTANTS = [1, "a", None, True, 2.5, "é", [1], {"k": 1}, "", -3, '"q"', "a\nb", 1e10]
FEATURES: list[dict[str, Any]] = [
    {"$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    {"definitions": {"p": {"minimum": 1, "type": "number"}}, "items": {"$ref": "#/definitions/p"}, "type": "array"},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"type": "array", "prefixItems": [{"const": 1}], "minItems": 2, "maxItems": 3, "items": {"type": "null"}},
    {"type": "object", "patternProperties": {"^s_": {"type": "string"}, "^i_": {"type": "integer"}}},
    {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "boolean"}}, "minProperties": 1},
    {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"], "maxProperties": 1},
    {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"const": 2}}, "required": ["b"]}]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "object", "properties": {"t": {"const": c}}, "required": ["t"]} for c in ("x", "y")]},
    {"type": ["string", "integer", "null"], "minLength": 2, "minimum": 5},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 4},
    {"type": "number", "minimum": 0.125, "maximum": 17.5, "multipleOf": 0.125},
    {"type": "integer", "multipleOf": 12},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$", "minLength": 5},
    {"enum": [{"a": [1, 2.5, "x"]}, [], "😀", None]},
    {"type": "object", "properties": {"a": True, "b": False}},
    {"items": {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "array", "maxItems": 1}]}, "type": "array"},
]


def drawn_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of the features that are compiled, some of them against each other."""

    def inner() -> dict[str, Any]:
        return drawn_schema(draw, depth + 1)

    match draw.randrange(12 if depth < 3 else 7):
        case 0:
            low, span = draw.randint(-50, 50), draw.randint(0, 500)
            return {"type": "integer", **some(draw, minimum=low, maximum=low + span, multipleOf=draw.randint(1, 7))}
        case 1:
            limits = {"minimum": draw.choice([-1.5, 0, 0.25, 3]), "exclusiveMaximum": draw.choice([4.5, 10, 100.125])}
            return {"type": "number", **some(draw, **limits, multipleOf=draw.choice([0.5, 0.25, 2]))}
        case 2:
            least = draw.randint(0, 4)
            return {"type": "string", **some(draw, minLength=least, maxLength=least + draw.randint(0, 8))}
        case 3:
            return {"type": "string", "pattern": draw.choice(PATTERNS)}
        case 4:
            return {"enum": draw.sample(CONSTANTS, draw.randint(1, 4))}
        case 5:
            return {"type": draw.choice(["boolean", "null"])}
        case 6:
            return {"type": "string", "format": draw.choice(FORMATS)}
        case 7 | 8 | 9:
            names = draw.sample(NAMES, draw.randint(0, 4))
            required = draw.sample(names, draw.randint(0, len(names)))
            more = some(
                draw, additionalProperties=draw.choice([False, True, inner()]), minProperties=draw.randint(0, 2)
            )
            return {"type": "object", "properties": {n: inner() for n in names}, "required": required, **more}
        case 10:
            least = draw.randint(0, 3)
            more = some(draw, minItems=least, maxItems=least + draw.randint(0, 3), prefixItems=[inner()])
            return {"type": "array", "items": inner(), **more}
        case _:
            return {draw.choice(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(draw.randint(1, 3))]}


def some(draw: random.Random, **keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if draw.random() < 0.4}


def assert_documents_are_valid(schema: dict[str, Any], draw: random.Random, count: int) -> int:
    """Write documents byte by byte and validate the complete ones; return how many were."""
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    num_complete = 0
    for _ in range(count):
        text, is_complete = write(start({"json": schema}, stop_token_ids=(0,)), draw)
        if is_complete:
            checker.validate(json.loads(text))
            num_complete += 1
    return num_complete


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(seed=st.integers(0, 2**32))
def test_documents_by_drawn_schemas_are_valid_or_the_schema_is_refused(seed: int) -> None:
    draw = random.Random(seed)
    schema = drawn_schema(draw)
    try:
        start({"json": schema})
    except InvalidGrammar:
        return
    assert_documents_are_valid(schema, draw, 2)


def test_most_drawn_schemas_are_compiled_and_most_documents_come_to_their_end() -> None:
    num_refused = num_complete = 0
    for seed in range(100):
        draw = random.Random(seed)
        schema = drawn_schema(draw)
        try:
            num_complete += assert_documents_are_valid(schema, draw, 1)
        except InvalidGrammar:
            num_refused += 1
    assert num_refused < 30
    assert num_complete > 0.8 * (100 - num_refused)


@pytest.mark.parametrize("schema", FEATURES, ids=[json.dumps(schema)[:60] for schema in FEATURES])
def test_documents_by_a_schema_of_each_feature_are_valid(schema: dict[str, Any]) -> None:
    assert assert_documents_are_valid(schema, random.Random(1), 6) > 0


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ({"properties": {"a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, r'{"a":1,"\u0061":"x"}'),
        ({"properties": {"é": {"type": "integer"}}}, r'{"\u00e9":"x"}'),
        ({"properties": {"\t": {"type": "integer"}}}, r'{"\u0009":"x"}'),
        ({"properties": {"a\nb": {"type": "integer"}}}, r'{"a\u000ab":"x"}'),
        ({"patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
        ({"properties": {"a": {"type": "integer"}}, "description": "bell \x07"}, r'{"\u0061":"x"}'),
        ({"properties": {"a": {"type": "integer"}}, "$defs": {"\x07": {}}}, r'{"\u0061":"x"}'),
        ({"properties": {"a": {"type": "integer"}, "b": {"pattern": "^[\\x00-\x7f]*$"}}}, r'{"\u0061":"x"}'),
    ],
)
@pytest.mark.parametrize("is_inline", [False, True])
def test_no_escape_spells_a_property_past_its_schema(schema: dict[str, Any], document: str, is_inline: bool) -> None:
    schema = schema | {"type": "object"}
    assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(document))
    grammar = start({"grammar": f"start: %json {json.dumps(schema)}"} if is_inline else {"json": schema})
    assert not grammar.accept_tokens(list(document.encode()))


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ({"enum": ["\x1f", "\\u001f"]}, r'"\u001f"'),
        ({"const": "\x7f"}, r'"\u007f"'),
        ({"const": {"a": ["\x01"]}}, r'{"a":["\u0001"]}'),
        ({"type": "string", "pattern": "^\x01$"}, r'"\u0001"'),
        *(
            ({"type": "string", "pattern": f"^{spelled}$"}, r'"\u0001"')
            for spelled in (r"\x01", r"\u0001", r"\x{1}", r"\u{0001}", r"[\x00-\x1F]", "[\x00-\x08]")
        ),
        ({"type": "string", "pattern": r"^[\x7F]$"}, r'"\u007f"'),
        (
            {
                "type": "object",
                "properties": {"\x01": {"const": 1}},
                "required": ["\x01"],
                "additionalProperties": False,
            },
            r'{"\u0001":1}',
        ),
        ({"type": "object", "additionalProperties": {"const": "\x01"}}, r'{"a":"\u0001"}'),
    ],
)
def test_texts_that_only_an_escape_can_spell_keep_it(schema: dict[str, Any], document: str) -> None:
    assert accepts({"json": schema}, document)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}, "b": {"const": "\x1f"}}},
        {"properties": {"a": {"type": "integer"}, "\x1f": {}}},
        {"patternProperties": {"^a": {}}, "required": ["\x1f"]},
        {
            "items": {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
            "not": {"enum": [{"\x1f": 1}]},
        },
    ],
)
def test_what_only_an_escape_spells_is_refused_where_that_would_spell_a_propertys_name(schema: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidGrammar, match=r"U\+001F, which only an escape .* property '\^?a' .* additionalProperties"
    ):
        start({"json": schema})


def test_what_names_no_control_character_is_no_reason_to_allow_escapes() -> None:
    for pattern in (r"^\x41$", r"^\u0041$", r"^\x{41}$", "^A$", r"^[\x20-\x7e]$"):
        assert not accepts(
            {"json": {"anyOf": [{"pattern": pattern, "type": "string"}, {"type": "object"}]}}, r'{"\u0061":1}'
        )
