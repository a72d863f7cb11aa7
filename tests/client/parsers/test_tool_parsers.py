"""Each family's calls are read; every way in which a text comes in parts gives the same pieces; no text is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client.parsers.forced import CallListParser, NamedCallParser
from engine.client.parsers.hermes import HermesParser
from engine.client.parsers.llama3_json import Llama3JsonParser
from engine.client.parsers.mistral import MistralParser
from engine.client.parsers.pieces import CallArguments, CallBegun, Content, Parser, Piece, Reasoning, merged
from engine.client.parsers.pythonic import PythonicParser
from engine.client.parsers.reasoning import Opening, ReasoningParser, opening_after
from engine.client.parsers.registry import TOOL_FORMATS, ChatParser

PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "required": CallListParser,
    "named": lambda: NamedCallParser("f"),
    "reasoning, inside": lambda: ReasoningParser(Opening.INSIDE),
    "reasoning, open": lambda: ReasoningParser(Opening.OPEN),
    "reasoning and hermes": lambda: ChatParser(Opening.OPEN, HermesParser()),
    "one call of several": lambda: ChatParser(None, HermesParser(), at_most_one_call=True),
}


class Answer(NamedTuple):
    """What a reader makes of pieces."""

    content: str
    calls: list[tuple[str, str]]
    reasoning: str = ""


def read(parser: Parser, parts: Sequence[str]) -> list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(part)
    return merged([*pieces, *parser.finish()])


def answer(name: str, text: str) -> Answer:
    pieces = read(PARSERS[name](), [text])
    begun = [piece for piece in pieces if isinstance(piece, CallBegun)]
    assert [call.number for call in begun] == list(range(len(begun)))
    arguments = [""] * len(begun)
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.number] += piece.text
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return Answer(content, [(call.name, given) for call, given in zip(begun, arguments, strict=True)], reasoning)


ARGUMENTS = '{"city": "Zürich \\"x\\"}", "days": [1, {"a": null}]}'
F, G = ("f", ARGUMENTS), ("g", "{}")
CASES = {
    "hermes": [
        (f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>', Answer("", [F])),
        (f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "f"}}</tool_call>', Answer("", [F])),
        ('I look.\n<tool_call>{"name":"g"}</tool_call>\n', Answer("I look.", [G])),
        (
            f'<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>\n<tool_call>\n'
            '{"name": "g", "arguments": {}}\n</tool_call>',
            Answer("", [F, G]),
        ),
        ('<tool_call>{"name": "g", "arguments": null}<tool_call>{"name": "g"}', Answer("", [G, G])),
        ('<tool_call>{"name": "g", "arguments": "{}"}</tool_call>done', Answer("done", [G])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', Answer("", [("f", '{"a": 1')])),
        ('<tool_call>{"nam', Answer('<tool_call>{"nam', [])),
        ('<tool_call>{"a": 1}</tool_call>', Answer('<tool_call>{"a": 1}</tool_call>', [])),
        ("<tool_call>no</tool_call>", Answer("<tool_call>no</tool_call>", [])),
        ("a <tool_cal", Answer("a <tool_cal", [])),
        ("plain text \n", Answer("plain text \n", [])),
        ("", Answer("", [])),
    ],
    "llama3_json": [
        (f'{{"name": "f", "parameters": {ARGUMENTS}}}', Answer("", [F])),
        (
            f'<|python_tag|>{{"name": "f", "parameters": {ARGUMENTS}}}; {{"name": "g", "parameters": {{}}}}',
            Answer("", [F, G]),
        ),
        ('\n {"name": "g", "arguments": {}}\n', Answer("", [G])),
        ('{"answer": 42} is it', Answer('{"answer": 42} is it', [])),
        ('{"name": 3}', Answer('{"name": 3}', [])),
        (' <|python_tag|> {"a": 1}', Answer(' <|python_tag|> {"a": 1}', [])),
        (' {"a', Answer(' {"a', [])),
        ('{"parameters": {}, "name": "g"} and more', Answer(" and more", [G])),
        ('{"name": "g", "parameters": "{}"}', Answer("", [G])),
        ('{"name": "g", "parameters": null}', Answer("", [G])),
        ('{"name": "John", "age": 3}', Answer('{"name": "John", "age": 3}', [])),
        ('{"name": "g", "parameters": 5} x', Answer('{"name": "g", "parameters": 5} x', [])),
        ('{"parameters": [1], "name": "g"}', Answer('{"parameters": [1], "name": "g"}', [])),
        ('{"name": "g"}', Answer('{"name": "g"}', [])),
        ("The {", Answer("The {", [])),
        ("<|python", Answer("<|python", [])),
        ("", Answer("", [])),
    ],
    "mistral": [
        (f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g"}}]', Answer("", [F, G])),
        (f'Sure. [TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}]', Answer("Sure.", [F])),
        (f"[TOOL_CALLS]f{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}", Answer("", [F, G])),
        ("[TOOL_CALLS]", Answer("[TOOL_CALLS]", [])),
        ("[TOOL_CALLS]not a call", Answer("[TOOL_CALLS]not a call", [])),
        ('[TOOL_CALLS][{"x": 1}]', Answer('[TOOL_CALLS][{"x": 1}]', [])),
        ("text [TOOL", Answer("text [TOOL", [])),
    ],
    "pythonic": [
        ("[f(city='Zürich', days=[1, {'a': None}]), g()]", Answer("", [("f", F[1].replace(' \\"x\\"}', "")), G])),
        ("[g()]\n", Answer("", [G])),
        ("[f(x=true, y=-1.5, z=(1, 2))]", Answer("", [("f", '{"x": true, "y": -1.5, "z": [1, 2]}')])),
        (
            "[f(x=[true, {'a': null, 'b': [false]}])]",
            Answer("", [("f", '{"x": [true, {"a": null, "b": [false]}]}')]),
        ),
        (r"[f(x='a\'b)', y=\"]\")]".replace('\\"', '"'), Answer("", [("f", '{"x": "a\'b)", "y": "]"}')])),
        ("[f(1)]", Answer("[f(1)]", [])),
        ("[f(x=g())]", Answer("[f(x=g())]", [])),
        ("[f(x=1e999)]", Answer("[f(x=1e999)]", [])),
        ("[f(x=" + "[" * 300 + "]" * 300 + ")]", Answer("[f(x=" + "[" * 300 + "]" * 300 + ")]", [])),
        ("[1] is a citation", Answer("[1] is a citation", [])),
        ("[f(x=1", Answer("[f(x=1", [])),
        ("text", Answer("text", [])),
        ("[]", Answer("[]", [])),
    ],
    "required": [
        (f'[{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]', Answer("", [F, G])),
        ('[{"name": "g", "arguments": {}', Answer("", [G])),
        ('[{"nam', Answer('[{"nam', [])),
    ],
    "named": [(ARGUMENTS, Answer("", [F])), ("", Answer("", []))],
    "reasoning, inside": [
        ("\nhm, \n so\n</think>\n\nYes.", Answer("Yes.", [], "hm, \n so")),
        ("cut </thin", Answer("", [], "cut </thin")),
        ("</think>", Answer("", [], "")),
        ("</think>  ", Answer("", [], "")),
    ],
    "reasoning, open": [
        ("<think>hm</think>Yes. </think>", Answer("Yes. </think>", [], "hm")),
        (" \n<think>\nhm", Answer("", [], "hm")),
        (" plain <think>", Answer(" plain <think>", [])),
        (" <thin", Answer(" <thin", [])),
        ("  ", Answer("  ", [])),
    ],
    "reasoning and hermes": [
        (
            '<think>maybe <tool_call>{"name": "no"}</tool_call></think>\n\nSo:<tool_call>{"name": "g"}</tool_call>',
            Answer("So:", [G], 'maybe <tool_call>{"name": "no"}</tool_call>'),
        ),
    ],
    "one call of several": [
        ('<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "f"}</tool_call>', Answer("", [G])),
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "expected"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_a_text_is_read_as_its_family_writes_it_in_whichever_parts_it_comes(
    name: str, text: str, expected: Answer
) -> None:
    assert answer(name, text) == expected
    whole = read(PARSERS[name](), [text])
    for size in (1, 2, 3, 7):
        assert read(PARSERS[name](), [text[i : i + size] for i in range(0, len(text), size)]) == whole
    for cut in range(len(text)):
        assert read(PARSERS[name](), [text[:cut], text[cut:]]) == whole


NAMELESS = r'{"name": "\ud800", "arguments": {}}'
SURROGATES = [
    ("hermes", f"<tool_call>{NAMELESS}</tool_call>", Answer(f"<tool_call>{NAMELESS}</tool_call>", [])),
    ("mistral", f"[TOOL_CALLS][{NAMELESS}]", Answer(f"[TOOL_CALLS][{NAMELESS}]", [])),
    ("llama3_json", NAMELESS, Answer(NAMELESS, [])),
    ("hermes", r'<tool_call>{"name": "g", "arguments": "\ud83d"}</tool_call>', Answer("", [("g", r"\ud83d")])),
    ("hermes", r'<tool_call>{"arguments": "\udead", "name": "g"}</tool_call>', Answer("", [("g", r"\udead")])),
    ("llama3_json", r'{"name": "g", "parameters": "{\"a\": \"\ud800\"}"}', Answer("", [("g", r'{"a": "\ud800"}')])),
    ("pythonic", r"[g(x='\ud800')]", Answer("", [("g", r'{"x": "\ud800"}')])),
    ("pythonic", r"[g(x={'\ud83d\ude00': 1})]", Answer("", [("g", r'{"x": {"\ud83d\ude00": 1}}')])),
]


@pytest.mark.parametrize(("name", "text", "expected"), SURROGATES)
def test_what_stands_for_no_character_is_told_as_it_can_be_sent(name: str, text: str, expected: Answer) -> None:
    told = answer(name, text)
    assert told == expected
    msgspec.json.encode(told)


def test_a_name_without_end_is_content_before_it_is_long() -> None:
    """What is read anew with each character must not grow."""
    pieces = PARSERS["pythonic"]().feed("[" + "a" * 300)
    assert pieces[0] == Content("[" + "a" * 257)


BITS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "{", "}", "["]
BITS += [
    "]",
    '"name"',
    ": ",
    '"f"',
    ", ",
    '"arguments"',
    '"',
    "\\",
    "f(",
    "x=1",
    ")",
    "\n",
    " ",
    "a",
    "é",
    "<",
    "</",
    ";",
]
BITS += [r'"\ud800"', r"'\udead'", r'{"name": "f", "arguments": "\ud83d"}']
BITS += ['{"name": "f", "arguments": {"a": 1}}', "null", "1", "'"]
TEXTS = st.lists(st.sampled_from(BITS), max_size=14).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_any_split_of_any_text_gives_the_same_pieces(name: str, text: str, cuts: list[int]) -> None:
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = read(PARSERS[name](), [text])
    assert read(PARSERS[name](), parts) == read(PARSERS[name](), text) == whole
    msgspec.json.encode(whole)


@pytest.mark.parametrize(
    ("family", "text", "is_call"),
    [
        ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', True),
        ("llama3_json", '{"name": "John", "parameters": {"age": 3}} is it', False),
        ("pythonic", "[f(x=1)]", True),
        ("pythonic", '[John(age=3)] is "it"', False),
    ],
)
def test_without_a_marker_only_what_names_a_known_function_is_a_call(family: str, text: str, is_call: bool) -> None:
    pieces = read(TOOL_FORMATS[family].make_parser(["f", "g"]), list(text))
    assert pieces[0] == (CallBegun(0, "f") if is_call else Content(text))


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "pythonic", "required"])
@settings(deadline=None, max_examples=100, derandomize=True, database=None)
@given(text=TEXTS)
def test_a_text_without_calls_is_content_to_the_last_character(name: str, text: str) -> None:
    content, calls, _ = answer(name, text)
    if not calls and name != "required":
        assert content == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=3)


def written(name: str, calls: list[tuple[str, dict[str, object]]]) -> str:
    """Write calls as the family does."""
    objects = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
        case "llama3_json":
            return "; ".join(objects)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case "required":
            return f"[{', '.join(objects)}]"
    arguments = [", ".join(f"{key}={value!r}" for key, value in given.items()) for _, given in calls]
    return f"[{', '.join(f'{call}({given})' for (call, _), given in zip(calls, arguments, strict=True))}]"


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "required", "pythonic"])
@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(calls=CALLS)
def test_drawn_calls_come_back_as_they_were_written(name: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    if name == "pythonic":
        words = {"and", "as", "if", "in", "is", "or", "not", "for", "def", "del", "try", "from", "pass", "with", "else"}
        words |= {"class", "break", "import", "lambda", "return", "while", "async", "await", "elif", "raise", "yield"}
        calls = [(call, {key: value for key, value in given.items() if key not in words}) for call, given in calls]
    content, told, _ = answer(name, written(name, calls))
    assert content == ""
    assert [(call, json.loads(given)) for call, given in told] == [
        (call, json.loads(json.dumps(given))) for call, given in calls
    ]


def test_arguments_are_told_as_they_come() -> None:
    parser = HermesParser()
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a') == [CallBegun(0, "f"), *map_arguments('{"a')]
    assert merged(parser.feed('": [1,')) == [CallArguments(0, '": [1,')]


def map_arguments(text: str) -> list[Piece]:
    return [CallArguments(0, char) for char in text]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "pythonic", "required", "reasoning, inside"])
def test_the_cost_of_a_character_does_not_grow_with_the_text(name: str) -> None:
    begin = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS][", "required": "["}.get(name, "")
    text = '[f(x="' if name == "pythonic" else begin + '{"x": "'
    parser = PARSERS[name]()
    parser.feed(text)
    for _ in range(60_000):
        assert len(parser.feed("a")) <= 1


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|im_start|>assistant\n<think>\n", Opening.INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Opening.ANSWER),
        ("<|im_start|>assistant\n", Opening.OPEN),
    ],
)
def test_how_an_answer_begins_is_seen_by_its_prompt(prompt: str, opening: Opening) -> None:
    assert opening_after(prompt) is opening
