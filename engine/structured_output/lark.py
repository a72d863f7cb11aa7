"""From what a user asks of an output's form to one grammar in llguidance's variant of Lark, whatever the kind.

Only text is made here, and only what is wrong in itself is refused; what the grammar means is the compiler's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.errors import InvalidGrammar
from engine.structured_output.escapes import escapes_of
from engine.structured_output.formats import make_exact
from engine.structured_output.params import BEGINS_CALL, WHITESPACE, StructuredOutputsParams

MAX_SHOWN_CHARS = 80
"""Of the text by which a structure is told."""
MAX_INTEGER = 2**53
"""Up to it the compiler, which computes in binary64, tells integers apart; below zero likewise."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Masks then allow every spelling in tokens, not one that is computed: what is allowed is what is accepted."""
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""How a rule of GBNF begins, and none of Lark's."""
_IN_LARK = re.compile(
    r"""(?://|\#)[^\n]* | "(?:[^"\\\n]|\\.)*" | /(?:[^/\\\n]|\\.)+/
    | (?P<schema>%json\s*(?={)) | (?P<special><[^<>\s]+>)""",
    re.VERBOSE,
)
"""Finds schemas and special tokens in a grammar, past those in comments, texts and expressions."""
_SCHEMA_OF = "// schema of "
"""Begins at a line's end what says whose schema it holds, which is told of what is wrong with it."""
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    "items",
    "additionalItems",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
)


def to_lark(params: StructuredOutputsParams) -> str:
    """Return the grammar of `params`; a user's own grammar keeps its line numbers.

    Raises:
        InvalidGrammar: It cannot be written as one; the caller's fault.
    """
    return f"{_WRITERS[params.kind](params)}\n{_OPTIONS}"


def _of_schema(params: StructuredOutputsParams) -> str:
    schema = json.loads(params.json or "")
    if params.disable_additional_properties:
        for part in _schemas_in(schema):
            if (part.get("type") == "object" or "properties" in part) and "patternProperties" not in part:
                part.setdefault("additionalProperties", False)
    with _told_of("json"):
        return f"start: {_json_rule(schema, params)}"


def _of_any_object(params: StructuredOutputsParams) -> str:
    return f"start: {_json_rule({'type': 'object'}, params)}"


def _of_regex(params: StructuredOutputsParams) -> str:
    quoted = json.loads(LLMatcher.grammar_from_regex(params.regex or ""))
    return str(quoted["grammars"][0]["lark_grammar"])


def _of_choice(params: StructuredOutputsParams) -> str:
    # One terminal, so that a text which begins another one is no dead end.
    return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, params.choice or ()))}"


def _of_grammar(params: StructuredOutputsParams) -> str:
    grammar = params.grammar or ""
    if _GBNF.search(grammar) is None:
        return "".join(_checked_parts(grammar))
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the library raises nothing more precise
        raise InvalidGrammar(f"the grammar cannot be read as GBNF: {error!s:.200}") from None


def _checked_parts(grammar: str) -> Iterator[str]:
    """Yield `grammar` in parts, each schema in it ready to compile; what is no JSON is the compiler's to refuse.

    A schema is written in one line but for its first bracket, so that what follows keeps its line.
    """
    done = at = 0
    while (found := _IN_LARK.search(grammar, at)) is not None:
        at = found.end()
        if found["special"]:
            message = f"{found['special']:.80} stands for special tokens, which no form may hold"
            raise InvalidGrammar(f"grammar: {message}: leave it out, or put its text in quotes")
        if not found["schema"]:
            continue
        start = at
        try:
            schema, at = json.JSONDecoder().raw_decode(grammar, start)
        except (ValueError, RecursionError):
            continue
        end = grammar.find("\n", at)
        with _told_of(whose_schema(grammar, at, end if end >= 0 else len(grammar)) or "json"):
            own = _prepare(schema)
        lines = "\n" * grammar.count("\n", start, at)
        yield f"{grammar[done:start]}{{{lines}{json.dumps(schema | {'x-guidance': own})[1:]}"
        done = at
    yield grammar[done:]


def whose_schema(grammar: str, begin: int, end: int) -> str:
    """Return what a line of a grammar says at its end of the schema that it holds, empty where it says nothing."""
    found = grammar.rfind(_SCHEMA_OF, begin, end)
    return grammar[found + len("// ") : end] if found >= 0 else ""


def _of_structural_tag(params: StructuredOutputsParams) -> str:
    """Return free text in which each trigger begins one of its structures."""
    tag = json.loads(params.structural_tag or "")
    triggers: list[str] = list(dict.fromkeys(tag["triggers"]))
    lines = [r"TEXT: /(?s:.*)/"]
    lines += [f"trigger_{i}[lazy]: TEXT {json.dumps(trigger)}" for i, trigger in enumerate(triggers)]
    for index, structure in enumerate(tag["structures"]):
        number = next(i for i, trigger in enumerate(triggers) if structure["begin"].startswith(trigger))
        begin = structure["begin"].removeprefix(triggers[number])
        whose = f"structures[{index}], which begins with {json.dumps(structure['begin'])[:MAX_SHOWN_CHARS]}"
        if call := BEGINS_CALL.search(structure["begin"]):
            whose = call[1]
        with _told_of(f"schema of {whose}"):
            parts = [_literal(begin), _json_rule(structure["schema"], params), _literal(structure["end"])]
        lines.append(f"tag_{index}: trigger_{number} {' '.join(filter(None, parts))} {_SCHEMA_OF}{whose}")
    tags = " | ".join(f"tag_{index}" for index in range(len(tag["structures"])))
    return "\n".join([f"start: ({tags})* last", "last: TEXT", *lines])


@contextmanager
def _told_of(whose: str) -> Iterator[None]:
    """Tell whose schema it is of which something is wrong in the block."""
    try:
        yield
    except InvalidGrammar as error:
        fault = str(error).removeprefix(f"{error.param}: ")
        raise InvalidGrammar(f"{whose}: {fault}" if whose else fault) from None


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _json_rule(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    own = _prepare(schema)
    return f"%json {json.dumps(schema | {'x-guidance': options | own})}"


def _prepare(schema: dict[str, Any]) -> dict[str, Any]:
    """Check `schema` and have it say exactly what the compiler takes roughly, in place; return the options it needs."""
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise InvalidGrammar(f"x-guidance must be an object, got {own!r:.80}")
    if own.get("lenient"):
        raise InvalidGrammar(
            "x-guidance: lenient would ignore what cannot be enforced: leave those keywords out instead"
        )
    if "u" in str(own.get("json_allowed_escapes", "")) or own.get("json_allow_general_unicode_escapes"):
        message = "x-guidance: escapes with u would spell a property's name in a way that no schema sees"
        raise InvalidGrammar(f"{message}: leave json_allowed_escapes and json_allow_general_unicode_escapes out")
    parts = list(_schemas_in(schema))
    for part in parts:
        if part is not schema and "x-guidance" in part:
            raise InvalidGrammar(
                "x-guidance holds for a whole schema: it is ignored inside of one, so move it to the top"
            )
        _check_counts(part)
        _check_numbers(part)
        make_exact(part)
    return escapes_of(parts) | own


def _check_numbers(schema: dict[str, Any]) -> None:
    """Refuse integers that the compiler reads roughly: of these, it would allow a neighbour instead."""
    kind = schema.get("type")
    is_integer = kind == "integer" or (isinstance(kind, list) and "integer" in kind)
    for keyword in (*_BOUNDS, "const", "enum"):
        for number in _numbers_in(schema.get(keyword)):
            is_meant = isinstance(number, int) or (is_integer and keyword in _BOUNDS)
            if is_meant and abs(number) > MAX_INTEGER:
                message = f"{keyword} holds {number}, and integers beyond {MAX_INTEGER} are not exact"
                raise InvalidGrammar(f"{message}: leave it out, or make it a string")


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(part)


def _check_counts(schema: dict[str, Any]) -> None:
    """Refuse a count of properties that a grammar cannot see to: the same key could come twice and count once."""
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > max(1, len(required)):
        raise InvalidGrammar(f"minProperties {least} needs as many required properties, got {len(required)}")


def _schemas_in(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `schema`, every schema inside of it, and those to which references lead, wherever these stand.

    A pointer is followed from the whole schema and from each with an id of its own: it is meant from one of them.
    """
    waiting: list[Any] = [schema]
    known: set[int] = set()
    roots: list[Any] = []
    pointers: set[str] = set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in known:
            continue
        known.add(id(part))
        yield part
        waiting += _directly_in(part)
        if not roots or "$id" in part or "id" in part:
            roots.append(part)
            waiting += [_pointed_at(pointer, part) for pointer in pointers]
        _, mark, pointer = str(part.get("$ref")).partition("#/")
        if mark and pointer not in pointers:
            pointers.add(pointer)
            waiting += [_pointed_at(pointer, root) for root in roots]


def _directly_in(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword, value in schema.items():
        if keyword in _SCHEMA_MAPS and isinstance(value, dict):
            yield from value.values()
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            yield from value
        elif keyword in _SCHEMAS:
            yield value


def _pointed_at(pointer: str, place: Any) -> Any:
    """Return what a JSON pointer, less its first slash, means from `place` on; None where there is no such thing."""
    for token in unquote(pointer).split("/"):
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            place = place.get(name) if isinstance(place, dict) else None
    return place


_WRITERS: dict[str, Callable[[StructuredOutputsParams], str]] = {
    "json": _of_schema,
    "json_object": _of_any_object,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "structural_tag": _of_structural_tag,
}
