"""Calls as Llama 3 writes them: the whole text is `{"name": ..., "parameters": {...}}`, several of them behind `;`."""

from __future__ import annotations

from collections.abc import Collection

from engine.client.parsers.json_calls import SPACE, CallObject, Progress
from engine.client.parsers.pieces import Content, Piece

START = "<|python_tag|>"


class Llama3JsonParser:
    """Reads a text that is calls from its start; from what is none on, such as other JSON, it is content."""

    MARKERS = (START,)

    def __init__(self, functions: Collection[str] | None = None) -> None:
        """Begin before the text, in which calls of `functions` may come, of any where they are not known."""
        self._functions = functions
        self._opening = ""
        self._is_content = self._has_opened = False
        self._call: CallObject | None = None
        self._num_calls = 0
        self._between = ""

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""
        pieces: list[Piece] = []
        if not self._has_opened:
            text = self._take_opening(text)
        while text and not self._is_content:
            text = self._read_call(text, self._call, pieces) if self._call else self._read_between(text)
        if text:
            pieces.append(Content(text))
        return pieces

    def finish(self) -> list[Piece]:
        """Say that there is no more; return what was held back."""
        unread = self._opening
        if self._call is not None and not self._call.has_begun:
            unread += self._between + self._call.raw
        return [Content(unread)] if unread else []

    def _take_opening(self, text: str) -> str:
        """Decide whether calls follow; return what of the text is to be read now."""
        self._opening += text
        begun = self._opening.lstrip()
        if begun.startswith(START):
            begun = begun[len(START) :].lstrip()
        if not begun or START.startswith(begun):
            return ""
        self._has_opened, self._is_content = True, not begun.startswith("{")
        whole, self._opening = self._opening, ""
        if self._is_content:
            return whole
        self._between = whole[: len(whole) - len(begun)]
        return begun

    def _read_between(self, text: str) -> str:
        """Read on between calls; what is no separator makes content of the rest."""
        for position, char in enumerate(text):
            if char == "{":
                self._call = CallObject(self._num_calls, self._functions, is_marked=False)
                return text[position:]
            if char not in SPACE and char not in ";,":
                self._is_content = True
                text, self._between = self._between + text[position:], ""
                return text
            self._between += char
        return ""

    def _read_call(self, text: str, call: CallObject, pieces: list[Piece]) -> str:
        for position, char in enumerate(text):
            progress = call.take(char)
            pieces += call.pieces()
            if progress is Progress.GOES_ON:
                continue
            rest = text[position + (progress is Progress.DONE) :]
            self._call, unread = None, "" if call.has_begun else self._between + call.raw
            self._num_calls += call.has_begun
            self._between = ""
            self._is_content = progress is Progress.FAILED
            return unread + rest
        return ""
