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
BOUNDED_SPACES = {"whitespace_pattern": WHITESPACE}
NO_SPACES = {"whitespace_flexible": False}


def grammar_of_calls(schemas: Sequence[tuple[str, dict[str, Any]]], *, at_most_one: bool) -> str:
    """Return the grammar, in Lark's notation, of a list of calls, at least one, of functions and their schemas."""
    names = range(len(schemas))
    further = "" if at_most_one else f' (", " call){{0,{MAX_CALLS - 1}}}'
    lines = [f'start: "[" call{further} "]"', f"call: {' | '.join(f'call_{i}' for i in names)}"]
    for i, (name, schema) in enumerate(schemas):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        lines += [f'call_{i}: {head} arguments_{i} "}}"', arguments_rule(f"arguments_{i}", name, schema, NO_SPACES)]
    return "\n".join(lines)


def grammar_of_arguments(name: str, schema: dict[str, Any]) -> str:
    """Return the grammar of the arguments of the function `name`."""
    return arguments_rule("start", name, schema, BOUNDED_SPACES)


def arguments_rule(rule: str, name: str, schema: dict[str, Any], spaces: dict[str, Any]) -> str:
    """Return the `rule` of the arguments of the function `name`, with `spaces` unless its own options say otherwise.

    It takes as many characters as the user wrote, for these are counted.
    """
    own = schema.get("x-guidance", {})
    options = spaces | own if isinstance(own, dict) else own
    text = json.dumps(schema | {"x-guidance": options}, ensure_ascii=False, separators=(",", ":"))
    return f"{rule}: %json {text} // schema of {name}"


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
