"""Server-sent events as OpenAI's clients read them: `data:` lines, `[DONE]` last, comments while it is quiet."""

from __future__ import annotations

from typing import Any

import msgspec

KEEP_ALIVE_S = 10.0
"""After so long without an event a comment is sent, so that proxies keep the stream and a vanished client shows."""
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
CONTENT_TYPE = "text/event-stream; charset=utf-8"

_encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    """Encode one event whose data is a JSON value."""
    return encoded_event(_encode(data))


def encoded_event(data: bytes) -> bytes:
    """Frame one event whose data is encoded already; it must hold no line break."""
    return b"data: " + data + b"\n\n"
