"""An engine in a process of its own: both sides of its sockets, and the process's main.

::

    front process                                              engine process
    ROUTER  ── Configure, requests, aborts, verbs, bye ──▶  DEALER   identity: the rank, 2 bytes little-endian
    ROUTER  ◀── EngineHello ──────────────────────────────  DEALER
    PULL    ◀── progress, READY, outputs, last word ──────  PUSH

Every wait for the engine is raced against its death; the engine dies with its parent. The sockets lie in a folder that
only its owner may enter.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import trio

from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.executor.inline import InlineExecutor
from engine.executor.runners import make_runner
from engine.handshake import FOLDER_PREFIX, TERM_GRACE_S, check_hello, death_of, engine_argv, engine_name, identity_of
from engine.protocol import ClientMessage, Configure, EngineHello, EngineMessage, EngineReady
from engine.server import EngineCoreServer
from engine.task_tree import answer_signals, telling
from engine.watchdog import own_alarm
from transport.channel import ReceiveChannel, RouterReceiveChannel, SendChannel
from transport.codec import DecodeError
from transport.folder import open_folder
from transport.process import Child, open_child
from transport.services import open_services
from transport.zmq_socket import SocketKind, ZmqSocket, open_context

logger = logging.getLogger(__name__)

T = TypeVar("T")

SWITCH_INTERVAL_S = 2e-4
"""How long a thread may keep the GIL from another: at the default 5 ms a busy thread starves the step loop."""
MAX_RECEIVED = 256
"""Messages taken from a socket in one go."""
LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


# -- the front's side ------------------------------------------------------------------------------------------------


class ProcessConnection:
    """Both directions to an engine process, and the knowledge that it died."""

    def __init__(self, child: Child, router: ZmqSocket, pull: ZmqSocket, engine_index: int) -> None:
        """Join the sockets to `child`; all belong to whoever opened them."""
        self._child = child
        self._engine_index = engine_index
        self._router = router
        self._hellos = RouterReceiveChannel[EngineHello](router, EngineHello, on_bad_message=_report_bad_message)
        self._sender = SendChannel[ClientMessage](router, to=identity_of(engine_index))
        self._receiver = ReceiveChannel[EngineMessage](pull, EngineMessage, on_bad_message=_report_bad_message)
        self._early: list[EngineMessage] = []
        self._death: EngineDeadError | None = None
        self._waiting = trio.CancelScope()

    def send(self, message: ClientMessage) -> None:
        """Send without waiting; a dead engine's messages are dropped."""
        try:
            self._sender.send_nowait(message)
        except trio.BrokenResourceError:
            logger.debug("dropped %s: %s is gone", type(message).__name__, self._child.name)

    async def receive(self) -> list[EngineMessage]:
        """Wait for messages; raises EngineDeadError once the process has ended and all it said was returned."""
        if self._early:
            early, self._early = self._early, []
            return early
        try:
            return await self._unless_dead(partial(self._receiver.receive_many, MAX_RECEIVED))
        except EngineDeadError:
            with suppress(trio.WouldBlock):
                return [self._receiver.receive_nowait()]
            raise

    async def greet(self, config: EngineConfig) -> None:
        """Wait for the engine's hello, answer with its configuration, and wait until its other socket has spoken."""
        identity, hello = await self._unless_dead(self._hellos.receive)
        check_hello(self._engine_index, identity, hello)
        self.send(Configure(config))
        self._early = await self.receive()

    async def watch(self) -> None:
        """Wait for the process's end and make every wait learn of it."""
        status = await self._child.wait()
        self._death = death_of(self._engine_index, status, self._child.stderr_tail)
        self._waiting.cancel()

    def describe(self) -> Iterator[str]:
        """Yield whether the process lives, and what its socket has to write."""
        yield "alive" if self._death is None else f"dead: {self._death}"
        yield from _describe_sockets({"requests": self._router})

    async def _unless_dead(self, wait: Callable[[], Awaitable[T]]) -> T:
        """Race `wait` against the process's end. For one task at a time."""
        if self._death is None:
            with trio.CancelScope() as self._waiting:
                return await wait()
        assert self._death is not None
        raise self._death


@asynccontextmanager
async def connect_process(config: EngineConfig, engine_index: int = 0) -> AsyncIterator[ProcessConnection]:
    """Start an engine process and give it its configuration; leaving it leaves no process behind.

    Raises:
        EngineDeadError: The process ended before it said hello.
    """
    with open_folder(FOLDER_PREFIX) as folder:
        async with open_context() as context:
            router = ZmqSocket(context, SocketKind.ROUTER)
            pull = ZmqSocket(context, SocketKind.PULL)
            async with router, pull:
                addresses = router.bind(f"ipc://{folder}/requests"), pull.bind(f"ipc://{folder}/outputs")
                argv, name = engine_argv(engine_index, *addresses), engine_name(engine_index)
                opened = open_child(name, argv, term_grace_s=TERM_GRACE_S, orphaned_folders=[folder])
                async with opened as child, open_services() as services:
                    connection = ProcessConnection(child, router, pull, engine_index)
                    services.start_soon(connection.watch)
                    await connection.greet(config)
                    shutil.rmtree(folder)  # both ends are connected: from here on no kill can leave it behind
                    with telling(f"{name}, process {child.pid}", connection.describe):
                        yield connection


def _describe_sockets(sockets: Mapping[str, ZmqSocket]) -> Iterator[str]:
    """Yield how much each socket still has to write of what it was given without a copy."""
    for name, socket in sockets.items():
        yield f"{name}: {socket.num_pending} messages pending, {socket.pending_bytes} bytes"


def _report_bad_message(error: DecodeError) -> None:
    logger.error("skipped a message that is none: %s", error)


# -- the engine's side -----------------------------------------------------------------------------------------------


def main() -> None:
    """Be an engine process: arguments are the rank and the addresses of the front's two sockets."""
    # The terminal's or the service manager's signals go to all processes; the front alone decides the order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine_index, request_address, output_address = sys.argv[1:]
    status = trio.run(_run, int(engine_index), request_address, output_address)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # all that was owned is closed; to take torch apart as well would hold up a stop by half a second


async def _run(engine_index: int, request_address: str, output_address: str) -> int:
    """Connect, say hello, get the configuration, serve to the end; return the exit status."""
    async with open_context() as context:
        dealer = ZmqSocket(context, SocketKind.DEALER, identity=identity_of(engine_index))
        push = ZmqSocket(context, SocketKind.PUSH)
        async with dealer, push:
            dealer.connect(request_address)
            push.connect(output_address)
            receiver = ReceiveChannel[ClientMessage](dealer, ClientMessage, on_bad_message=_report_bad_message)
            await SendChannel[EngineHello](dealer).send(EngineHello(engine_index, os.getpid()))
            config = await _configuration(receiver)
            logging.basicConfig(level=config.log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            sender = SendChannel[EngineMessage](push)

            def send(message: EngineMessage) -> None:
                sender.send_nowait(message)
                if isinstance(message, EngineReady):
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)

            executor = InlineExecutor(partial(make_runner, config))
            receive = partial(receiver.receive_many, MAX_RECEIVED)
            alarm = own_alarm()
            server = EngineCoreServer(config, executor, receive, send, engine_index=engine_index, alarm=alarm)
            with telling("sockets", partial(_describe_sockets, {"requests": dealer, "outputs": push})):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(answer_signals)
                    cause = await server.run()
                    nursery.cancel_scope.cancel()
            return 0 if cause is None else 1


async def _configuration(receiver: ReceiveChannel[ClientMessage]) -> EngineConfig:
    message = await receiver.receive()
    if not isinstance(message, Configure):
        raise RuntimeError(f"expected the configuration first, got {type(message).__name__}")
    return message.config
