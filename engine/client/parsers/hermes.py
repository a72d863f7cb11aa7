"""Calls as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number."""

from __future__ import annotations

from engine.client.parsers.json_calls import CallObject, Progress
from engine.client.parsers.pieces import ContentWriter, MarkerSearch, Piece

START, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """Reads calls between tags; text outside of them is content."""

    MARKERS = (START, END)

    def __init__(self) -> None:
        """Begin outside of a call."""
        self._content = ContentWriter()
        self._search = MarkerSearch()
        self._num_calls = 0
        self._call: CallObject | None = None

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""
        pieces: list[Piece] = []
        while text:
            if self._call is not None:
                text = self._read_call(text, self._call, pieces)
                continue
            found = self._search.take(text, *((START, END) if self._num_calls else (START,)))
            pieces += self._content.write(found.before)
            if found.marker == START:
                self._call = CallObject(self._num_calls)
            text = found.after
        return pieces

    def finish(self) -> list[Piece]:
        """Say that there is no more; return what was held back."""
        unread = START + self._call.raw if self._call is not None and not self._call.has_begun else ""
        return [*self._content.write(unread + self._search.rest()), *self._content.finish()]

    def _read_call(self, text: str, call: CallObject, pieces: list[Piece]) -> str:
        """Read on in a call; return what follows it, if it ends here."""
        for position, char in enumerate(text):
            progress = call.take(char)
            if call.has_begun:
                self._content.call()
            pieces += call.pieces()
            if progress is Progress.GOES_ON:
                continue
            self._call = None
            self._num_calls += call.has_begun
            if not call.has_begun:
                pieces += self._content.write(START + call.raw)
            return text[position + (progress is Progress.DONE) :]
        return ""
