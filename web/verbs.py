"""The operating routes: what stops, empties or measures the engine, by vLLM's names, each a verb of the engine.

They stand open only to whoever may operate: with a key set to those who have it, on a unix socket to its owner, else to
nobody unless the operator says so (--enable-operations). Pages of other sites never may.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from quart import Response, request
from werkzeug.exceptions import Forbidden

from engine.errors import InvalidRequest
from web.body import read_body, read_json_body
from web.errors import ServerStopping
from web.schemas import decode_fields
from web.state import ServerState

Answer = Callable[[ServerState], Awaitable[Response]]
Query = TypeVar("Query", bound=msgspec.Struct)
Mode = Literal["abort", "wait", "keep"]

MAX_IDS = 4096
"""Most ids in one request to abort."""
_LISTS = frozenset({"tags"})
"""Query parameters that may be given several times."""


class PauseQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What becomes of running requests, and whether the prefix cache is forgotten."""

    mode: Mode = "abort"
    clear_cache: bool = True


class SleepQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How much memory is given back, and what becomes of running requests."""

    level: Literal[0, 1, 2] = 1
    mode: Mode = "abort"


class WakeUpQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What wakes up; everything when None."""

    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None


class ResetQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Whether running requests are preempted for it."""

    reset_running_requests: bool = False


class NoQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing can be asked."""


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which requests to end: the `id` of their answers, or their `X-Request-Id`."""

    request_ids: list[str]

    def check(self) -> None:
        """Raise InvalidRequest for too many ids."""
        if len(self.request_ids) > MAX_IDS:
            message = f"request_ids may hold at most {MAX_IDS} ids, got {len(self.request_ids)}"
            raise InvalidRequest(message, param="request_ids")


async def pause(state: ServerState) -> Response:
    """Stop admitting requests; answered once nothing runs."""
    asked = await _only_query(state, PauseQuery)
    await state.engine.pause(asked.mode, clear_cache=asked.clear_cache)
    return _json({"status": "paused"})


async def resume(state: ServerState) -> Response:
    """Undo a pause."""
    await _only_query(state, NoQuery)
    await state.engine.resume()
    return _json({"status": "resumed"})


async def is_paused(state: ServerState) -> Response:
    """Whether the engine is paused."""
    await _only_query(state, NoQuery)
    return _json({"is_paused": await state.engine.is_paused()})


async def sleep(state: ServerState) -> Response:
    """Pause, then give memory back."""
    asked = await _only_query(state, SleepQuery)
    await state.engine.sleep(asked.level, asked.mode)
    return _json({"status": "sleeping"})


async def wake_up(state: ServerState) -> Response:
    """Take memory back, and resume once nothing sleeps."""
    await state.engine.wake_up((await _only_query(state, WakeUpQuery)).tags)
    return _json({"status": "awake" if not await state.engine.is_sleeping() else "sleeping"})


async def is_sleeping(state: ServerState) -> Response:
    """Whether the engine is paused or something of it sleeps."""
    await _only_query(state, NoQuery)
    return _json({"is_sleeping": await state.engine.is_sleeping()})


async def reset_prefix_cache(state: ServerState) -> Response:
    """Forget cached prefixes; says whether it was done, which it is not while blocks are in use."""
    asked = await _only_query(state, ResetQuery)
    return _json({"reset": await state.engine.reset_prefix_cache(reset_running=asked.reset_running_requests)})


async def abort_requests(state: ServerState) -> Response:
    """End requests by the `id` of their answers or by their `X-Request-Id`; says how many."""
    _query(NoQuery)
    asked = decode_fields(await read_json_body(state), AbortBody)
    return _json({"num_aborted": state.abort_labelled(frozenset(asked.request_ids))})


async def start_profile(state: ServerState) -> Response:
    """Note the times of each step from now on."""
    await _only_query(state, NoQuery)
    await state.engine.start_profile()
    return _json({"status": "profiling"})


async def stop_profile(state: ServerState) -> Response:
    """Write them into --profile-dir; says which file."""
    await _only_query(state, NoQuery)
    return _json({"status": "written", "path": await state.engine.stop_profile()})


ROUTES: dict[tuple[str, str], Answer] = {
    ("POST", "/pause"): pause,
    ("POST", "/resume"): resume,
    ("GET", "/is_paused"): is_paused,
    ("POST", "/sleep"): sleep,
    ("POST", "/wake_up"): wake_up,
    ("GET", "/is_sleeping"): is_sleeping,
    ("POST", "/reset_prefix_cache"): reset_prefix_cache,
    ("POST", "/abort_requests"): abort_requests,
    ("POST", "/start_profile"): start_profile,
    ("POST", "/stop_profile"): stop_profile,
}
"""Method and path of each."""


async def operate(state: ServerState, is_open: bool, answer: Answer) -> Response:
    """Answer the current request if it may operate this server.

    Raises:
        HTTPException: 403 where nobody may, or for a page of another site.
        ServerStopping: The server is stopping.
    """
    if not is_open:
        raise Forbidden(
            "operating routes are closed here: start the server with --api-key, on a unix socket (--uds), or with "
            "--enable-operations"
        )
    origin = request.headers.get("Origin")  # sent with every POST of a page; the other only to sites that are secure
    if request.headers.get("Sec-Fetch-Site", "none") not in {"none", "same-origin"} or (
        origin is not None and urlsplit(origin).netloc != request.host
    ):
        raise Forbidden("pages of other sites cannot operate this server")
    if state.stopping:
        raise ServerStopping
    return await answer(state)


async def _only_query(state: ServerState, kind: type[Query]) -> Query:
    """Return the query parameters as `_query` does; raises InvalidRequest too for a body, which nobody would heed."""
    if await read_body(state):
        raise InvalidRequest(f"{request.path} takes no body: what it can be asked goes into the query, ?name=value")
    return _query(kind)


def _query(kind: type[Query]) -> Query:
    """Return the query parameters of the current request; raises InvalidRequest naming the one at fault."""
    fields: dict[str, Any] = {}
    for name, values in request.args.lists():
        if name not in _LISTS and len(values) > 1:
            raise InvalidRequest(f"query parameter {name!r:.80} is given {len(values)} times", param=name[:80])
        fields[name] = values if name in _LISTS else values[0]
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"query: {error}") from None


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), content_type="application/json")
