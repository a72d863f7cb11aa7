"""How answers look: what is said of a choice in chunks and as a whole, and who reads its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from engine.client.output_processor import Logprobs
from engine.client.stream import Stream
from engine.client.tokenizer import Tokenizer
from web.logprobs import TextPlace

Json = dict[str, Any]


class AnswerForm(NamedTuple):
    """How one kind of answer looks.

    Attributes:
        id_prefix: Of the answer's id.
        kind: `object` of a whole answer.
        chunk_kind: `object` of a streamed chunk.
        opening: What a choice's first chunk holds, before any text; None for no such chunk.
        piece: New text → what a chunk's choice holds.
        ending: What the chunk with the finish reason holds.
        whole: All text → what a whole answer's choice holds.
        logprobs: Logprobs, the tokenizer, where their text begins → what a choice holds of them.
        has_prompt_logprobs_in_choice: Whether those of the prompt stand in its choices, not beside them.
    """

    id_prefix: str
    kind: str
    chunk_kind: str
    opening: Json | None
    piece: Callable[[str], Json]
    ending: Json
    whole: Callable[[str], Json]
    logprobs: Callable[[Logprobs, Tokenizer, TextPlace], Json]
    has_prompt_logprobs_in_choice: bool


class Reader(Protocol):
    """Reads the text of one choice.

    Attributes:
        nothing: What a chunk holds that tells no text.
    """

    nothing: Json

    def pieces(self, text: str, ends: bool) -> list[Json]:
        """Return what the chunks hold that tell `text`, the last one if it `ends`."""

    def whole(self, text: str) -> Json:
        """Return what a whole answer holds; for a choice that is not read by pieces."""

    def reason(self, finish_reason: str) -> str:
        """Return the finish reason that is told for the engine's; asked last."""


class PlainReader:
    """All text is content, as the form of the answer has it."""

    def __init__(self, form: AnswerForm) -> None:
        """Fill choices of `form`."""
        self._form = form
        self.nothing = form.piece("")

    def pieces(self, text: str, ends: bool) -> list[Json]:
        """Return one filling for `text`, if there is any."""
        return [self._form.piece(text)] if text else []

    def whole(self, text: str) -> Json:
        """Return the filling of a whole answer."""
        return self._form.whole(text)

    def reason(self, finish_reason: str) -> str:
        """Return it as it is."""
        return finish_reason


MakeReader = Callable[[Stream], Reader | None]
