"""Who may ask: with an API key set, every route but the open ones wants it as bearer token.

Open are what probes and browsers need before they can know a key: `/health`, `/ping`, and the page, which asks for it.
"""

from __future__ import annotations

import hmac
import os

from engine.config import ServeConfig
from web.errors import error_body
from web.scope import App, Message, Receive, Send

OPEN_PATHS = frozenset({"/", "/health", "/ping"})
_SCHEME = b"bearer "


def api_key_of(config: ServeConfig) -> str | None:
    """Return the key that clients must send: the setting's, else the environment's, else none."""
    return config.api_key or os.environ.get("METRONOME_API_KEY", "").strip() or None


class KeyCheck:
    """ASGI middleware: answers 401 in place of `app` to whoever does not send the key."""

    def __init__(self, app: App, api_key: str) -> None:
        """Guard `app` with `api_key`."""
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["path"] in OPEN_PATHS or self._is_sent_in(scope):
            return await self._app(scope, receive, send)
        body = error_body(401, "no valid API key: send it as 'Authorization: Bearer KEY'", code="invalid_api_key")
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"www-authenticate", b"Bearer"),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _is_sent_in(self, scope: Message) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) != 1 or not sent[0].lower().startswith(_SCHEME):
            return False
        # In constant time, so that nobody can find the key byte by byte.
        return hmac.compare_digest(sent[0][len(_SCHEME) :].strip(), self._key)
