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
from engine.structured_output.formats import make_exact
from engine.structured_output.params import WHITESPACE, StructuredOutputsParams

MAX_SHOWN_CHARS = 80
"""Of the text by which a structure is told."""
MAX_INTEGER = 2**53
"""Up to it the compiler, which computes in binary64, tells integers apart; below zero likewise."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Masks then allow every spelling in tokens, not one that is computed: what is allowed is what is accepted."""
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""How a rule of GBNF begins, and none of Lark's."""
_INLINE_SCHEMA = re.compile(r"%json\s*(?={)")
SCHEMA_OF = re.compile(r".*// (schema of .+)$")
"""Says at a line's end whose schema it holds, which is told of what is wrong with it."""
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
    for found in reversed(list(_INLINE_SCHEMA.finditer(grammar))):
        grammar = _with_inline_checked(grammar, found.end())
    if _GBNF.search(grammar) is None:
        return grammar
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the library raises nothing more precise
        raise InvalidGrammar(f"the grammar cannot be read as GBNF: {error!s:.200}") from None


def _with_inline_checked(grammar: str, start: int) -> str:
    """Return `grammar` with the schema that stands there ready to compile; what is no JSON is the compiler's to refuse.

    It is written in one line but for its first bracket, so that what follows keeps its line.
    """
    try:
        schema, end = json.JSONDecoder().raw_decode(grammar, start)
    except (ValueError, RecursionError):
        return grammar
    whose = SCHEMA_OF.search(grammar[end:].partition("\n")[0])
    with _told_of(whose[1] if whose else ""):
        _prepare(schema)
    lines = "\n" * grammar.count("\n", start, end)
    return f"{grammar[:start]}{{{lines}{json.dumps(schema)[1:]}{grammar[end:]}"


def _of_structural_tag(params: StructuredOutputsParams) -> str:
    """Return free text in which each trigger begins one of its structures."""
    tag = json.loads(params.structural_tag or "")
    triggers: list[str] = list(dict.fromkeys(tag["triggers"]))
    lines = [r"TEXT: /(?s:.*)/"]
    lines += [f"trigger_{i}[lazy]: TEXT {json.dumps(trigger)}" for i, trigger in enumerate(triggers)]
    for index, structure in enumerate(tag["structures"]):
        number = next(i for i, trigger in enumerate(triggers) if structure["begin"].startswith(trigger))
        begin = structure["begin"].removeprefix(triggers[number])
        whose = f"schema of structures[{index}], which begins with {json.dumps(structure['begin'])[:MAX_SHOWN_CHARS]}"
        with _told_of(whose):
            parts = [_literal(begin), _json_rule(structure["schema"], params), _literal(structure["end"])]
        lines.append(f"tag_{index}: trigger_{number} {' '.join(filter(None, parts))} // {whose}")
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
    """Check `schema` and have it say exactly what the compiler takes roughly, in place; return the options it sets."""
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise InvalidGrammar(f"x-guidance must be an object, got {own!r:.80}")
    if own.get("lenient"):
        raise InvalidGrammar(
            "x-guidance: lenient would ignore what cannot be enforced: leave those keywords out instead"
        )
    for part in list(_schemas_in(schema)):
        if part is not schema and "x-guidance" in part:
            raise InvalidGrammar(
                "x-guidance holds for a whole schema: it is ignored inside of one, so move it to the top"
            )
        _check_counts(part)
        _check_numbers(part)
        make_exact(part)
    return own


def _check_numbers(schema: dict[str, Any]) -> None:
    """Refuse integers that the compiler reads roughly: of these, it would allow a neighbour instead."""
    kind = schema.get("type")
    is_integer = kind == "integer" or (isinstance(kind, list) and "integer" in kind)
    for keyword in (*_BOUNDS, "const", "enum"):
        for number in _numbers_in(schema.get(keyword)):
            is_meant = isinstance(number, int) or (is_integer and keyword in _BOUNDS)
            if is_meant and abs(number) > MAX_INTEGER:
                message = f"json: {keyword} holds {number}, and integers beyond {MAX_INTEGER} are not exact"
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
        raise InvalidGrammar(f"json: minProperties {least} needs as many required properties, got {len(required)}")


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
