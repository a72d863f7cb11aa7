"""Serves HTTP for an engine: listeners, connections, and the HTTP half of the teardown.

The order of a stop, none of whose parts waits without a bound::

    trigger → 503 for probes and new work, listeners still open
            → streams go on for `drain_s`, then are aborted; each gets its terminal event, unless its client does not
              read for `READ_GRACE_S`
            → listeners close → idle connections close → what is left is cancelled after `GRACE_S`

hypercorn's own `serve` is not used: it swallows KeyboardInterrupt and closes the listeners first. Its classes for one
connection are (guard.py), with every default that hurts a server of long streams set here.
"""

from __future__ import annotations

import logging
import math
import resource
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.logging import Logger
from hypercorn.trio.worker_context import WorkerContext
from quart_trio import QuartTrio

from engine.client.async_llm import AsyncLLM
from engine.config import ServeConfig
from web.access import api_key_of
from web.app import MAX_BODY_BYTES, create_app
from web.guard import Connection
from web.listeners import Arrivals, EagerListener, address_of
from web.state import ServerState

logger = logging.getLogger(__name__)
teardown = logging.getLogger("teardown")  # one name in all rooms: the order of a stop, step by step

KEEP_ALIVE_S = 75.0
"""Longer than the pools of load balancers and clients keep a connection, so that they close first."""
MAX_HEAD_BYTES = 2**16
"""Of a request's line and headers; larger ones get 431."""
MAX_CONNECTIONS = 4096
"""More are closed at once; fewer where the process may not have so many descriptors open."""
RESERVED_DESCRIPTORS = 128
"""Kept from connections, for models, logs, sockets, the engine's process and connections that are to be refused."""
REFUSALS_TOLD_EVERY_S = 10.0
"""The first connection of a burst that is refused is logged at once; how many followed, after so long or more."""
KEEP_ALIVE_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A client whose machine or network is gone says nothing: after 30 s its connection is closed."""
READ_GRACE_S = 0.5
"""How long clients may take to read the end of their aborted streams; who does not read by then is dropped."""
ABORT_GRACE_S = 5.0
"""How long the engine may take to end aborted streams: a step."""
GRACE_S = 1.0
"""How long other responses may take once the listeners are closed."""


async def serve(
    engine: AsyncLLM,
    listeners: list[trio.SocketListener],
    *,
    shutdown_trigger: Callable[[], Awaitable[None]],
    config: ServeConfig | None = None,
    state: ServerState | None = None,
    drain_s: float | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer requests until `shutdown_trigger` returns, then stop in order.

    Owns and closes `listeners`. Reports their addresses through `task_status`. Cancelling it
    ends everything at once, without terminal events.

    Args:
        engine: Answers the requests; must outlive this call.
        listeners: Bound sockets, see `open_listeners`.
        shutdown_trigger: Returns when the server is to stop.
        config: Names, key and path under which it is served; where it listens is up to `listeners`.
        state: Shared with whoever wants to know or to stop new work earlier; a new one by default.
        drain_s: Seconds that running streams may go on after the trigger; the engine's shutdown timeout by default.
        max_body_bytes: Larger request bodies are refused with 413.
        task_status: For `nursery.start`.
    """
    config = ServeConfig() if config is None else config
    state = ServerState(engine, model_name=config.served_model_name) if state is None else state
    drain_s = engine.config.shutdown_timeout if drain_s is None else drain_s
    api_key = api_key_of(config)
    is_private = all(listener.socket.family == socket.AF_UNIX for listener in listeners)
    app = create_app(
        state,
        max_body_bytes=max_body_bytes,
        api_key=api_key,
        root_path=config.root_path,
        operations_open=config.enable_operations or api_key is not None or is_private,
    )
    server = _Server(app)
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            eager = [EagerListener(listener, server.arrivals) for listener in listeners]
            serving = partial(trio.serve_listeners, server.handle, eager, handler_nursery=connections)
            await accepting.start(serving)
            task_status.started([address_of(listener) for listener in listeners])
            await shutdown_trigger()
            await _end_streams(server, state, drain_s)
            accepting.cancel_scope.cancel()
        teardown.debug("listeners closed")
        await server.end_connections()
        connections.cancel_scope.deadline = trio.current_time() + GRACE_S
    teardown.debug("connections closed")


async def _end_streams(server: _Server, state: ServerState, drain_s: float) -> None:
    state.stop()
    teardown.debug("probes and new work get 503")
    if drain_s > 0:
        state.engine.drain()
    await _wait_streams(state, drain_s)
    state.abort_all()
    with trio.move_on_after(READ_GRACE_S):
        await state.wait_idle()
    server.drop_stuck()
    await _wait_streams(state, ABORT_GRACE_S)
    if state.num_open_requests and state.engine.is_healthy:
        state.give_up(ABORT_GRACE_S)
        await _wait_streams(state, READ_GRACE_S, also_dead=True)
    teardown.debug("streams ended, %d cut", state.num_open_requests)


async def _wait_streams(state: ServerState, timeout_s: float, *, also_dead: bool = False) -> None:
    """Wait until no stream is open, for at most `timeout_s`; a dead engine is not waited for, unless `also_dead`."""
    with trio.move_on_after(timeout_s):
        async with trio.open_nursery() as nursery:
            if not also_dead:
                nursery.start_soon(_cancel_after, state.engine.wait_ended, nursery.cancel_scope)
            await state.wait_idle()
            nursery.cancel_scope.cancel()


async def _cancel_after(wait: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    await wait()
    scope.cancel()


class _Server:
    """The connections of one server.

    Attributes:
        arrivals: Those that were accepted and not yet handled.
    """

    def __init__(self, app: QuartTrio) -> None:
        self.arrivals = Arrivals()
        self._app = ASGIWrapper(app)
        self._config = _hypercorn_config()
        self._context = WorkerContext(max_requests=None)
        self._connections: set[Connection] = set()
        self._max_connections = _max_connections()
        self._num_refused = 0
        self._next_told_s = -math.inf

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end; closes `stream`."""
        self.arrivals.num_waiting -= 1
        is_refused = len(self._connections) >= self._max_connections
        self._num_refused += is_refused
        self._tell_refused(since=self._next_told_s)
        if is_refused:
            await stream.aclose()
            return
        _probe_when_quiet(stream)
        connection = Connection(self._app, self._config, self._context, stream)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)

    def _tell_refused(self, since: float = -math.inf) -> None:
        """Log how many connections were refused since it was last told, if that is to be told from `since` on."""
        now_s = trio.current_time()
        if self._num_refused and now_s >= since:
            text = "connections refused: %d; %d are open, the most allowed"
            logger.warning(text, self._num_refused, self._max_connections)
            self._num_refused, self._next_told_s = 0, now_s + REFUSALS_TOLD_EVERY_S

    def drop_stuck(self) -> None:
        """Drop the connections whose clients take nothing in."""
        for connection in self._connections:
            connection.drop_if_stuck()

    async def end_connections(self) -> None:
        """Close idle connections; let the others' responses be their last."""
        self._tell_refused()
        await self._context.terminated.set()
        for connection in self._connections:
            connection.close_if_idle()


class _HypercornLog(Logger):
    """hypercorn's log, sent where ours goes; no access log, which web/scope.py writes."""

    def __init__(self, config: Config) -> None:
        self.access_logger = None
        self.error_logger = logging.getLogger("web.hypercorn")

    async def access(self, *_: Any) -> None:
        """Nothing: the application logs its requests itself."""


def _hypercorn_config() -> Config:
    config = Config()
    config.logger_class = _HypercornLog
    config.alpn_protocols = ["http/1.1"]
    config.h11_max_incomplete_size = MAX_HEAD_BYTES
    config.include_server_header = False
    config.keep_alive_max_requests = 2**31
    config.keep_alive_timeout = KEEP_ALIVE_S
    return config


def _max_connections() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, descriptors - RESERVED_DESCRIPTORS))


def _probe_when_quiet(stream: trio.SocketStream) -> None:
    if stream.socket.family == socket.AF_UNIX:
        return
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE_PROBES.items():
        if hasattr(socket, name):  # not all systems name them so
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
