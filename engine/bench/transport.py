"""Bench `transport`: messages one way between two processes, over the engine's own channels and a unix socket.

A child sends what it is asked for as fast as it can; this process receives it. CPU time is that of all threads of each
process, ZeroMQ's included.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import trio

import engine
from engine.bench.report import Report, Table
from transport.channel import ReceiveChannel, SendChannel
from transport.codec import DecodeError
from transport.folder import open_folder
from transport.process import Child, describe_exit, open_child
from transport.zmq_socket import SocketKind, ZmqSocket, open_context

MAX_RECEIVED = 256
"""Messages taken in one go, as the engine does."""
BATCH = 64
"""Messages sent between two checkpoints."""
MAX_BYTES = 1 << 28
"""Of one case: what is sent and not received lies in memory."""

_ROOT = str(Path(engine.__file__).parent.parent)
_MAIN = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); from transport.process import child_guard; child_guard(); "
    "from engine.bench.transport import main; main()"
)


class Order(msgspec.Struct, array_like=True, tag=True):
    """What to send: `num_messages` with so many bytes of payload, or of an array."""

    num_messages: int
    size_bytes: int
    is_array: bool = False


class AllCame(msgspec.Struct, array_like=True, tag=True):
    """Whoever sent may say what it took."""


class Parcel(msgspec.Struct, array_like=True, tag=True):
    """One message."""

    payload: bytes = b""
    array: npt.NDArray[np.uint8] | None = None


class Sent(msgspec.Struct, array_like=True, tag=True):
    """What sending took, in seconds of CPU time."""

    cpu_s: float


def orders(num_messages: int) -> dict[str, Order]:
    """Return what is measured; fewer of the large ones."""
    sizes = {"100_B": 100, "1_kB": 1000, "16_kB": 16_000, "64_kB": 64_000, "1_MiB": 1 << 20}
    arrays = {"array_of_1_kB": 1000, "array_of_64_KiB": 1 << 16, "array_of_1_MiB": 1 << 20, "array_of_64_MiB": 1 << 26}
    cases = {name: Order(min(num_messages, MAX_BYTES // size), size) for name, size in sizes.items()}
    for name, size in arrays.items():
        cases[name] = Order(min(num_messages, MAX_BYTES // size), size, is_array=True)
    return cases


async def transport(num_messages: int) -> Report:
    """Measure and report."""
    table = Table(["messages_per_s", "MB_per_s", "sender_us", "receiver_us"])
    with open_folder("metronome-bench-") as folder:
        async with open_context() as context, ZmqSocket(context, SocketKind.DEALER) as socket:
            argv = [sys.executable, "-P", "-c", _MAIN, socket.bind(f"ipc://{folder}/s")]
            async with open_child("sender", argv, orphaned_folders=[folder]) as child, trio.open_nursery() as nursery:
                nursery.start_soon(_fail_with, child)
                for name, order in orders(num_messages).items():
                    table.rows[name] = await _measure(socket, order)
                nursery.cancel_scope.cancel()
    report = Report("transport", {"num_messages": num_messages})
    report.add("small_messages", table.rows["100_B"][0], "messages/s")
    report.add_table("one_way", table)
    return report


async def _measure(socket: ZmqSocket, order: Order) -> Sequence[float]:
    """Return messages and megabytes a second, and microseconds of CPU time a message of sender and receiver."""
    sender = SendChannel[Order | AllCame](socket)
    receiver = ReceiveChannel[Parcel | Sent](socket, Parcel | Sent, on_bad_message=_refuse)
    await sender.send(order)
    num_received = len(await receiver.receive_many(1))
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    while num_received < order.num_messages:
        num_received += len(await receiver.receive_many(MAX_RECEIVED))
    rate = (num_received - 1) / (time.perf_counter() - began_s)
    own_us = (time.process_time() - cpu_began_s) / (num_received - 1) * 1e6
    await sender.send(AllCame())
    sent = await receiver.receive()
    assert isinstance(sent, Sent)
    return rate, rate * order.size_bytes / 1e6, sent.cpu_s / num_received * 1e6, own_us


async def _fail_with(child: Child) -> None:
    status = await child.wait()
    raise RuntimeError(describe_exit(child.name, status, child.stderr_tail))


def main() -> None:
    """Be the sender: the argument is the address of the receiver."""
    trio.run(_send, sys.argv[1])


async def _send(address: str) -> None:
    async with open_context() as context, ZmqSocket(context, SocketKind.DEALER) as socket:
        socket.connect(address)
        receiver = ReceiveChannel[Order | AllCame](socket, Order | AllCame, on_bad_message=_refuse)
        sender = SendChannel[Parcel | Sent](socket)
        while True:
            order = await receiver.receive()
            assert isinstance(order, Order)
            parcel = Parcel(bytes(order.size_bytes))
            if order.is_array:
                parcel = Parcel(array=np.zeros(order.size_bytes, np.uint8))
            began_s = time.process_time()
            for number in range(order.num_messages):
                sender.send_nowait(parcel)
                if number % BATCH == 0:
                    await trio.lowlevel.checkpoint()
            await receiver.receive()
            sender.send_nowait(Sent(time.process_time() - began_s))


def _refuse(error: DecodeError) -> None:
    raise AssertionError("a message of our own did not decode") from error
