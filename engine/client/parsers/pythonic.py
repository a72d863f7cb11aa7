"""Calls as Llama 3.2 and 4 write them: the whole text is a list of Python calls, `[f(x=1), g(y="a")]`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection

from engine.client.parsers.json_calls import MAX_NESTING, SPACE, spelled
from engine.client.parsers.pieces import CallArguments, CallBegun, Content, Piece

START = "["
MAX_CALL_CHARS = 65_536
"""A longer call is content: it is read as a whole."""
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,255}")
"""It is read anew with each character, so that it must have an end."""


class PythonicParser:
    """Reads a text that is such a list from its start; from what is no call on, it is content."""

    MARKERS = ()

    def __init__(self, functions: Collection[str] | None = None) -> None:
        """Begin before the text, in which calls of `functions` may come, of any where they are not known."""
        self._functions = functions
        self._between: list[str] = []
        self._has_opened = self._has_ended = self._is_content = False
        self._call = _CallText()
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""
        pieces: list[Piece] = []
        for position, char in enumerate(text):
            if self._is_content:
                return [*pieces, Content(text[position:])]
            pieces += self._take(char)
        return pieces

    def finish(self) -> list[Piece]:
        """Say that there is no more; return what was held back."""
        unread = "".join(self._between) + self._call.text
        return [Content(unread)] if unread.strip() or not self._num_calls else []

    def _take(self, char: str) -> list[Piece]:
        if self._call.has_begun:
            return self._take_in_call(char)
        if char in SPACE:
            self._between.append(char)
        elif not self._has_opened and char == START:
            self._has_opened = True
            self._between.append(char)
        elif self._has_opened and not self._has_ended and (char == "," or char == "]"):
            self._has_ended = char == "]"
            self._between.append(char)
            if self._has_ended and self._num_calls:
                self._between.clear()
        elif self._has_opened and not self._has_ended and (char.isalpha() or char == "_"):
            return self._take_in_call(char)
        else:
            return self._give_up(char)
        return []

    def _take_in_call(self, char: str) -> list[Piece]:
        is_whole = self._call.take(char)
        if is_whole is None:
            return self._give_up("")
        if not is_whole:
            return []
        parsed = _parsed(self._call.text)
        if parsed is None or (self._functions is not None and parsed[0] not in self._functions):
            return self._give_up("")
        self._call, index = _CallText(), self._num_calls
        self._between.clear()
        self._num_calls += 1
        return [CallBegun(index, parsed[0]), CallArguments(index, parsed[1])]

    def _give_up(self, char: str) -> list[Piece]:
        unread = "".join(self._between) + self._call.text + char
        self._is_content, self._call = True, _CallText()
        self._between.clear()
        return [Content(unread)]


class _CallText:
    """The text of one call, up to the bracket that closes it."""

    def __init__(self) -> None:
        self._read: list[str] = []
        self._closings: list[str] = []
        self._quote = ""
        self._is_escaped = False

    @property
    def has_begun(self) -> bool:
        return bool(self._read)

    @property
    def text(self) -> str:
        return "".join(self._read)

    def take(self, char: str) -> bool | None:
        """Read one more character; whether the call is whole, None where it is none."""
        self._read.append(char)
        if len(self._read) > MAX_CALL_CHARS:
            return None
        if self._quote:
            is_end = char == self._quote and not self._is_escaped
            self._is_escaped = char == "\\" and not self._is_escaped
            self._quote = "" if is_end else self._quote
        elif not self._closings:
            if char == "(":
                self._closings.append(")")
            elif _NAME.fullmatch(self.text) is None:
                return None
        elif char in "\"'":
            self._quote = char
        elif char in _CLOSING:
            self._closings.append(_CLOSING[char])
            return None if len(self._closings) > MAX_NESTING else False
        elif char in ")]}":
            return (not self._closings) if self._closings.pop() == char else None
        return False


def _parsed(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of a call with keyword arguments that are literals; else None."""
    name, _, arguments = text.partition("(")
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that mean nothing
            call = ast.parse(f"f({arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        values = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
        return name, spelled(json.dumps(values, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> object:
    """Return the value of a literal; JSON's own words are understood too, wherever they stand."""
    return ast.literal_eval(_WithWords().visit(node))


class _WithWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


_WORDS = {"true": True, "false": False, "null": None}
