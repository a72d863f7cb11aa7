"""The start of engine processes: hello, configuration, phases, READY; what goes wrong is told by name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import engine
from engine.config import EngineConfig
from engine.engine_process import ProcessConnection, identity_of
from engine.errors import Cause, ConfigError, EngineDeadError, MetronomeError, ModelError
from engine.handshake import engine_argv, refuse_hello
from engine.protocol import PROTOCOL_VERSION, ClientMessage, EngineCoreOutputs, EngineHello, Shutdown
from transport.channel import RouterReceiveChannel, SendChannel
from transport.codec import Encoder
from transport.process import open_child
from transport.zmq_socket import SocketKind, ZmqSocket, open_context

pytestmark = pytest.mark.slow

FAILING_START = """
def failing_start(self, progress):
    def tell(phase, done, total):
        progress(phase, done, total)
        if phase == {phase!r}:
            {act}
    return start(self, tell)
if rank == 1:
    NullModelRunner.start = failing_start
"""


@pytest.fixture(autouse=True)
def nobody_waits_for_a_grace_time(monkeypatch: pytest.MonkeyPatch, temporary_folder: Path) -> None:
    monkeypatch.setattr("engine.engine_process.TERM_GRACE_S", 600)


@asynccontextmanager
async def open_engines(number: int = 2, **settings: Any) -> AsyncIterator[Any]:
    with trio.fail_after(60):  # a test that hangs fails
        async with engine.open_engine("null", data_parallel_size=number, **settings) as llm:
            yield llm


@asynccontextmanager
async def open_connection(
    num_engines: int, identity: bytes | None = None
) -> AsyncIterator[tuple[ProcessConnection, ZmqSocket]]:
    """Give what a front has of engines, of which there are none, and a socket of that identity to say hello on."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_context() as context:
            router, pull = ZmqSocket(context, SocketKind.ROUTER), ZmqSocket(context, SocketKind.PULL)
            dealer = ZmqSocket(context, SocketKind.DEALER, identity=identity)
            async with router, pull, dealer:
                dealer.connect(router.bind(f"ipc://{folder}/requests"))
                yield ProcessConnection(router, pull, num_engines, folder), dealer


async def test_each_engines_phases_are_told_with_its_number() -> None:
    phases: list[str] = []
    async with open_engines(progress=lambda phase, done, total: phases.append(phase)):
        pass
    for rank in (0, 1):
        own = list(dict.fromkeys(phase for phase in phases if phase.startswith(f"engine {rank}: ")))
        names = ["weights", "kv_specs", "profile", "kv_pages", "warm_up", "scheduler"]
        assert own == [f"engine {rank}: {name}" for name in names]


@pytest.mark.parametrize("phase", ["weights", "kv_specs", "profile", "kv_pages", "warm_up"])
async def test_a_failure_in_any_phase_of_one_engine_ends_the_start_and_the_others(
    change_engines: Any, phase: str
) -> None:
    change_engines(FAILING_START.format(phase=phase, act="raise RuntimeError('all on fire')"))
    with pytest.raises(EngineDeadError, match=rf"engine 1: all on fire \(while starting: {phase}\)") as raised:
        async with open_engines():
            pytest.fail("it has started")
    assert "failing_start" in raised.value.cause.traceback


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ("if rank == 1: raise RuntimeError('no GPU today')", EngineDeadError, "status 1: RuntimeError: no GPU.* hello"),
        (
            "async def fail(): raise ValueError('in a group')\n"
            "async def fail_in_a_group(receiver):\n"
            "    async with engine_process.trio.open_nursery() as nursery: nursery.start_soon(fail)\n"
            "if rank == 1: engine_process._configuration = fail_in_a_group\n",
            EngineDeadError,
            "status 1: ValueError: in a group",
        ),
        (
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
            EngineDeadError,
            "engine-1 was killed by SIGKILL.*hello",
        ),
        (
            FAILING_START.format(phase="kv_pages", act="os.kill(os.getpid(), signal.SIGSEGV)"),
            EngineDeadError,
            r"engine-1 was killed by SIGSEGV \(while starting: \w+",
        ),
        (
            FAILING_START.format(phase="kv_pages", act="os._exit(7)"),
            EngineDeadError,
            r"engine-1 exited with status 7.* \(while starting: \w+",
        ),
        (
            FAILING_START.format(
                phase="kv_pages", act="from engine.errors import ConfigError; raise ConfigError('no')"
            ),
            ConfigError,
            "engine 1: no",
        ),
        (
            "hello = protocol.EngineHello\n"
            "engine_process.EngineHello = lambda index, pid: hello(index, pid, *([99] if rank == 1 else []))\n",
            EngineDeadError,
            f"engine-1 speaks version 99 of the protocol, and this front {PROTOCOL_VERSION}",
        ),
        (
            "def other_model(self, progress):\n"
            "    return msgspec.structs.replace(start(self, progress), model_digest=f'digest {rank}')\n"
            "NullModelRunner.start = other_model\n",
            ModelError,
            "engine 0 has digest 0",
        ),
    ],
    ids=["raises", "raises in a group", "killed", "crashes", "exits", "refuses", "other version", "other model"],
)
async def test_whatever_goes_wrong_with_one_engine_before_it_is_ready_ends_the_start_with_the_cause(
    change_engines: Any,
    change: str,
    error: type[MetronomeError],
    text: str,
) -> None:
    change_engines(change)
    with pytest.raises(error, match=text):
        async with open_engines():
            pytest.fail("it has started")


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    for phase in ("engine 0: weights", "engine 1: scheduler"):
        with trio.CancelScope() as scope:

            def cancel(reached: str, done: int, total: int, phase: str = phase, scope: Any = scope) -> None:
                if reached == phase:
                    scope.cancel()

            async with open_engines(progress=cancel):
                await trio.lowlevel.checkpoint()  # the last phase may be told with no checkpoint left in the start
                pytest.fail("it has started")
        assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("identity", "hello", "text"),
    [
        (identity_of(1), EngineHello(1, os.getpid() + 1), "engine-1 is process "),
        (identity_of(0), EngineHello(1, os.getpid()), "engine-1 has the identity 0100, and it came under 0000"),
        (identity_of(2), EngineHello(2, os.getpid()), "it calls itself engine-2, and there are engine-0, engine-1"),
        (identity_of(1), EngineHello(1, os.getpid(), PROTOCOL_VERSION + 1), f"version {PROTOCOL_VERSION + 1}"),
    ],
)
async def test_a_hello_that_none_of_the_engines_would_say_is_refused_by_name(
    identity: bytes, hello: EngineHello, text: str
) -> None:
    async with open_connection(2, identity) as (connection, dealer):
        for process in connection._processes:
            process.pid = os.getpid()
            process.started.set()
        await SendChannel[EngineHello](dealer).send(hello)
        with trio.fail_after(5), pytest.raises(EngineDeadError, match=text) as raised:
            await connection.greet(EngineConfig(model="null", data_parallel_size=2))
    assert f"refused a hello of process {hello.pid}" in str(raised.value)


async def test_a_hello_that_cannot_be_decoded_ends_the_start_by_name() -> None:
    async with open_connection(1, identity_of(0)) as (connection, dealer):
        connection._processes[0].started.set()
        await dealer.send([b"\x93good day"])
        text = "a hello that cannot be decoded: from peer 0000: "
        with trio.fail_after(5), pytest.raises(EngineDeadError, match=text):
            await connection.greet(EngineConfig(model="null"))


async def test_what_a_dead_engine_said_before_a_message_that_cannot_be_read_counts() -> None:
    async with open_connection(1) as (connection, _):
        said = [EngineCoreOutputs(0, step) for step in (1, 2)]
        frames = [Encoder().encode(message) for message in said]
        connection._receiver._undecoded.extend([*frames, [b"\xc1"]])
        connection._dead = lambda: EngineDeadError(Cause("EngineDied", "engine-0 was killed"))
        assert await connection.receive() == said
        with pytest.raises(EngineDeadError, match="engine-0 was killed"):
            await connection.receive()


@pytest.mark.parametrize("is_starting", [True, False])
@pytest.mark.parametrize("index", [2, -1, 2**40])
async def test_a_message_of_an_engine_that_there_is_not_is_refused_by_name_once_those_before_it_are_taken(
    index: int, is_starting: bool
) -> None:
    said = f"ProtocolError: refused an EngineCoreOutputs of engine {index}: the engines are numbered 0 to 1"
    async with open_connection(2) as (connection, _):
        refused, good = EngineCoreOutputs(index, 1), EngineCoreOutputs(1, 1)
        connection._is_starting = is_starting
        connection._receiver._undecoded.extend(Encoder().encode(message) for message in (good, refused, good))
        assert await connection.receive() == [good]
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=said):
                await connection.receive()


async def test_a_dead_engine_counts_as_dead_for_its_own_reason_whatever_came_of_one_that_there_is_not() -> None:
    async with open_connection(2) as (connection, _):
        connection._receiver._undecoded.append(Encoder().encode(EngineCoreOutputs(2, 1)))
        connection._dead = lambda: EngineDeadError(Cause("EngineDied", "engine-0 was killed"))
        with pytest.raises(EngineDeadError, match="engine-0 was killed"):
            await connection.receive()


async def test_an_engine_that_says_twice_that_it_is_ready_does_not_count_for_another(change_engines: Any) -> None:
    change_engines(
        "of = protocol.EngineReady.of\n"
        "protocol.EngineReady.of = lambda capacity, **said: of(capacity, **said | {'engine_index': 0})\n"
    )
    with pytest.raises(EngineDeadError, match=r"ProtocolError: engine 0 (said twice that it is|is) ready"):
        async with open_engines():
            pytest.fail("it has started")


async def test_an_engine_that_is_stopped_before_it_is_answered_says_nothing_and_exits_0() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with open_context() as context:
            router, pull = ZmqSocket(context, SocketKind.ROUTER), ZmqSocket(context, SocketKind.PULL)
            async with router, pull:
                argv = engine_argv(0, router.bind(f"ipc://{folder}/requests"), pull.bind(f"ipc://{folder}/outputs"))
                hellos = RouterReceiveChannel[EngineHello](router, EngineHello, on_bad_message=refuse_hello)
                async with open_child("engine-0", argv, term_grace_s=600) as child:
                    with trio.fail_after(60):
                        await hellos.receive()
                        SendChannel[ClientMessage](router, to=identity_of(0)).send_nowait(Shutdown())
                        assert await child.wait() == 0
                assert list(child.stderr_tail) == []
