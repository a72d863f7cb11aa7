"""Each kind allows the texts it should, and no others; what is wrong is refused with the compiler's reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import InvalidGrammar
from tests.structured_output.conftest import accepts, allowed, start

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
TAG = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": ""},
        {"begin": "!now", "schema": {"const": 1}, "end": "."},
    ],
    "triggers": ["<f=", "!"],
}
LANGUAGES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"json": PERSON},
        ['{"name":"x"}', '{ "name" : "é\\n😀" ,\n"age": -3}'],
        ["", "{}", ' {"name":"x"}', '{"name":1}'],
    ),
    ({"json": PERSON}, ['{"name":"x","more":[1]}'], ['{"age":1,"name":"x"}', '{"name":"x"} ', '{"name":"x",}']),
    ({"json": PERSON, "disable_additional_properties": True}, ['{"name":"x"}'], ['{"name":"x","more":1}']),
    ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"x","age":1}'], ['{"name": "x"}']),
    ({"json": PERSON, "whitespace_pattern": " {1,2}"}, ['{  "name": "x"}'], ['{   "name":"x"}', '{\n"name":"x"}']),
    ({"json": PERSON}, ["{" + " " * 64 + '"name":"x"}'], ["{" + " " * 65 + '"name":"x"}']),
    ({"json": {"type": "integer", "minimum": 2**53 - 1, "maximum": 2**53}}, [str(2**53)], [str(2**53 + 1)]),
    ({"json": {"type": "number", "minimum": 1e16}}, [str(10**16)], ["1"]),
    ({"json": {"properties": {"x-guidance": {"type": "null"}}}}, ['{"x-guidance":null}'], ['{"x-guidance":1}']),
    ({"json": {"type": ["integer", "null"]}}, ["-7", "null", "0"], ["1.5", "nul", "07"]),
    (
        {"json": '{"$defs":{"n":{"enum":["a","b"]}},"type":"array","items":{"$ref":"#/$defs/n"}}'},
        ['["a", "b"]'],
        ["[1]"],
    ),
    ({"json": {}}, ["5", '{"a": [null]}', '"x"'], ["", "x"]),
    ({"json_object": True}, ["{}", '{"a":{"b":[null]}}'], ["[]", "1", ""]),
    ({"regex": r"[0-9]{3}-\d+"}, ["123-4", "123-٣"], ["12-4", "123-", "1234"]),
    ({"regex": r"^(a|ab)(c|bcd)$"}, ["ac", "abc", "abcd", "abbcd"], ["abcde", "ab"]),
    ({"regex": "a/b\\/c\n#\"'"}, ["a/b/c\n#\"'"], ["a/b"]),
    ({"choice": ["a", "ab", "é😀", 'x\n"\\/ y']}, ["a", "ab", "é😀", 'x\n"\\/ y'], ["", "b", "aab", "abc"]),
    ({"grammar": 'start: ("ab" | "c")+ "!"\n'}, ["abc!", "c!"], ["!", "a!", "abc"]),
    ({"grammar": 'start: %json {"type": "integer"}'}, ["12"], ["a"]),
    ({"grammar": 'root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"\n'}, ["a,b", "(a,(b))"], ["a,", ")", "(a"]),
    (
        {"structural_tag": TAG},
        ["", "free\ntext", '<f=a>{"x":1}</f> and <f=b>true', "!now1."],
        ["<f=c>", "<f=b>1", "!a"],
    ),
    ({"structural_tag": TAG, "disable_any_whitespace": True}, ['<f=a>{"x":1}</f>'], ['<f=a>{"x": 1}</f>']),
]


@pytest.mark.parametrize(
    ("asked", "yes", "no"), LANGUAGES, ids=[f"{i}-{next(iter(a))}" for i, (a, *_) in enumerate(LANGUAGES)]
)
def test_a_kind_allows_its_texts_and_no_others(asked: dict[str, Any], yes: list[str], no: list[str]) -> None:
    assert [text for text in yes if not accepts(asked, text)] == []
    assert [text for text in no if accepts(asked, text)] == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "strnig"}}, "json: Invalid type: strnig"),
    (
        {"json": {"type": "string", "format": "frobnicate"}},
        "Unknown format: frobnicate; leave it out, or give a pattern",
    ),
    ({"json": {"type": "array", "uniqueItems": True}}, '["uniqueItems"]; leave them out'),
    ({"json": {"$ref": "http://elsewhere/a"}}, "put what is referred to under $defs"),
    ({"json": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}, "x-guidance"),
    ({"json": {"not": {"type": "string"}}}, "not"),
    ({"json": {"oneOf": [{"type": "string"}, {"const": "a"}]}}, "oneOf constraints are not supported"),
    ({"json": {"type": "object", "minProperties": 2}}, "minProperties 2 needs as many required properties, got 0"),
    ({"json": {"type": "string", "pattern": "^(?=a)b$"}}, "look-around"),
    ({"json": {"$ref": "#/$defs/none"}}, "json: "),
    ({"json": {"$ref": "#"}}, "json allows no text"),
    ({"json": {"minimum": 3, "maximum": 2, "type": "integer"}}, "Unsatisfiable"),
    ({"json": {"type": "string", "x-guidance": 5}}, "x-guidance must be an object"),
    ({"json": {"properties": {"a": {"items": {"x-guidance": {}}}}}}, "x-guidance holds for a whole schema"),
    ({"grammar": 'start: %json {"anyOf": [{"x-guidance": {}}]}'}, "x-guidance holds for a whole schema"),
    (
        {"json": {"type": "integer", "minimum": 2**53 + 1}},
        "minimum holds 9007199254740993, and integers beyond 9007199",
    ),
    ({"json": {"items": {"exclusiveMaximum": -(2**60)}}}, "exclusiveMaximum holds -1152921504606846976, and"),
    ({"json": {"type": "integer", "maximum": 1e16}}, "maximum holds 1e+16, and integers beyond"),
    ({"json": {"enum": [1, {"a": [2**53 + 1]}]}}, "enum holds 9007199254740993, and integers beyond"),
    ({"regex": "["}, "unclosed character class"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"a\bb"}, "lookarounds not supported"),
    ({"regex": "a{0}"}, "regex allows only the empty text"),
    ({"regex": r"[^\s\S]"}, "regex allows no text"),
    ({"grammar": "start a"}, "grammar: "),
    ({"grammar": "a: /b/"}, "no start rule found"),
    ({"grammar": 'Root: "a"'}, "grammar: "),
    ({"grammar": 'Root ::= "a"'}, "cannot be read as GBNF: No 'root' rule found"),
    ({"grammar": "start: a\na: b\nb: a"}, "grammar allows no text"),
    ({"grammar": "root ::= " + "(" * 3000}, "cannot be read as GBNF"),
    ({"grammar": "start: " + "(" * 3000}, "too deeply nested"),
    ({"grammar": "start: <|im_start|>"}, "<|im_start|> stands for special tokens, which no form may hold"),
    ({"grammar": 'start: "a" <[5000]>'}, "put its text in quotes"),
    ({"json": {"properties": {}, "x-guidance": {"json_allowed_escapes": "nu"}}}, "leave json_allowed_escapes"),
    ({"json": {"x-guidance": {"json_allow_general_unicode_escapes": True}}}, "escapes with u"),
    ({"structural_tag": {"structures": [{"begin": "<", "schema": {"type": 1}, "end": ""}], "triggers": ["<"]}}, "type"),
    (
        {
            "structural_tag": TAG
            | {"structures": [*TAG["structures"], {"begin": "!", "schema": {"type": "x"}, "end": ""}]}
        },
        'structural_tag: schema of structures[3], which begins with "!": Invalid type: x',
    ),
]


@pytest.mark.parametrize(("asked", "says"), REFUSED, ids=[f"{i}-{says}" for i, (_, says) in enumerate(REFUSED)])
def test_what_is_wrong_is_refused_with_the_reason(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidGrammar) as refusal:
        start(asked)
    assert says in str(refusal.value)
    assert "%llguidance" not in str(refusal.value), "our own text is no help to the user"
    assert len(str(refusal.value)) < 500


BEHIND: dict[str, tuple[Callable[[Any], Any], str]] = {
    "pointer": (lambda part: {"$ref": "#/parts/x~1y%25", "parts": {"x/y%": part}}, "{}"),
    "pointer into a list": (lambda part: {"$ref": "#/parts/1", "parts": [True, part]}, "{}"),
    "pointer from an id": (lambda part: {"$ref": "#/$defs/a", "$defs": {"a": INNER | {"parts": [part]}}}, "{}"),
    "tuple": (lambda part: {"type": "array", "items": [part]}, "[{}]"),
    "tuple's rest": (lambda part: {"type": "array", "items": [True], "additionalItems": part}, "[0,{}]"),
}
INNER = {"$id": "http://inner/", "$ref": "#/parts/0"}


@pytest.mark.parametrize(("behind", "shape"), BEHIND.values(), ids=BEHIND)
def test_a_schema_is_prepared_wherever_it_stands(behind: Callable[[Any], Any], shape: str) -> None:
    for part, says in (({"const": 2**53 + 1}, "not exact"), ({"type": "object", "minProperties": 2}, "minProperties")):
        with pytest.raises(InvalidGrammar, match=says):
            start({"json": behind(part)})
    dated = {"json": behind({"type": "string", "format": "date"})}
    assert accepts(dated, shape.replace("{}", '"2024-02-29"'))
    assert not accepts(dated, shape.replace("{}", '"2023-02-29"'))
    closed = {"json": behind({"type": "object"}), "disable_additional_properties": True}
    assert not accepts(closed, shape.replace("{}", '{"more":1}'))


def test_references_that_lead_in_circles_or_nowhere_are_followed_to_their_end() -> None:
    part = {"type": "array", "items": {"$ref": "#/part"}}
    assert accepts({"json": {"$ref": "#/part", "part": part}}, "[[],[[]]]")
    with pytest.raises(InvalidGrammar):
        start({"json": {"$ref": "#/part/9/none", "part": [{"$ref": "#/part/0"}]}})


def test_a_fault_in_a_users_grammar_is_told_with_its_line() -> None:
    with pytest.raises(InvalidGrammar, match=r"at 2\(4\): unknown name"):
        start({"grammar": 'start: a\na: missing "x"'})


def test_a_propertys_own_name_may_be_a_keyword() -> None:
    schema = {"type": "object", "properties": {"properties": {"type": "object", "properties": {"a": {}}}}}
    asked = {"json": schema, "disable_additional_properties": True}
    assert accepts(asked, '{"properties":{"a":1}}')
    assert not accepts(asked, '{"properties":{"b":1}}')


def test_a_wide_schema_is_followed() -> None:
    names = [f"property_{i}" for i in range(600)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    assert accepts({"json": schema}, json.dumps({"property_3": 1, "property_599": 2}))


def test_options_of_the_compiler_in_a_schema_are_obeyed() -> None:
    schema = {"oneOf": [{"type": "string"}, {"const": "a"}], "x-guidance": {"coerce_one_of": True}}
    assert accepts({"json": schema}, '"a"')


def test_the_first_mask_of_a_choice_holds_the_first_bytes() -> None:
    assert bytes(allowed(start({"choice": ["yes", "no"]}))) == b"ny"


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'start: "%json { }"', "%json { }"),
        (r'start: "a \" %json { }"', 'a " %json { }'),
        (r'start: /%json \{"a":1\}\//', '%json {"a":1}/'),
        ('start: %json {"const": "%json { }"}', '"%json { }"'),
        ('start: "a" // %json { } "\n | "b"', "b"),
        ('start: "<a>" /<b>/ %json {"const": "<c>"}', '<a><b>"<c>"'),
    ],
)
def test_what_only_looks_like_a_schema_or_a_special_token_is_as_it_was_written(grammar: str, text: str) -> None:
    matched = start({"grammar": grammar})
    assert matched.accept_tokens(list(text.encode()))
    assert matched.is_finished
