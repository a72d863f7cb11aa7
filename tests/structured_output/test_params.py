"""What is wrong with a request's form in itself is refused where it is made, by name, with what is allowed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import engine.structured_output.params as params_module
from engine.client.parsers.forced import grammar_of_arguments, grammar_of_calls
from engine.client.parsers.free import calls_alone, tagged_calls
from engine.errors import InvalidGrammar, InvalidRequest
from engine.sampling_params import SamplingParams, StructuredOutputsParams
from engine.structured_output.params import MAX_TAGS, shown_form, structured_outputs_params
from web.tool_schemas import MAX_TOOLS

TAG = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}
REFUSED: list[tuple[Any, str]] = [
    ({}, "exactly one of json, json_object, regex, choice, grammar, structural_tag, got none"),
    ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ({"json": 5}, "json must be a JSON object, got 5"),
    ({"json": ""}, "json must not be empty"),
    ({"json": "{"}, "json must be JSON"),
    ({"json": "[1]"}, "must be a JSON object"),
    ({"json": True}, "must be a JSON object"),
    ({"json": {"const": float("nan")}}, "JSON's own types"),
    ({"json": {"const": object()}}, "JSON's own types"),
    ({"json": "[" * 50_000}, "nested at most 128 levels deep, got 50000"),
    ({"json": {"const": "a" * 70_000}}, "at most 65536 characters"),
    ({"json_object": False}, "json_object must be true, got False"),
    ({"regex": ""}, "regex must not be empty"),
    ({"regex": "a\0b"}, "NUL"),
    ({"regex": "\ud800"}, "lone surrogates"),
    ({"regex": 5}, "regex must be text, got 5"),
    ({"choice": []}, "at least one"),
    ({"choice": "abc"}, "a list of texts"),
    ({"choice": ["a", 1]}, "a list of texts"),
    ({"choice": ["a", ""]}, "no empty text"),
    ({"choice": [1] * 2049}, "at most 2048 texts, got 2049"),
    ({"grammar": ""}, "grammar must not be empty"),
    ({"grammar": "x" * 65_537}, "at most 65536 characters, got 65537"),
    ({"structural_tag": {"type": "structural_tag", "format": {}}}, "format is not supported"),
    ({"structural_tag": {"structures": []}}, "triggers must be a list of texts"),
    ({"structural_tag": TAG | {"structures": []}}, "structures must be a list, at least one"),
    ({"structural_tag": TAG | {"triggers": [""]}}, "triggers must be a list of texts"),
    ({"structural_tag": TAG | {"triggers": ["<g"]}}, "must begin with one of the triggers"),
    ({"structural_tag": TAG | {"triggers": ["<f", "<g"]}}, "trigger '<g' begins no structure: leave it out"),
    ({"structural_tag": TAG | {"triggers": ["<f>", "<f"]}}, "trigger '<f>' is never reached, for '<f' comes before"),
    ({"structural_tag": TAG | {"triggers": ["<f", "x<fx"]}}, "trigger 'x<fx' is never reached, for '<f' comes before"),
    ({"structural_tag": TAG | {"structures": [{"begin": "<f>"}]}}, "must have begin, schema and end"),
    ({"structural_tag": TAG | {"more": 1}}, "structures and triggers alone"),
    ({"structural_tag": TAG | {"triggers": ["<f"] * 129}}, "structural_tag may have at most 128 triggers, got 129"),
    ({"structural_tag": TAG | {"structures": TAG["structures"] * 129}}, "at most 128 structures, got 129"),
    ({"structural_tag": TAG | {"triggers": ["<" * 129]}}, "a trigger may have at most 128 characters, got 129"),
    ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern needs json"),
    ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace needs json"),
    ({"json_object": True, "disable_additional_properties": True}, "disable_additional_properties needs json"),
    ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "contradicts"),
    ({"json_object": True, "disable_any_whitespace": 1}, "must be true or false, got 1"),
    ({"guided_json": {}}, "unknown field 'guided_json'"),
    ({"json": "{", "is_normal": True}, "unknown field 'is_normal'"),
    ("json", "an object of json"),
    (5, "got 5"),
]


@pytest.mark.parametrize(("asked", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_cannot_mean_anything_is_refused_at_once(asked: Any, says: str) -> None:
    with pytest.raises(InvalidGrammar) as refusal:
        SamplingParams(structured_outputs=asked)
    assert isinstance(refusal.value, InvalidRequest)
    assert (refusal.value.param, refusal.value.status_hint) == ("structured_outputs", 400)
    assert str(refusal.value).startswith("structured_outputs: ")
    assert says.replace("an object that", "object that") in str(refusal.value)


def test_as_many_structures_as_functions_may_be_given_and_each_may_have_a_trigger_of_its_own() -> None:
    begins = [f"<{i:03}>" for i in range(MAX_TAGS)]
    structures = [{"begin": begin, "schema": {}, "end": ""} for begin in begins]
    StructuredOutputsParams(structural_tag={"structures": structures, "triggers": begins})  # type: ignore[arg-type]
    assert MAX_TAGS == MAX_TOOLS


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"const": '[[{"\\"'}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def ask_from(num_frames: int, schema: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema) if num_frames == 0 else ask_from(num_frames - 1, schema)


@pytest.mark.parametrize("num_frames", [0, 500])
def test_how_deep_a_schema_may_be_nested_does_not_depend_on_who_asks(num_frames: int) -> None:
    allowed, refused = nested(128), nested(129)
    for schema in (allowed, json.dumps(allowed)):
        ask_from(num_frames, schema)
    for schema in (refused, json.dumps(refused)):
        with pytest.raises(InvalidGrammar, match="json must be nested at most 128 levels deep, got 129"):
            ask_from(num_frames, schema)
    with pytest.raises(InvalidGrammar, match="at most 128 levels deep"):
        StructuredOutputsParams(json=nested(900))  # type: ignore[arg-type]


def test_an_object_a_struct_and_text_mean_the_same_and_cross_the_wire() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "string"}}}
    made = [
        SamplingParams(structured_outputs={"json": schema, "regex": None, "disable_any_whitespace": None}),  # type: ignore[arg-type]
        SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)),  # type: ignore[arg-type]
        SamplingParams(structured_outputs={"json": msgspec.json.encode(schema).decode()}),  # type: ignore[arg-type]
    ]
    assert made[0] == made[1] == made[2]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made[0]), type=SamplingParams) == made[0]
    assert made[0].structured_outputs is not None
    assert made[0].structured_outputs.kind == "json"


def num_calls(act: Callable[[], Any]) -> int:
    """How many functions, of ours and of C, it takes."""
    events: list[str] = []
    sys.setprofile(lambda _frame, event, _argument: events.append(event))
    try:
        act()
    finally:
        sys.setprofile(None)
    return sum(event in {"call", "c_call"} for event in events)


@pytest.mark.parametrize("is_text", [False, True], ids=["object", "text"])
def test_a_large_schema_takes_no_more_calls_than_a_small_one_for_everybody_waits_meanwhile(is_text: bool) -> None:
    counts = []
    for num_parts in (1, 15_000):
        schema: Any = {"enum": [[]] * num_parts}
        asked = json.dumps(schema) if is_text else schema
        counts.append(num_calls(lambda asked=asked: StructuredOutputsParams(json=asked)))
    assert max(counts) < 1_000


ASKED: list[dict[str, Any]] = [{"json": {"enum": ["a"]}}, {"structural_tag": TAG}, {"choice": ["a", "b"]}]


@pytest.mark.parametrize("asked", ASKED, ids=[next(iter(asked)) for asked in ASKED])
def test_what_was_checked_where_it_was_made_is_not_checked_again_where_it_is_sent(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SamplingParams(structured_outputs=asked)  # type: ignore[arg-type]
    sent = msgspec.msgpack.encode(made)
    for check in ("_check_text", "_object_text", "_check_structural_tag", "_choices"):
        monkeypatch.setattr(params_module, check, lambda *_: pytest.fail("checked twice"))
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == made


def test_a_changed_copy_that_says_so_is_checked() -> None:
    made = StructuredOutputsParams(json={"type": "object"})  # type: ignore[arg-type]
    with pytest.raises(InvalidGrammar, match="json must be JSON"):
        msgspec.structs.replace(made, json="{", is_normal=False)


def test_keys_of_a_schema_keep_their_order_for_properties_are_written_in_it() -> None:
    params = StructuredOutputsParams(json={"properties": {"b": {}, "a": {}}})  # type: ignore[arg-type]
    assert params.json == '{"properties":{"b":{},"a":{}}}'


FUNCTIONS = [("get_weather", {"type": "object"}), ("clock", {"type": "object", "properties": {"zone": {"const": "a"}}})]
FORMS_OF_CALLS = {
    "required": {"grammar": grammar_of_calls(FUNCTIONS, at_most_one=False)},
    "hermes": tagged_calls("<tool_call>", "\n", "\n</tool_call>")(FUNCTIONS),
    "alone": calls_alone(FUNCTIONS),
}


@pytest.mark.parametrize("form", FORMS_OF_CALLS.values(), ids=FORMS_OF_CALLS)
def test_a_form_of_calls_is_known_by_its_functions(form: Any) -> None:
    assert shown_form(structured_outputs_params(form)) == "the form of calls of get_weather, clock"


def test_a_form_of_ones_own_is_known_by_its_beginning() -> None:
    named = {"grammar": grammar_of_arguments("clock", {"type": "object"})}
    assert shown_form(structured_outputs_params(named)) == "the form of calls of clock"
    assert shown_form(structured_outputs_params({"regex": "a" * 90})) == f"regex '{'a' * 79}"
    tag = {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<"]}
    assert shown_form(structured_outputs_params({"structural_tag": tag})).startswith("structural_tag '{")
