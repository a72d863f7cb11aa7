"""OpenAI's error body, for whatever went wrong and wherever: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from quart import Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound

from engine.errors import Cause, EngineDeadError, InvalidGrammar, MetronomeError, RequestError, UtilityError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""What `Retry-After` says with 429 and 503."""

_TYPES = {403: "permission_error", 429: "rate_limit_error"}

_STATUS_OF_CAUSE = {
    "QueueTimeout": 503,
    "GrammarTimeout": 503,
    "GrammarTrialStuck": 503,
    "GrammarTrialDied": 503,
    "GrammarQueueFull": 429,
    "NoTokenAllowed": 400,
}
"""Of requests that the engine failed for what they asked, or for want of time."""

_FORM = re.compile(r"^structured_outputs: (?:(?:grammar|structural_tag|json|json_object): )?")
"""How a message begins that tells what is wrong with a form of text."""

MAX_SHOWN_CHARS = 200
"""Of a path or the name of a field that is told back."""
MAX_MESSAGE_CHARS = 4_000
"""Of a message: whatever a request says, the answer is short."""


class ServerStopping(RequestError):
    """The server takes no new work because it is stopping."""

    status_hint = 503

    def __init__(self) -> None:
        """Say so, and what to do."""
        super().__init__("the server is stopping and takes no new requests; try another one, or later")


class ModelNotFound(RequestError):
    """The request names a model that is not the one served here."""

    status_hint = 404


class GenerationFailed(RequestError):
    """The engine failed this request alone, with its cause; the caller's fault only where that says so."""

    status_hint = 500

    def __init__(self, cause: Cause | None, form_field: str = "structured_outputs") -> None:
        """Say what ended the request, without its traceback; one that only waited too long may be tried again.

        `form_field` is the field of the request that asked for a form of the text.
        """
        if cause is not None and cause.type in {InvalidGrammar.__name__, "GrammarFailed"}:
            message = cause.message if cause.type != "GrammarFailed" else f"structured_outputs: {cause.message}"
            super().__init__(of_field(form_field, message), param=form_field)
            self.status_hint = InvalidGrammar.status_hint
            return
        super().__init__(f"the request failed in the engine: {cause or 'unknown cause'}")
        if cause is not None:
            self.status_hint = _STATUS_OF_CAUSE.get(cause.type, 500)


@contextmanager
def telling_of(form_field: str) -> Iterator[None]:
    """Have what is wrong with a form of text told of the field in which a client asked for it."""
    try:
        yield
    except RequestError as error:
        if error.param == "structured_outputs":
            error.param, error.args = form_field, (of_field(form_field, str(error)),)
        raise


def of_field(form_field: str, message: str) -> str:
    """Return what is wrong with a form of text, told of the field in which a client asked for it."""
    return message if form_field == "structured_outputs" else _FORM.sub(f"{form_field}: ", message)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """Encode OpenAI's error object, cut where it is long; `param` is the request field at fault."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]}... and {len(message) - MAX_MESSAGE_CHARS} more characters"
    printable = message.encode("utf-8", "replace").decode()
    param = param and param[:MAX_SHOWN_CHARS]
    return msgspec.json.encode({"error": {"message": printable, "type": kind, "param": param, "code": code}})


def describe(error: Exception) -> tuple[int, bytes]:
    """Return status and body for any failure of a request; what nobody foresaw is logged and said without detail."""
    if isinstance(error, RequestError):
        code = "model_not_found" if isinstance(error, ModelNotFound) else None
        return error.status_hint, error_body(error.status_hint, str(error), param=error.param, code=code)
    if isinstance(error, EngineDeadError):
        return error.status_hint, error_body(error.status_hint, f"the engine has ended: {error.cause}")
    if isinstance(error, UtilityError):
        return error.status_hint, error_body(error.status_hint, str(error))
    if isinstance(error, HTTPException) and error.code is not None:
        return error.code, error_body(error.code, _explain(error))
    if isinstance(error, MetronomeError):
        return 500, error_body(500, str(error))
    logger.error("a request failed unexpectedly", exc_info=error)
    return 500, error_body(500, "internal error; the server's log has the details")


def _explain(error: HTTPException) -> str:
    if isinstance(error, NotFound):
        return f"this server has no route {request.path[:MAX_SHOWN_CHARS]!r}"
    if isinstance(error, MethodNotAllowed):
        allowed = ", ".join(error.valid_methods or ())
        return f"{request.path[:MAX_SHOWN_CHARS]} does not answer {request.method}; use {allowed}"
    return error.description or error.name


def error_response(error: Exception) -> Response:
    """Return the HTTP response for a failed request, before any of it was answered."""
    status, body = describe(error)
    response = Response(body, status, content_type="application/json")
    if isinstance(error, HTTPException):
        for name, value in error.get_headers():
            if name.lower() not in {"content-type", "content-length"}:
                response.headers[name] = value
    if status in {429, 503}:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
