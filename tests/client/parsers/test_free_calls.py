"""Where a strict function may be called, all that its family's parser reads as a call is a valid one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import jsonschema
import pytest

from engine.client.parsers.forced import grammar_of_calls
from engine.client.parsers.free import Functions, calls_alone
from engine.client.parsers.pieces import CallArguments, CallBegun
from engine.client.parsers.registry import TOOL_FORMATS
from engine.errors import InvalidGrammar
from engine.sampling_params import StructuredOutputsParams, structured_outputs_params
from tests.structured_output.conftest import accepts, start, write

SCHEMAS = {
    "f": {"type": "object", "properties": {"x": {"enum": [1, "a"]}}, "required": ["x"], "additionalProperties": False},
    "get_weather": {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}},
}
HERMES = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
MISTRAL = '[TOOL_CALLS][{"name": "%s", "arguments": %s}]'
ARGUMENTS = '{"x":1}'
LLAMA = '{"name": "%s", "parameters": %s}'
TEXTS: dict[str, tuple[list[str], list[str]]] = {
    "hermes": (
        [
            "",
            "free < text",
            f"a {HERMES % ('f', ARGUMENTS)} b{HERMES % ('get_weather', '{}')}",
            HERMES % ("f", '{"x": "a"}'),
        ],
        [
            '<tool_call>{"name": "f"}',
            HERMES % ("f", '{"x":2}'),
            HERMES % ("f", "{}"),
            HERMES % ("g", "{}"),
            "<tool_call>",
        ],
    ),
    "mistral": (
        ["", "free [ text", f"a {MISTRAL % ('f', ARGUMENTS)} b", MISTRAL % ("get_weather", '{"day": "2024-02-29"}')],
        ["[TOOL_CALLS]f{}", MISTRAL % ("f", "{}"), MISTRAL % ("get_weather", '{"day": "2023-02-29"}')],
    ),
    "llama3_json": (
        ["", " \n", "free {", "<b>", "<", "é", LLAMA % ("f", ARGUMENTS), "; ".join([LLAMA % ("f", ARGUMENTS)] * 2)],
        [LLAMA % ("f", "{}"), " {", '{"a": 1}', "<|python_tag|>{", " <|", LLAMA % ("g", "{}"), "\u00a0{"],
    ),
}


def asked(name: str) -> StructuredOutputsParams:
    form_of_calls = TOOL_FORMATS[name].form_of_calls
    assert form_of_calls is not None
    return form_of_calls(list(SCHEMAS.items()))


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_free_but_for_its_calls(name: str) -> None:
    form = asked(name)
    allowed, forbidden = TEXTS[name]
    assert [text for text in allowed if not accepts(form, text)] == []
    assert [text for text in forbidden if accepts(form, text)] == []


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("opening", ["", "begun"])
def test_whatever_the_parser_reads_as_a_call_is_valid(name: str, opening: str) -> None:
    draw, num_calls, form = random.Random(name), 0, asked(name)
    begun = {"hermes": "a<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "{"}[name] if opening else ""
    for _ in range(12):
        grammar = start(form, stop_token_ids=(0,))
        assert grammar.accept_tokens(list(begun.encode()))
        text, is_complete = write(grammar, draw)
        parser = TOOL_FORMATS[name].make_parser(None)
        pieces = [*parser.feed(begun + text.decode(errors="replace")), *parser.finish()]
        names = [piece.name for piece in pieces if isinstance(piece, CallBegun)]
        assert set(names) <= SCHEMAS.keys()
        if not is_complete:
            continue
        for number, called in enumerate(names):
            arguments = [p.text for p in pieces if isinstance(p, CallArguments) and p.number == number]
            jsonschema.validate(json.loads("".join(arguments)), SCHEMAS[called])
            num_calls += 1
    assert bool(num_calls) is bool(opening)


def test_a_wrong_schema_is_told_with_the_functions_name() -> None:
    wrong = [*SCHEMAS.items(), ("wrong", {"type": "object", "properties": {"x": {"type": "nonsense"}}})]
    form_of_calls = TOOL_FORMATS["llama3_json"].form_of_calls
    assert form_of_calls is not None
    for form in (form_of_calls(wrong).grammar, grammar_of_calls(wrong, at_most_one=False)):
        with pytest.raises(InvalidGrammar, match="grammar: schema of wrong: Invalid type: nonsense"):
            start({"grammar": form})


def test_a_call_that_may_come_alone_has_no_endless_white_space() -> None:
    form = {"grammar": calls_alone([("f", {"type": "object"})]).grammar}
    assert accepts(form, '{"name": "f", "parameters": {' + " " * 64 + "}}")
    assert not accepts(form, '{"name": "f", "parameters": {' + " " * 65 + "}}")


@pytest.mark.parametrize("make", [lambda f: grammar_of_calls(f, at_most_one=True), lambda f: calls_alone(f).grammar])
def test_schemas_of_calls_take_as_many_characters_as_their_users_wrote(make: Callable[[Functions], str]) -> None:
    grammar = make([("f", {"type": "object", "description": "\u57ce" * 15_000})])
    structured_outputs_params({"grammar": grammar})
    assert len(grammar) < 15_400
