"""Who runs where: engines in processes of their own, or one as tasks of this process; handshake and teardown.

With isolation="process" each engine is a child joined by ZMQ (engine_process.py); with isolation="thread" the same
server runs here over memory channels, and only its executor has a thread. The client cannot tell which it has.
Without Trio the engine is a child, or runs in the caller's own thread.

`make_client` chooses::

                 isolation "none"     "thread"                   "process"
    Trio                              AsyncMPClient, channels    AsyncMPClient, ZMQ; several: DPAsyncMPClient
    no Trio      InprocClient                                    SyncMPClient
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, overload

import trio

from engine.client.async_llm import AsyncLLM
from engine.client.asynchronous import AsyncMPClient, Connection
from engine.client.data_parallel import DPAsyncMPClient
from engine.client.inproc import InprocClient
from engine.client.sync import SyncMPClient
from engine.client.synchronous import STOP_TIMEOUT_S, SynchronousClient
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.engine_process import SWITCH_INTERVAL_S, connect_processes
from engine.errors import Cause, ConfigError, EngineDeadError, ModelError, startup_error
from engine.executor.base import Progress
from engine.executor.inline import InlineExecutor
from engine.executor.runners import make_runner
from engine.loading import open_model
from engine.protocol import (
    Acknowledge,
    ClientMessage,
    EngineCoreOutputs,
    EngineDead,
    EngineMessage,
    EngineReady,
    StartProgress,
)
from engine.server import EngineCoreServer
from transport.services import open_services

logger = logging.getLogger(__name__)

MIN_OPEN_FILES, OPEN_FILES_AN_ENGINE = 56, 8
"""What a process may have to open at least, and for each engine: a server with one idle engine has 26 open, and 6 more
for each further one; an engine has 29."""

Isolation = Literal["process", "thread"]
Message = TypeVar("Message")


@asynccontextmanager
async def open_engine(
    model: str | None = None,
    *,
    isolation: Isolation = "process",
    progress: Progress | None = None,
    **settings: Any,
) -> AsyncIterator[AsyncLLM]:
    """Run an engine for `model` (the default model when None); leaving it leaves nothing behind.

    Live streams get a last output with reason abort when the block is left; `settings` are the fields of
    `EngineConfig`. `progress` is called with (phase, done, total) while the engine starts. With `data_parallel_size`
    N there are N engines, each a process of its own, which share the requests. A cancelled start ends the process at
    once; with isolation "thread" it ends when the model is loaded, see `InlineExecutor.start`.

    Raises:
        ConfigError: A setting is wrong or the model cannot be had.
        ModelError: The model cannot be served.
        EngineDeadError: The engine died while starting, or while it was being stopped.
    """
    config = EngineConfig.of(**settings) if model is None else EngineConfig.of(model=model, **settings)
    check_face(isolation, trio=True, data_parallel_size=config.data_parallel_size)
    progress = progress or _ignore_progress
    token = trio.lowlevel.current_trio_token()

    def from_thread(phase: str, done: int, total: int) -> None:
        trio.from_thread.check_cancelled()  # a conversion that nobody waits for any more ends here
        token.run_sync_soon(progress, phase, done, total)

    def wait(descriptor: int) -> None:
        trio.from_thread.run(trio.lowlevel.wait_readable, descriptor)  # cancelled with this task

    files = await trio.to_thread.run_sync(open_model, config, from_thread, wait)
    with _short_switch_interval():
        async with make_client(files.config, isolation=isolation, trio=True, progress=progress) as client:
            llm = AsyncLLM(client, files.tokenizer, files.config, client.ready, files.name)
            async with open_services() as services:
                services.start_soon(llm.run)
                try:
                    yield llm
                finally:
                    with trio.CancelScope(shield=True):
                        failure = await llm.aclose(STOP_TIMEOUT_S)
                if failure is not None:  # and the body has ended well: nobody knows yet
                    raise failure


@overload
def make_client(
    config: EngineConfig, *, isolation: str, trio: Literal[True], progress: Progress = ...
) -> AbstractAsyncContextManager[AsyncMPClient]: ...


@overload
def make_client(
    config: EngineConfig, *, isolation: str, trio: Literal[False], progress: Progress = ...
) -> SynchronousClient: ...


def make_client(
    config: EngineConfig, *, isolation: str, trio: bool, progress: Progress | None = None
) -> AbstractAsyncContextManager[AsyncMPClient] | SynchronousClient:
    """Start an engine and return its face; nobody else chooses one. `config` is as `open_model` returned it.

    Under Trio the face is what entering gives, and leaving closes it; whoever enters must have stopped the engine
    before. Without Trio it is there at once, and `shutdown` closes it.

    Raises:
        ConfigError: There is no face for these two, or the engine cannot be started as `config` asks.
        ModelError: The model cannot be served.
        EngineDeadError: The engine died while starting.
    """
    check_face(isolation, trio, config.data_parallel_size)
    progress = progress or _ignore_progress
    if trio:
        return _open_asynchronous(config, isolation, progress)
    return SyncMPClient(config, progress) if isolation == "process" else _make_inproc(config, progress)


def check_face(isolation: str, trio: bool, data_parallel_size: int) -> None:
    """Refuse what `make_client` has no face for, before a model is looked for; raises ConfigError."""
    known = _CONNECT if trio else _WITHOUT_TRIO
    if isolation not in known:
        raise ConfigError(
            f"isolation={isolation!r} with trio={trio}: no client has both; {'with' if trio else 'without'} Trio, "
            f"isolation is one of {', '.join(known)}"
        )
    if data_parallel_size > 1 and not (trio and isolation == "process"):
        raise ConfigError(
            f"isolation={isolation!r} with trio={trio} runs one engine, and data_parallel_size is "
            f"{data_parallel_size}: leave it out, or take open_engine with isolation 'process', or serve"
        )
    if isolation == "process":
        _check_open_files(data_parallel_size)


def _check_open_files(num_engines: int) -> None:
    """Refuse a limit within which sockets between processes would fail, where ZeroMQ ends the whole process."""
    need = MIN_OPEN_FILES + OPEN_FILES_AN_ENGINE * num_engines
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < need:
        raise ConfigError(
            f"this process may have {limit} files open, and {num_engines} engine{'s' * (num_engines > 1)} in "
            f"processes of their own need {need}: raise `ulimit -n`"
        )


@asynccontextmanager
async def _open_asynchronous(config: EngineConfig, isolation: str, progress: Progress) -> AsyncIterator[AsyncMPClient]:
    async with _CONNECT[isolation](config) as connection:
        readies = await _handshake(connection, progress, config.data_parallel_size)
        if len(readies) > 1:
            yield DPAsyncMPClient(config, readies, connection)
        else:
            yield AsyncMPClient(config, readies[0], connection)


def _make_inproc(config: EngineConfig, progress: Progress) -> InprocClient:
    runner = make_runner(config)
    capacity = runner.start(progress)
    core = EngineCore(config, capacity, hash_salt=(config.prefix_hash_seed or "").encode())
    return InprocClient(config, EngineReady.of(capacity, engine_index=0, pid=os.getpid()), core, runner)


def _ignore_progress(phase: str, done: int, total: int) -> None:
    """Show nothing."""


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def _handshake(connection: Connection, progress: Progress, num_engines: int) -> list[EngineReady]:
    """Follow the engines' starts until each is READY; raises what stopped the first that failed."""
    readies: list[EngineReady] = []
    while len(readies) < num_engines:
        for message in await connection.receive():
            name = f"engine {message.engine_index}"
            match message:
                case StartProgress(phase, done, total):
                    progress(phase if num_engines == 1 else f"{name}: {phase}", done, total)
                case EngineReady():
                    if any(ready.engine_index == message.engine_index for ready in readies):
                        raise EngineDeadError(Cause("ProtocolError", f"{name} said twice that it is ready"))
                    readies.append(message)
                case EngineDead(cause):
                    connection.part(message.engine_index)
                    raise startup_error(cause if num_engines == 1 else cause.at(name))
                case EngineCoreOutputs():
                    pass  # an engine that is ready tells its state while the others still start
                case _:
                    raise EngineDeadError(Cause("ProtocolError", f"unexpected {type(message).__name__} at start"))
    digests = {ready.model_digest: f"engine {ready.engine_index} has {ready.model_digest}" for ready in readies}
    if len(digests) > 1:
        raise ModelError(f"the engines loaded different models: {', '.join(digests.values())}; start again")
    return readies


# -- in this process -------------------------------------------------------------------------------------------------


class _MemoryConnection(NamedTuple):
    """Both directions to an engine of this process."""

    outgoing: trio.MemorySendChannel[ClientMessage]
    incoming: trio.MemoryReceiveChannel[EngineMessage]

    def send(self, message: ClientMessage, engine_index: int = 0) -> None:
        try:
            self.outgoing.send_nowait(message)
        except trio.BrokenResourceError:
            logger.debug("dropped %s: the engine has ended", type(message).__name__)

    def part(self, engine_index: int = 0) -> None:
        self.send(Acknowledge())

    def kill(self, engine_index: int = 0) -> None:
        pass  # its thread, at a step, cannot be ended

    async def receive(self) -> list[EngineMessage]:
        try:
            return await _receive_all(self.incoming)
        except trio.EndOfChannel:
            raise EngineDeadError(Cause("EngineDied", "the engine's tasks ended without a last word")) from None


@asynccontextmanager
async def _connect_thread(config: EngineConfig) -> AsyncIterator[Connection]:
    """Run the engine's tasks here, shielded from the body's cancellation so that last words can be said."""
    outgoing, engine_receive = trio.open_memory_channel[ClientMessage](float("inf"))
    engine_send, incoming = trio.open_memory_channel[EngineMessage](float("inf"))

    async def run() -> None:
        with engine_send, engine_receive:
            executor = InlineExecutor(partial(make_runner, config))
            receive = partial(_receive_all, engine_receive)
            await EngineCoreServer(config, executor, receive, engine_send.send_nowait).run()

    with outgoing, incoming:
        async with open_services() as services:
            services.start_soon(run)
            yield _MemoryConnection(outgoing, incoming)


async def _receive_all(channel: trio.MemoryReceiveChannel[Message]) -> list[Message]:
    """Wait for one message and return it with all others that wait."""
    received = [await channel.receive()]
    while channel.statistics().current_buffer_used:
        received.append(channel.receive_nowait())
    return received


_WITHOUT_TRIO = ("none", "process")
_CONNECT: dict[str, Callable[[EngineConfig], AbstractAsyncContextManager[Connection]]] = {
    "process": connect_processes,
    "thread": _connect_thread,
}
