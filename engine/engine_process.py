"""Engines in processes of their own: both sides of their sockets, and the process's main.

One ROUTER and one PULL serve all engines of a front::

    front process                                              engine process, one a data-parallel rank
    ROUTER  ── Configure, requests, aborts, verbs, bye ──▶  DEALER   identity: the rank, 2 bytes little-endian
    ROUTER  ◀── EngineHello ──────────────────────────────  DEALER
    PULL    ◀── progress, READY, outputs, last word ──────  PUSH

Every wait for the engines is raced against their deaths; they die with their parent. The sockets lie in a folder that
only its owner may enter.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio

from engine.bad_messages import answer_bad_message, refuse_bad_message
from engine.config import EngineConfig
from engine.errors import Cause, EngineDeadError, root_cause
from engine.executor.inline import InlineExecutor
from engine.executor.runners import make_runner
from engine.handshake import (
    MAX_RECEIVED,
    TERM_GRACE_S,
    check_hello,
    check_sender,
    death_of,
    engine_argv,
    engine_name,
    identity_of,
    open_socket_folder,
    refuse_hello,
)
from engine.protocol import (
    Acknowledge,
    ClientMessage,
    Configure,
    EngineHello,
    EngineMessage,
    EngineReady,
    Shutdown,
    StartProgress,
)
from engine.server import EngineCoreServer
from engine.task_tree import answer_signals, telling
from engine.watchdog import own_alarm
from transport.channel import ReceiveChannel, RouterReceiveChannel, SendChannel
from transport.process import open_child
from transport.services import open_services
from transport.standard_error import write_to_stderr
from transport.zmq_socket import SocketKind, ZmqSocket, open_context

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 2e-4
"""How long a thread may keep the GIL from another: at the default 5 ms a busy thread starves the step loop."""
LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


# -- the front's side ------------------------------------------------------------------------------------------------


class _EngineProcess:
    """What the front knows of one engine process.

    Attributes:
        name: What messages call it.
        pid: Its process id; 0 until it is started.
        started: Set then.
        phase: Where its start is; empty once it is ready.
        kill: Ends it at once; None until it is started.
        has_spoken: Whether a message came on its output socket: both its ends are connected.
        has_parted: Whether its end is expected.
        has_ended: Whether it is no more.
    """

    def __init__(self, engine_index: int) -> None:
        self.name = engine_name(engine_index)
        self.pid = 0
        self.started = trio.Event()
        self.phase = "hello"
        self.kill: Callable[[], None] | None = None
        self.has_spoken = False
        self.has_parted = False
        self.has_ended = False

    def follow(self, message: EngineMessage) -> None:
        """Learn from a message where the start is."""
        self.has_spoken = True
        if isinstance(message, EngineReady):
            self.phase = ""
        elif isinstance(message, StartProgress):
            self.phase = f"{message.phase} {message.done}/{message.total}" if message.total else message.phase


class ProcessConnection:
    """Both directions to the engine processes of one client, and the knowledge that one of them died."""

    def __init__(self, router: ZmqSocket, pull: ZmqSocket, num_engines: int, folder: str) -> None:
        """Use the sockets, which whoever opened them closes; their `folder` is removed once nobody needs it."""
        self._processes = [_EngineProcess(index) for index in range(num_engines)]
        self._router = router
        self._senders = [SendChannel[ClientMessage](router, to=identity_of(index)) for index in range(num_engines)]
        self._hellos = RouterReceiveChannel[EngineHello](router, EngineHello, on_bad_message=refuse_hello)
        self._receiver = ReceiveChannel[EngineMessage](pull, EngineMessage, on_bad_message=refuse_bad_message)
        self._folder: str | None = folder
        self._is_starting = True
        self._waiting = trio.CancelScope()
        self._dead: Callable[[], EngineDeadError] | None = None
        self._is_drained = False

    def send(self, message: ClientMessage, engine_index: int = 0) -> None:
        """Send without waiting; a dead engine's messages are dropped."""
        try:
            self._senders[engine_index].send_nowait(message)
        except trio.BrokenResourceError:
            logger.debug("dropped %s: %s is gone", type(message).__name__, self._processes[engine_index].name)

    def part(self, engine_index: int = 0) -> None:
        """Acknowledge an engine's last word: it may exit, and its end is no death any more."""
        self._processes[engine_index].has_parted = True
        self.send(Acknowledge(), engine_index)

    def kill(self, engine_index: int = 0) -> None:
        """End an engine that is stuck at once; does not wait. Its end is no death any more."""
        process = self._processes[engine_index]
        process.has_parted = True
        if process.kill is not None:
            process.kill()

    async def receive(self) -> list[EngineMessage]:
        """Wait for messages; raises EngineDeadError once a process has ended and all that had come was returned."""
        if self._dead is None:
            with trio.CancelScope() as self._waiting:
                messages = self._checked(await self._receiver.receive_many(MAX_RECEIVED))
                if messages:
                    return self._follow(messages)
        assert self._dead is not None
        if not self._is_drained:
            self._is_drained = True
            if last_words := self._follow(self._take_waiting()):
                return last_words
        raise self._dead()

    async def greet(self, config: EngineConfig) -> None:
        """Answer each engine's hello with its configuration.

        Raises:
            EngineDeadError: A hello is not what one of these engines would say.
        """
        for process in self._processes:
            await process.started.wait()
        for _ in self._processes:
            identity, hello = await self._hellos.receive()
            check_hello(identity, hello, {index: process.pid for index, process in enumerate(self._processes)})
            self._processes[hello.engine_index].phase = "configuration"
            self.send(Configure(config), hello.engine_index)

    async def run_engine(self, engine_index: int, addresses: tuple[str, str]) -> None:
        """Start the engine process and own it; its end, unless expected, ends every wait. Cancel it to end the process.

        Raises:
            OSError: The process cannot be started.
        """
        process = self._processes[engine_index]
        argv = engine_argv(engine_index, *addresses)
        on_line = write_to_stderr if len(self._processes) == 1 else partial(_write_line_of, process.name)
        folders = [] if self._folder is None else [self._folder]
        async with open_child(
            process.name, argv, term_grace_s=TERM_GRACE_S, on_stderr_line=on_line, orphaned_folders=folders
        ) as child:
            process.pid, process.kill = child.pid, partial(child.signal, signal.SIGKILL)
            process.started.set()
            status = await child.wait()
            process.has_ended = True
            if self._dead is None and not process.has_parted:
                tail = child.stderr_tail
                self._dead = lambda: death_of(engine_index, status, tail, process.phase)
                self._waiting.cancel()

    def dismiss(self) -> None:
        """Ask whoever still runs to stop, and expect no last word; does not wait."""
        for index, process in enumerate(self._processes):
            if not process.has_parted:
                self.send(Shutdown(), index)
                self.part(index)

    def describe(self) -> Iterator[str]:
        """Yield how each process is, and what the socket to them has to write."""
        for process in self._processes:
            how = f"starting: {process.phase}" if process.phase else "leaving" if process.has_parted else "alive"
            yield f"{process.name}, process {process.pid}: {'dead' if process.has_ended else how}"
        yield from _describe_sockets({"requests": self._router})

    def _checked(self, messages: list[EngineMessage]) -> list[EngineMessage]:
        """Return what came before a message of an engine that there is not, which ends every wait after that."""
        for position, message in enumerate(messages):
            try:
                check_sender(message, len(self._processes))
            except EngineDeadError as error:
                self._dead, self._is_drained = self._dead or partial(EngineDeadError, error.cause), True
                return messages[:position]
        return messages

    def _take_waiting(self) -> list[EngineMessage]:
        messages = []
        with suppress(trio.WouldBlock, EngineDeadError):  # one that cannot be read: a dead engine's end is told anyway
            while True:
                message = self._receiver.receive_nowait()
                check_sender(message, len(self._processes))
                messages.append(message)
        return messages

    def _follow(self, messages: list[EngineMessage]) -> list[EngineMessage]:
        """Note where the engines' starts are, until all are ready; returns `messages`."""
        if not self._is_starting:
            return messages
        for message in messages:
            process = self._processes[message.engine_index]
            if isinstance(message, EngineReady) and not process.has_spoken:  # some other engine says so
                said = f"engine {message.engine_index} is ready before it has begun to start"
                raise EngineDeadError(Cause("ProtocolError", said))
            process.follow(message)
        if self._folder is not None and all(process.has_spoken for process in self._processes):
            # All ends are connected: from here on no kill can leave it behind.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self._is_starting = any(process.phase for process in self._processes)
        return messages


@asynccontextmanager
async def connect_processes(config: EngineConfig) -> AsyncIterator[ProcessConnection]:
    """Start the engine processes, all at once, and give them their configuration; leaving it leaves none behind.

    Raises:
        EngineDeadError: A process that is none of these engines said hello.
        OSError: A process cannot be started.
    """
    with open_socket_folder() as folder:
        async with open_context() as context:
            router = ZmqSocket(context, SocketKind.ROUTER)
            pull = ZmqSocket(context, SocketKind.PULL)
            async with router, pull:
                addresses = router.bind(f"ipc://{folder}/requests"), pull.bind(f"ipc://{folder}/outputs")
                connection = ProcessConnection(router, pull, config.data_parallel_size, folder)
                async with open_services() as services:
                    for index in range(config.data_parallel_size):
                        services.start_soon(connection.run_engine, index, addresses)
                    services.start_soon(connection.greet, config)
                    try:
                        with telling("engine processes", connection.describe):
                            yield connection
                    finally:
                        connection.dismiss()


def _describe_sockets(sockets: Mapping[str, ZmqSocket]) -> Iterator[str]:
    """Yield how much each socket still has to write of what it was given without a copy."""
    for name, socket in sockets.items():
        yield f"{name}: {socket.num_pending} messages pending, {socket.pending_bytes} bytes"


def _write_line_of(name: str, line: str) -> None:
    write_to_stderr(f"[{name}] {line}")


# -- the engine's side -----------------------------------------------------------------------------------------------


def main() -> None:
    """Be an engine process: arguments are the rank and the addresses of the front's two sockets."""
    engine_index, request_address, output_address = sys.argv[1:]
    try:
        status = trio.run(_run, int(engine_index), request_address, output_address)
    except Exception as error:  # no last word could be said: what is written here is what the front tells
        traceback.print_exception(root_cause(error))
        status = 1
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
            sender = SendChannel[EngineMessage](push)
            on_bad_message = partial(answer_bad_message, engine_index=engine_index, send=sender.send_nowait)
            receiver = ReceiveChannel[ClientMessage](dealer, ClientMessage, on_bad_message=on_bad_message)
            await SendChannel[EngineHello](dealer).send(EngineHello(engine_index, os.getpid()))
            config = await _configuration(receiver)
            if config is None:
                return 0
            logging.basicConfig(level=config.log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
            sys.setswitchinterval(SWITCH_INTERVAL_S)

            def send(message: EngineMessage) -> None:
                if isinstance(message, EngineReady):
                    gc.collect()
                    gc.freeze()  # what lives from the start on is not walked through again between two steps
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


async def _configuration(receiver: ReceiveChannel[ClientMessage]) -> EngineConfig | None:
    """Return what the front answers the hello with; None where it is stopped instead, and expects no last word."""
    message = await receiver.receive()
    if isinstance(message, Shutdown):
        return None
    if not isinstance(message, Configure):
        raise RuntimeError(f"expected the configuration first, got {type(message).__name__}")
    return message.config
