"""Reads a request's body within the limit of size and time; where one is wanted, JSON, uncompressed."""

from __future__ import annotations

from quart import current_app, request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout, UnsupportedMediaType

from web.errors import ServerStopping
from web.state import ServerState


async def read_json_body(state: ServerState) -> bytes:
    """Return the bytes of the current request's JSON body, still to be decoded.

    Raises:
        HTTPException: 415 for another content type or an encoding, else as `read_body`; the caller's fault.
        ServerStopping: The server was asked to stop before the body was complete.
    """
    if request.mimetype != "application/json":  # which also keeps other sites' pages from posting without being asked
        raise UnsupportedMediaType(f"Content-Type must be application/json, got {request.mimetype or 'none'!r}")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding {encoding!r} is not supported; send the body uncompressed")
    return await read_body(state)


async def read_body(state: ServerState) -> bytes:
    """Return the bytes of the current request's body, whatever it is.

    Raises:
        HTTPException: 413 above the limit, 408 when it does not come in time; the caller's fault.
        ServerStopping: The server was asked to stop before the body was complete.
    """
    try:
        with state.until_stop():
            return await request.get_data(cache=False, as_text=False, parse_form_data=False)
        raise ServerStopping
    except RequestEntityTooLarge:
        limit = current_app.config["MAX_CONTENT_LENGTH"]
        raise RequestEntityTooLarge(f"the body may be at most {limit} bytes") from None
    except RequestTimeout:
        limit_s = current_app.config["BODY_TIMEOUT"]
        raise RequestTimeout(f"the body must be complete within {limit_s} seconds") from None
