"""Calls that are written as JSON, read a character at a time: one value, one call, a list of calls."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection
from typing import Any

from engine.client.parsers.pieces import CallArguments, CallBegun, Piece

SPACE = " \t\n\r"
_CLOSING = {"{": "}", "[": "]"}
MAX_NESTING = 256
"""Brackets in one another after which a value is none."""


class Progress(enum.Enum):
    """How far the reading of something is."""

    GOES_ON = enum.auto()
    DONE = enum.auto()
    """With this character."""
    DONE_BEFORE = enum.auto()
    """With the one before: this one is not part of it."""
    FAILED = enum.auto()
    """It is not what it should be; this character is not read."""


class JsonValue:
    """Finds the end of one JSON value; what stands between its brackets is not checked."""

    def __init__(self) -> None:
        """Await its first character, which is no white space."""
        self._closings: list[str] = []
        self._in_string = self._is_escaped = self._has_begun = False
        self._is_word = False

    def take(self, char: str) -> Progress:
        """Read one more character."""
        if self._in_string:
            return self._take_in_string(char)
        if not self._has_begun:
            self._has_begun = True
            self._is_word = char not in '"{['
            if self._is_word and not (char.isalnum() or char == "-"):
                return Progress.FAILED
        if self._is_word:
            return Progress.DONE_BEFORE if char in ",}];" or char in SPACE else Progress.GOES_ON
        if char == '"':
            self._in_string = True
        elif char in _CLOSING:
            self._closings.append(_CLOSING[char])
            if len(self._closings) > MAX_NESTING:
                return Progress.FAILED
        elif char in "}]":
            if self._closings.pop() != char:
                return Progress.FAILED
            return Progress.GOES_ON if self._closings else Progress.DONE
        return Progress.GOES_ON

    def _take_in_string(self, char: str) -> Progress:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            return Progress.GOES_ON if self._closings else Progress.DONE
        return Progress.GOES_ON


class ArgumentsEnd:
    """Finds whether a call's arguments have come whole: an object may come in parts, anything else comes at once."""

    def __init__(self) -> None:
        """Await the first part."""
        self._value: JsonValue | None = None
        self.is_reached = False

    def take(self, text: str) -> None:
        """Take in more of them."""
        if self._value is None:
            self._value = JsonValue()
            self.is_reached = not text.startswith("{")
        self.is_reached = self.is_reached or any(self._value.take(char) is not Progress.GOES_ON for char in text)


class _At(enum.Enum):
    """What a call's object has come to."""

    OPENING = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


class CallObject:
    """One JSON object with a function's name and its arguments, in any order, beside whatever else."""

    def __init__(self, index: int, functions: Collection[str] | None = None, *, is_marked: bool = True) -> None:
        """Read the call of number `index`.

        Where no marker says that it is one, the object is a call if it has the name of one of `functions`, of any
        where they are not known, and arguments.
        """
        self.index = index
        self._functions = functions
        self._is_marked = is_marked
        self._name: str | None = None
        self.has_begun = False
        self._read: list[str] = []
        self._at = _At.OPENING
        self._key = ""
        self._text: list[str] = []
        self._value: JsonValue | None = None
        self._arguments: str | None = None
        self._is_streamed = False
        self._pieces: list[Piece] = []

    def take(self, char: str) -> Progress:
        """Read one more character; `pieces` has what it brought."""
        progress = self._take_in_value(char) if self._value else self._take_between(char)
        if progress is Progress.DONE and not self._finish():
            progress = Progress.FAILED
        if progress is not Progress.FAILED and not self.has_begun:
            self._read.append(char)
        return progress

    @property
    def raw(self) -> str:
        """What was read of a call that has not begun, and must not be lost."""
        return "" if self.has_begun else "".join(self._read)

    def pieces(self) -> list[Piece]:
        """Return what is new since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _take_between(self, char: str) -> Progress:
        if char in SPACE:
            return Progress.GOES_ON
        match self._at, char:
            case _At.OPENING, "{":
                self._at = _At.FIRST_KEY
            case ((_At.FIRST_KEY | _At.COMMA), "}"):
                return Progress.DONE
            case _At.COMMA, ",":
                self._at = _At.KEY
            case ((_At.FIRST_KEY | _At.KEY), '"'):
                self._at = _At.KEY
                return self._begin_value(char)
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.VALUE, _:
                return self._begin_value(char)
            case _:
                return Progress.FAILED
        return Progress.GOES_ON

    def _begin_value(self, char: str) -> Progress:
        self._value, self._text = JsonValue(), []
        is_arguments = self._at is _At.VALUE and self._key in ("arguments", "parameters")
        self._is_streamed = is_arguments and char == "{" and self._name is not None and self._arguments is None
        if self._is_streamed:
            self._begin()
            self._arguments = ""
        return self._take_in_value(char)

    def _take_in_value(self, char: str) -> Progress:
        assert self._value is not None
        progress = self._value.take(char)
        if progress is Progress.FAILED:
            return progress
        if progress is not Progress.DONE_BEFORE:
            if self._is_streamed:
                self._pieces.append(CallArguments(self.index, char))
            else:
                self._text.append(char)
        if progress is Progress.GOES_ON:
            return progress
        self._value = None
        if not self._is_streamed and not self._end_value():
            return Progress.FAILED
        self._is_streamed = False
        self._at = _At.COLON if self._at is _At.KEY else _At.COMMA
        return self._take_between(char) if progress is Progress.DONE_BEFORE else Progress.GOES_ON

    def _end_value(self) -> bool:
        """Take in a key or a value that was not told as it came; False where it cannot be what it should."""
        text = "".join(self._text)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            if self._at is _At.KEY or self._key == "name":
                return False
            value = None
        if self._at is _At.KEY:
            self._key = value
        elif self._key == "name" and not self.has_begun:
            return self._take_name(value)
        elif self._key in ("arguments", "parameters") and self._arguments is None:
            self._arguments = _as_arguments(value, text)
            if not self._is_marked and not _is_object(self._arguments):
                return False
            if self._name is not None:
                self._begin()
                self._pieces.append(CallArguments(self.index, self._arguments))
        return True

    def _take_name(self, name: Any) -> bool:
        if not isinstance(name, str) or not name or spelled(name) != name:
            return False
        if self._functions is not None and name not in self._functions:
            return False
        self._name = name
        if self._is_marked or self._arguments is not None:
            self._begin()
        if self._arguments is not None:
            self._pieces.append(CallArguments(self.index, self._arguments))
        return True

    def _begin(self) -> None:
        """Tell that there is a call, once."""
        assert self._name is not None
        if not self.has_begun:
            self.has_begun = True
            self._pieces.append(CallBegun(self.index, self._name))

    def _finish(self) -> bool:
        if self.has_begun and self._arguments is None:
            self._pieces.append(CallArguments(self.index, "{}"))
        return self.has_begun


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _as_arguments(value: Any, text: str) -> str:
    """Return arguments that are no plain object as one: null for none, and a text that holds them."""
    if value is None and text == "null":
        return "{}"
    return spelled(value) if isinstance(value, str) else text


def spelled(text: str) -> str:
    r"""Return `text` with each lone surrogate, which is no character and cannot be sent, as JSON's escape, `\ud800`."""
    return text.encode(errors="backslashreplace").decode()


class CallList:
    """A JSON list of such objects.

    Attributes:
        num_calls: The number of the next call.
    """

    def __init__(self, first_index: int = 0) -> None:
        """Number the calls from `first_index` on."""
        self.num_calls = first_index
        self._between: list[str] = []
        self._call: CallObject | None = None
        self._has_opened = self._awaits_comma = False

    @property
    def raw(self) -> str:
        """What was read since the last call that has begun, and must not be lost."""
        if self._call is None:
            return "".join(self._between)
        return "" if self._call.has_begun else "".join(self._between) + self._call.raw

    @property
    def has_begun(self) -> bool:
        """Whether the call that is read now has begun."""
        return self._call is not None and self._call.has_begun

    def take(self, char: str) -> tuple[Progress, list[Piece]]:
        """Read one more character; return also what it brought."""
        if self._call is not None:
            return self._take_in_call(char, self._call)
        if char == "{" and self._has_opened and not self._awaits_comma:
            self._call = CallObject(self.num_calls)
            return self._take_in_call(char, self._call)
        progress = self._take_between(char)
        if progress is Progress.GOES_ON:
            self._between.append(char)
        return progress, []

    def _take_in_call(self, char: str, call: CallObject) -> tuple[Progress, list[Piece]]:
        progress = call.take(char)
        if call.has_begun:
            self._between.clear()
        if progress is Progress.DONE:
            self._call, self._awaits_comma, self.num_calls = None, True, self.num_calls + 1
            progress = Progress.GOES_ON
        elif progress is Progress.FAILED:
            self.num_calls += call.has_begun
        return progress, call.pieces()

    def _take_between(self, char: str) -> Progress:
        if char in SPACE:
            return Progress.GOES_ON
        match self._has_opened, self._awaits_comma, char:
            case False, _, "[":
                self._has_opened = True
            case True, True, ",":
                self._awaits_comma = False
            case True, _, "]":
                return Progress.DONE
            case _:
                return Progress.FAILED
        return Progress.GOES_ON
