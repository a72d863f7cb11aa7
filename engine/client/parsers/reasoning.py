"""Reasoning between `<think>` and `</think>`, as DeepSeek-R1, Qwen 3 and others write it before their answer."""

from __future__ import annotations

import enum

from engine.client.parsers.pieces import Content, MarkerSearch, Piece, Reasoning

START, END = "<think>", "</think>"


class Opening(enum.StrEnum):
    """How a text begins, by the prompt before it."""

    INSIDE = "inside"
    """The prompt has begun the reasoning."""
    OPEN = "open"
    """The text may begin with it."""
    ANSWER = "answer"
    """The prompt has ended it: there is none."""


def opening_after(prompt: str) -> Opening:
    """Return how a text begins that follows `prompt`, the rendered conversation."""
    end = prompt.rstrip()
    if end.endswith(START):
        return Opening.INSIDE
    return Opening.ANSWER if end.endswith(END) else Opening.OPEN


class ReasoningParser:
    """Splits a text into reasoning and content; the white space at the edges of both belongs to neither."""

    def __init__(self, opening: Opening) -> None:
        """Begin as `opening` says."""
        self._state = opening
        self._search = MarkerSearch()
        self._space = ""
        self._is_after_reasoning = False
        self._has_told = False

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""
        pieces: list[Piece] = []
        if self._state is Opening.OPEN:
            text = self._take_opening(text)
        if self._state is Opening.INSIDE:
            found = self._search.take(text, END)
            pieces += self._reasoning(found.before)
            if found.marker is None:
                return pieces
            self._state, self._is_after_reasoning, self._space, text = Opening.ANSWER, True, "", found.after
        if self._state is Opening.ANSWER:
            pieces += self._content(text)
        return pieces

    def finish(self) -> list[Piece]:
        """Say that there is no more; return what was held back."""
        held, self._space = self._space + self._search.rest(), ""
        if self._state is Opening.INSIDE:
            return [Reasoning(held.rstrip())]
        return [] if self._is_after_reasoning else [Content(held)]

    def _take_opening(self, text: str) -> str:
        """Decide whether the text begins with the marker; return what follows it, or all where there is none."""
        self._space += text
        begun = self._space.lstrip()
        if begun.startswith(START):
            self._state, self._space = Opening.INSIDE, ""
            return begun[len(START) :]
        if START.startswith(begun):
            return ""
        self._state, text, self._space = Opening.ANSWER, self._space, ""
        return text

    def _reasoning(self, text: str) -> list[Piece]:
        """Tell reasoning without the white space before it and, once it has ended, behind it."""
        text = self._space + text
        if not self._has_told:
            text = text.lstrip()
        told = text.rstrip()
        self._space = text[len(told) :]
        self._has_told = self._has_told or bool(told)
        return [Reasoning(told)] if told else []

    def _content(self, text: str) -> list[Piece]:
        if self._is_after_reasoning:
            text = text.lstrip()
            self._is_after_reasoning = not text
        return [Content(text)] if text else []
