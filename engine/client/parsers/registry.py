"""Which parsers there are, by name, and which of them a model's chat template speaks of."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from engine.client.parsers import hermes, mistral, reasoning
from engine.client.parsers.free import FormOfCalls, calls_alone, tagged_calls
from engine.client.parsers.hermes import HermesParser
from engine.client.parsers.json_calls import ArgumentsEnd
from engine.client.parsers.llama3_json import Llama3JsonParser
from engine.client.parsers.mistral import MistralParser
from engine.client.parsers.pieces import CallArguments, CallBegun, Content, Parser, Piece, Reasoning, merged
from engine.client.parsers.pythonic import PythonicParser
from engine.client.parsers.reasoning import Opening, ReasoningParser


class ToolFormat(NamedTuple):
    """How a family of models writes calls.

    Attributes:
        make_parser: Makes what reads them, given the functions that may be called, None where they are not known.
        markers: Tokens by which they are found; shown to the parser also where they are special.
        signs: What a chat template of such models holds.
        form_of_calls: The form of a text whose calls are valid ones; None where no grammar can say it.
    """

    make_parser: Callable[[Collection[str] | None], Parser]
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    form_of_calls: FormOfCalls | None = None


TOOL_FORMATS = {
    "hermes": ToolFormat(
        lambda _functions: HermesParser(),
        HermesParser.MARKERS,
        ("<tool_call>",),
        tagged_calls(hermes.START, "\n", f"\n{hermes.END}"),
    ),
    "mistral": ToolFormat(
        lambda _functions: MistralParser(),
        MistralParser.MARKERS,
        ("[TOOL_CALLS]",),
        tagged_calls(mistral.START, "[", "]"),
    ),
    "llama3_json": ToolFormat(
        Llama3JsonParser, Llama3JsonParser.MARKERS, ("<|python_tag|>", '"parameters":'), calls_alone
    ),
    "pythonic": ToolFormat(PythonicParser, PythonicParser.MARKERS, ("[func_name1(",)),
}
"""The families, in the order in which their signs are looked for."""


def tool_format(name: str, template: str, *, shows_tools: bool) -> ToolFormat | None:
    """Return the format of that name, None where there is none.

    Of `auto` the one that `template` speaks of; a model that is not shown tools in a form of its own is told Hermes'.
    """
    if name == "auto" and not shows_tools:
        return TOOL_FORMATS["hermes"]
    if name == "auto":
        found = (known for known in TOOL_FORMATS.values() if any(sign in template for sign in known.signs))
        return next(found, None)
    return TOOL_FORMATS.get(name)


def writes_reasoning(name: str, template: str) -> bool:
    """Whether a model writes reasoning: `think` says so, and of `auto` its template."""
    return name == "think" or (name == "auto" and reasoning.START in template and reasoning.END in template)


class ChatParser:
    """Reads an answer: reasoning first, then content and calls. Owns no resources."""

    def __init__(self, opening: Opening | None, tools: Parser | None, *, at_most_one_call: bool = False) -> None:
        """Read reasoning if the answer begins in some `opening`, and calls with `tools`.

        With `at_most_one_call` those after the first are left out.
        """
        self._reasoning = None if opening is None else ReasoningParser(opening)
        self._tools = tools
        self._at_most_one_call = at_most_one_call
        self._last_arguments = ArgumentsEnd()

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, and none was cut."""
        return self._last_arguments.is_reached

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now, neighbours joined."""
        return self._told(self._reasoning.feed(text) if self._reasoning else [Content(text)])

    def finish(self) -> list[Piece]:
        """Say that there is no more; return what was held back."""
        pieces = self._told(self._reasoning.finish() if self._reasoning else [])
        return merged([*pieces, *self._kept(self._tools.finish() if self._tools else [])])

    def _told(self, split: list[Piece]) -> list[Piece]:
        """Give content to the parser of calls."""
        if self._tools is None:
            return merged(split)
        pieces: list[Piece] = []
        for piece in split:
            pieces += self._kept(self._tools.feed(piece.text)) if isinstance(piece, Content) else [piece]
        return merged(pieces)

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        if self._at_most_one_call:
            pieces = [piece for piece in pieces if isinstance(piece, Content | Reasoning) or piece.number == 0]
        for piece in pieces:
            match piece:
                case CallBegun():
                    self._last_arguments = ArgumentsEnd()
                case CallArguments(_, text):
                    self._last_arguments.take(text)
        return pieces
