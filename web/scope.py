"""One request is one scope: what a handler enters on it ends when the ASGI call ends, however that comes about.

A handler's own `async with` would not do: the body of a stream is sent after the handler has returned, and a client
that leaves in between would leave the generation running. So the scope lies around the whole application::

    Connection → RequestScope → Quart → handler ─ enters eng.generate(...) on the scope
                     │                     └ body generator
                     └ leaving it: streams closed (= aborted), tasks ended, one line of access log
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, cast

import trio
from quart import request

from web.errors import error_body

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_KEY = "metronome.request_scope"
_ABSOLUTE_FORM = re.compile(r"https?://[^/]*(?P<path>/.*)?", re.ASCII)
_LABEL = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestScope:
    """The life of one HTTP request.

    Attributes:
        request_id: The client's `X-Request-Id`, or a drawn one; a label for people, never a key.
        stack: Closed when the request is over, in any way.
        nursery: For tasks of this request; cancelled when the request is over.
        status: Of the response, once it has begun.
    """

    def __init__(self, request_id: str, stack: contextlib.AsyncExitStack, nursery: trio.Nursery) -> None:
        """Made by `RequestScopes` alone."""
        self.request_id = request_id
        self.stack = stack
        self.nursery = nursery
        self.status: int | None = None

    @staticmethod
    def current() -> RequestScope:
        """Return the scope of the request that the calling handler answers."""
        scope: RequestScope = cast(Message, request.scope)[_KEY]
        return scope


class RequestScopes:
    """ASGI middleware: opens a `RequestScope` for each HTTP request around `app`."""

    def __init__(self, app: App, *, root_path: str = "") -> None:
        """Wrap `app`, an ASGI callable; `root_path` is taken off the paths that begin with it."""
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request; leaving the call has ended all that belongs to it."""
        started = trio.current_time()
        async with trio.open_nursery() as nursery, contextlib.AsyncExitStack() as stack:
            request_scope = RequestScope(_request_id(scope), stack, nursery)
            scope[_KEY] = request_scope
            try:
                await self._answer(scope, receive, _labelled(send, request_scope))
            finally:
                nursery.cancel_scope.cancel()
                _log_access(scope, request_scope, trio.current_time() - started)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith("/"):
            absolute = _ABSOLUTE_FORM.fullmatch(scope["path"])
            if absolute is None:
                return await _refuse_target(scope["path"], send)
            scope["path"] = absolute["path"] or "/"
        if self._root_path and f"{scope['path']}/".startswith(f"{self._root_path}/"):
            scope["path"] = scope["path"].removeprefix(self._root_path) or "/"
        return await self._app(scope, receive, send)


def _log_access(scope: Message, request_scope: RequestScope, duration_s: float) -> None:
    level = logging.INFO if scope["method"] == "POST" else logging.DEBUG  # probes and scrapers are many
    status = request_scope.status or "left before an answer"
    path = scope["raw_path"].decode("ascii")
    logger.log(level, "%s %s: %s in %.3f s, %s", scope["method"], path, status, duration_s, request_scope.request_id)


def _request_id(scope: Message) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _LABEL.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(16)


def _labelled(send: Send, request_scope: RequestScope) -> Send:
    label = (b"x-request-id", request_scope.request_id.encode("ascii"))

    async def send_labelled(message: Message) -> None:
        if message["type"] == "http.response.start":
            request_scope.status = message["status"]
            message["headers"] = [*message["headers"], label]
        await send(message)

    return send_labelled


async def _refuse_target(path: str, send: Send) -> None:
    body = error_body(400, f"the request target must be a path, got {path[:200]!r}")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
