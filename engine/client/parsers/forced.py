"""Calls that a request asks for: their form is enforced by a grammar of ours, the same for all models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.client.parsers.json_calls import CallList, Progress
from engine.client.parsers.pieces import CallArguments, CallBegun, Content, Piece
from engine.structured_output.params import WHITESPACE

MAX_CALLS = 16
"""Most calls in one answer that must have one."""


def grammar_of_calls(schemas: Sequence[tuple[str, dict[str, Any]]], *, at_most_one: bool) -> str:
    """Return the grammar, in Lark's notation, of a list of calls, at least one, of functions and their schemas."""
    names = range(len(schemas))
    further = "" if at_most_one else f' (", " call){{0,{MAX_CALLS - 1}}}'
    lines = [f'start: "[" call{further} "]"', f"call: {' | '.join(f'call_{i}' for i in names)}"]
    for i, (name, schema) in enumerate(schemas):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        lines += [
            f'call_{i}: {head} arguments_{i} "}}"',
            f"arguments_{i}: %json {_compact(schema)} // schema of {name}",
        ]
    return "\n".join(lines)


def grammar_of_arguments(name: str, schema: dict[str, Any]) -> str:
    """Return the grammar of the arguments of the function `name`."""
    own = schema.get("x-guidance", {})
    options = {"whitespace_pattern": WHITESPACE} | own if isinstance(own, dict) else own
    text = json.dumps(schema | {"x-guidance": options}, ensure_ascii=False, separators=(",", ":"))
    return f"start: %json {text} // schema of {name}"


def _compact(schema: dict[str, Any]) -> str:
    """Return `schema` with no white space in what it allows, unless its own options say otherwise."""
    own = schema.get("x-guidance", {})
    options = {"whitespace_flexible": False} | own if isinstance(own, dict) else own
    return json.dumps(schema | {"x-guidance": options})


class CallListParser:
    """Reads a text that is such a list and nothing else."""

    def __init__(self) -> None:
        """Begin before the list."""
        self._calls = CallList()
        self._is_over = False

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""
        pieces: list[Piece] = []
        for position, char in enumerate(text):
            if self._is_over:
                return [*pieces, Content(text[position:])]
            progress, told = self._calls.take(char)
            pieces += told
            if progress is Progress.FAILED:
                self._is_over = True
                return [*pieces, Content(self._calls.raw + text[position:])]
            self._is_over = progress is Progress.DONE
        return pieces

    def finish(self) -> list[Piece]:
        """Say that there is no more; what has not become a call is content."""
        return [] if self._is_over or self._calls.num_calls else [Content(self._calls.raw)]


class NamedCallParser:
    """Takes the whole text as the arguments of one function."""

    def __init__(self, name: str) -> None:
        """Call the function `name`."""
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Piece]:
        """Take more of the arguments."""
        pieces: list[Piece] = [CallArguments(0, text)]
        if text and not self._has_begun:
            self._has_begun = True
            pieces.insert(0, CallBegun(0, self._name))
        return pieces if text else []

    def finish(self) -> list[Piece]:
        """Say that there is no more."""
        return []
