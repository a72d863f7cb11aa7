"""An assistant's text as OpenAI's clients read it: content, reasoning and calls of tools, whole and streamed."""

from __future__ import annotations

import secrets
from typing import Any

from engine.client.parsers.pieces import CallArguments, CallBegun, Content, Piece, Reasoning
from engine.client.parsers.registry import ChatParser

Json = dict[str, Any]
MAX_ID_CHARS = 9
"""Of a call: as many as the templates of Mistral's models take."""


class ChatReader:
    """Reads one choice; see `web.answer_form.Reader`."""

    nothing: Json = {"delta": {}}  # noqa: RUF012

    def __init__(self, parser: ChatParser, *, names_reason: bool) -> None:
        """Read with `parser`; with `names_reason` a text of whole calls ends with reason tool_calls instead of stop."""
        self._parser = parser
        self._names_reason = names_reason

    def pieces(self, text: str, ends: bool) -> list[Json]:
        """Return what the chunks hold that tell `text`."""
        return [{"delta": _delta(piece)} for piece in self._read(text, ends)]

    def whole(self, text: str) -> Json:
        """Return what a whole answer holds."""
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        for piece in self._read(text, True):
            match piece:
                case Content(more):
                    message["content"] = (message["content"] or "") + more
                case Reasoning(more):
                    message["reasoning_content"] = message.get("reasoning_content", "") + more
                case CallBegun(_, name):
                    message.setdefault("tool_calls", []).append(_call(name))
                case CallArguments(number, more):
                    message["tool_calls"][number]["function"]["arguments"] += more
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        return {"message": message}

    def reason(self, finish_reason: str) -> str:
        """Return the reason that is told for the engine's."""
        is_call = self._names_reason and self._parser.has_whole_calls and finish_reason == "stop"
        return "tool_calls" if is_call else finish_reason

    def _read(self, text: str, ends: bool) -> list[Piece]:
        return self._parser.feed(text) + (self._parser.finish() if ends else [])


def _delta(piece: Piece) -> Json:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegun(number, name):
            return {"tool_calls": [{"index": number, **_call(name)}]}
        case CallArguments(number, text):
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


def _call(name: str) -> Json:
    call_id = secrets.token_hex(MAX_ID_CHARS)[:MAX_ID_CHARS]
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
