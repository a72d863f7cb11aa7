"""What parsers give: pieces of content, reasoning and calls, and the seam to those who read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model writes for itself."""

    text: str


class CallBegun(NamedTuple):
    """The call `number` is one of the function `name`; its arguments follow."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the call `number`: put together, what the model wrote as JSON."""

    number: int
    text: str


Piece = Content | Reasoning | CallBegun | CallArguments


class Parser(Protocol):
    """Takes a text as it comes. Owns no resources."""

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""

    def finish(self) -> list[Piece]:
        """Say that there is no more; return what was held back."""


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return `pieces` without empty ones, neighbours of one kind joined."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        match last, piece:
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                joined[-1] = Reasoning(before + text)
            case (CallArguments(number, before), CallArguments(other, text)) if number == other:
                joined[-1] = CallArguments(number, before + text)
            case (_, CallBegun()):
                joined.append(piece)
            case (_, Content(text) | Reasoning(text) | CallArguments(_, text)) if text:
                joined.append(piece)
    return joined


class Found(NamedTuple):
    """What `MarkerSearch` found.

    Attributes:
        before: Text that stands before the marker, as far as it is certain.
        marker: Which one came; None while none has.
        after: What follows it.
    """

    before: str
    marker: str | None = None
    after: str = ""


class MarkerSearch:
    """Finds the first of some markers in a text that comes in parts; what may be one's beginning is held back."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._held = ""

    def take(self, text: str, *markers: str) -> Found:
        """Search on in `text`."""
        text = self._held + text
        places = {text.find(marker): marker for marker in markers if marker in text}
        if places:
            self._held = ""
            start = min(places)
            return Found(text[:start], places[start], text[start + len(places[start]) :])
        end = len(text) - max(_num_begun(text, marker) for marker in markers)
        self._held = text[end:]
        return Found(text[:end])

    def rest(self) -> str:
        """Return what is held back, and hold nothing."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    most = min(len(marker) - 1, len(text))
    return next(n for n in range(most, -1, -1) if text.endswith(marker[:n]))


class ContentWriter:
    """Tells content without the white space around calls."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._space = ""
        self._is_beside_call = False

    def write(self, text: str) -> list[Piece]:
        """Return `text` as content, but for white space at its end, which is told with what follows it."""
        told = (self._space + text).rstrip()
        self._space = (self._space + text)[len(told) :]
        return [Content(told)] if told else []

    def call(self) -> None:
        """Drop the white space before a call."""
        self._space = ""
        self._is_beside_call = True

    def finish(self) -> list[Piece]:
        """Return white space at the end of a text without calls."""
        space, self._space = self._space, ""
        return [Content(space)] if space and not self._is_beside_call else []
