"""Calls as Mistral writes them: behind `[TOOL_CALLS]` a JSON list of them, or `name{...}` or `name[ARGS]{...}`."""

from __future__ import annotations

import re

from engine.client.parsers.json_calls import SPACE, CallList, JsonValue, Progress
from engine.client.parsers.pieces import CallArguments, CallBegun, ContentWriter, MarkerSearch, Piece

START, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"[\w.-]{1,256}(\[(A(R(G(S(])?)?)?)?)?)?")
"""A function's name, and the beginnings of what may follow it."""


class MistralParser:
    """Reads calls behind their marker; text before it is content."""

    MARKERS = (START, ARGUMENTS)

    def __init__(self) -> None:
        """Begin before a marker."""
        self._content = ContentWriter()
        self._search = MarkerSearch()
        self._num_calls = 0
        self._reading: CallList | _NamedCall | None = None
        self._space = ""
        self._is_behind_marker = False

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""
        pieces: list[Piece] = []
        while text:
            if self._reading is not None:
                text = self._read(text, self._reading, pieces)
            elif self._is_behind_marker:
                text = self._choose(text)
            else:
                found = self._search.take(text, START)
                pieces += self._content.write(found.before)
                self._is_behind_marker, self._space, text = found.marker is not None, "", found.after
        return pieces

    def finish(self) -> list[Piece]:
        """Say that there is no more; return what was held back."""
        unread = self._search.rest()
        if self._is_behind_marker:
            unread = START + self._space
        elif self._reading is not None:
            unread = self._unread(self._reading)
        return [*self._content.write(unread), *self._content.finish()]

    def _unread(self, reading: CallList | _NamedCall) -> str:
        """Return what was read and is no call, the marker included where no call came behind it."""
        if reading.num_calls > self._num_calls or reading.has_begun:
            return reading.raw
        return START + self._space + reading.raw

    def _choose(self, text: str) -> str:
        """Begin to read what follows the marker, by its first character."""
        rest = text.lstrip(SPACE)
        self._space += text[: len(text) - len(rest)]
        if rest:
            self._is_behind_marker = False
            self._reading = CallList(self._num_calls) if rest[0] == "[" else _NamedCall(self._num_calls)
        return rest

    def _read(self, text: str, reading: CallList | _NamedCall, pieces: list[Piece]) -> str:
        for position, char in enumerate(text):
            progress, told = reading.take(char)
            if told:
                self._content.call()
            pieces += told
            if progress is Progress.GOES_ON:
                continue
            if progress is Progress.FAILED:
                pieces += self._content.write(self._unread(reading))
            self._num_calls, self._reading = reading.num_calls, None
            return text[position + (progress is Progress.DONE) :]
        return ""


class _NamedCall:
    """One call whose name stands before its JSON object."""

    def __init__(self, index: int) -> None:
        self.num_calls = index
        self.raw = ""
        self._value: JsonValue | None = None

    @property
    def has_begun(self) -> bool:
        return self._value is not None

    def take(self, char: str) -> tuple[Progress, list[Piece]]:
        if self._value is not None:
            progress = self._value.take(char)
            told = [] if progress is Progress.FAILED else [CallArguments(self.num_calls, char)]
            self.num_calls += progress is not Progress.GOES_ON
            return progress, [*told]
        name = self.raw.removesuffix(ARGUMENTS)
        if char == "{" and name and "[" not in name:
            self._value, self.raw = JsonValue(), ""
            self._value.take(char)
            return Progress.GOES_ON, [CallBegun(self.num_calls, name), CallArguments(self.num_calls, char)]
        if _NAME.fullmatch(self.raw + char) is None:
            return Progress.FAILED, []
        self.raw += char
        return Progress.GOES_ON, []
