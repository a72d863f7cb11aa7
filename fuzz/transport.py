"""However senders and receivers are cancelled, no message is lost, comes twice, out of order or changed.

    python -m fuzz transport --minutes 2 --seed 7

Each round, two sides send each other up to 100,000 messages at once, in one loop and in two processes in turn, over
drawn sockets and addresses, tcp with CURVE among them. Tasks share each socket; calls are cancelled before they begin
or within 0.2 ms; payloads are small, large, or arrays inline and beside.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import trio

from transport.channel import ReceiveChannel, RouterReceiveChannel, SendChannel
from transport.codec import DecodeError
from transport.process import child_guard, describe_exit, open_child
from transport.zmq_socket import Context, Curve, SocketKind, ZmqSocket, open_context

NUM_SENDERS = 8
MAX_MESSAGES = 100_000
"""Of a round, each way."""
WINDOW = 5_000
"""How many more messages a side may have sent than received; nothing else bounds what lies in memory."""
PATIENCE_S = 60.0
"""How long nothing may come before the round has failed."""
PEER = b"peer"
CHANCE = 0.05
"""Of a call to be cancelled before it begins, and as often within MAX_DELAY_S."""
MAX_DELAY_S = 2e-4
_KEYS = "FUZZ_TRANSPORT_KEYS"
_ROOT = str(Path(__file__).parent.parent)
_CHILD = f"import sys; sys.path.insert(0, {_ROOT!r}); from fuzz.transport import child; child()"


class Item(msgspec.Struct, array_like=True, tag=True):
    """One message: whose, which, and what can be told from that."""

    sender: int
    index: int
    text: str = ""
    array: npt.NDArray[np.int64] | None = None


class End(msgspec.Struct, array_like=True, tag=True):
    """A sender's last word: how many items it sent. HELLO is a side's first word, and what says that all has come."""

    sender: int
    total: int


Word = Item | End
HELLO = End(-1, 0)


Terms = tuple[random.Random, int, float]
"""What is drawn from, how many messages, and how many seconds at most."""


@dataclass(frozen=True)
class Way:
    """How two sides are joined.

    Attributes:
        address: Where one listens; `*` is filled in.
        listens: The kind of socket that does; the other is a DEALER.
        curve: Its keys.
    """

    address: str
    listens: SocketKind
    curve: Curve | None = None

    @classmethod
    def draw(cls, draw: random.Random, folder: str, *, in_one_loop: bool) -> Way:
        """Return a drawn way; its unix socket lies in `folder`."""
        kind = draw.choice([SocketKind.ROUTER, SocketKind.DEALER])
        addresses = [f"ipc://{folder}/{draw.random()}"] * 2 + ["tcp://127.0.0.1:*"] * 2 + ["inproc://x"] * in_one_loop
        address = draw.choice(addresses)
        return cls(address, kind, Curve.draw() if address.startswith("tcp") and draw.random() < 0.5 else None)


def item(sender: int, index: int) -> Item:
    """Return the item that these numbers stand for."""
    kind = (index * NUM_SENDERS + sender) % 1009
    if kind == 0:
        return Item(sender, index, f"{index} " * 20_000)  # larger than what is copied
    if kind in (1, 2, 3):
        return Item(sender, index, array=np.full((5, 1_000, 12_000)[kind - 1], index))  # inline, copied, not copied
    return Item(sender, index, f"{index}" * (kind % 5))


class Side:
    """One end: eight senders and a receiver, all of them cancelled at random moments."""

    def __init__(
        self,
        sender: SendChannel[Word],
        receiver: ReceiveChannel[Word] | RouterReceiveChannel[Word],
        draw: random.Random,
        num_messages: int,
        duration_s: float,
    ) -> None:
        """Send `num_messages`, fewer if `duration_s` are over before."""
        self._sender, self._receiver, self._draw = sender, receiver, draw
        self._num_each = num_messages // NUM_SENDERS
        self._duration_s = duration_s
        self._num_sent = 0
        self._expected = [0] * NUM_SENDERS
        self._num_ended = 0
        self._news = trio.Event()
        self.has_parted = False
        self.counts = Counter[str]()

    async def run(self) -> Counter[str]:
        """Send and receive to the end; return what was counted.

        Raises:
            AssertionError: A message was lost, doubled, reordered or changed.
        """
        deadline = trio.current_time() + self._duration_s
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive)
            for sender in range(NUM_SENDERS):
                nursery.start_soon(self._send, sender, deadline)
        return self.counts

    def _cancelled_at_random(self) -> trio.CancelScope:
        chance = self._draw.random()
        if chance < CHANCE:
            scope = trio.CancelScope()
            scope.cancel()
            return scope
        if chance < 2 * CHANCE:
            return trio.move_on_after(self._draw.random() * MAX_DELAY_S)
        return trio.CancelScope()

    async def _send(self, sender: int, deadline: float) -> None:
        index = 0
        while index < self._num_each and trio.current_time() < deadline:
            while self._num_sent - sum(self._expected) > WINDOW and self._num_ended < NUM_SENDERS:
                await self._news.wait()
            with self._cancelled_at_random() as scope:
                await self._sender.send(item(sender, index))
                index += 1
                self._num_sent += 1
            self.counts["sends cancelled"] += scope.cancelled_caught
        await self._sender.send(End(sender, index))

    async def _receive(self) -> None:
        while self._num_ended < NUM_SENDERS:
            with trio.fail_after(PATIENCE_S), self._cancelled_at_random() as scope:
                for word in await self._receiver.receive_many(self._draw.choice([1, 2, 64])):
                    self._check(word[1] if isinstance(word, tuple) else word)
            self.counts["receives cancelled"] += scope.cancelled_caught
            self._news.set()
            self._news = trio.Event()
        self.counts["messages"] += sum(self._expected)

    def _check(self, word: Word) -> None:
        if word == HELLO:
            self.has_parted = True
            return
        expected = self._expected[word.sender]
        if isinstance(word, End):
            assert word.total == expected, f"{expected} of {word.total} messages came from sender {word.sender}"
            self._num_ended += 1
            return
        assert word.index == expected, f"message {word.index} of sender {word.sender} came in place of {expected}"
        wanted = item(word.sender, word.index)
        assert word.text == wanted.text, f"message {word.index} of sender {word.sender} has changed"
        assert np.array_equal(word.array, wanted.array), f"an array of sender {word.sender} has changed"  # type: ignore[arg-type]
        self._expected[word.sender] += 1


def _refuse(error: DecodeError) -> None:
    raise AssertionError("a message did not decode") from error


async def _listen(socket: ZmqSocket, way: Way, rest: Terms) -> Counter[str]:
    """Be the side that listens; it says when all has come."""
    sender = SendChannel[Word](socket, to=PEER if way.listens == SocketKind.ROUTER else None)
    receiver: ReceiveChannel[Word] | RouterReceiveChannel[Word]
    if way.listens == SocketKind.ROUTER:
        receiver = RouterReceiveChannel[Word](socket, Word, on_bad_message=_refuse)
    else:
        receiver = ReceiveChannel[Word](socket, Word, on_bad_message=_refuse)
    assert await receiver.receive() in (HELLO, (PEER, HELLO))
    counts = await Side(sender, receiver, *rest).run()
    await sender.send(HELLO)
    await _written(socket)
    return counts


async def _call(socket: ZmqSocket, address: str, rest: Terms) -> Counter[str]:
    """Be the side that connects; it waits until all has come, for who closes before drops what is not written."""
    socket.connect(address)
    sender = SendChannel[Word](socket)
    receiver = ReceiveChannel[Word](socket, Word, on_bad_message=_refuse)
    await sender.send(HELLO)
    side = Side(sender, receiver, *rest)
    counts = await side.run()
    if not side.has_parted:
        assert await receiver.receive() == HELLO
    await _written(socket)
    return counts


async def _written(socket: ZmqSocket) -> None:
    """Wait until nothing is held for ZeroMQ any more."""
    with trio.fail_after(PATIENCE_S):
        while socket.num_pending:  # noqa: ASYNC110 - pyzmq's collector says nothing when it is done
            await trio.sleep(0.001)


@asynccontextmanager
async def _listening(way: Way) -> AsyncIterator[tuple[Context, ZmqSocket, str]]:
    async with open_context() as context, ZmqSocket(context, way.listens, curve=way.curve) as socket:
        yield context, socket, socket.bind(way.address)


async def in_one_loop(draw: random.Random, way: Way, num_messages: int, duration_s: float) -> Counter[str]:
    """Let both sides run in this loop; return what was counted on both."""
    counts = Counter[str]()
    peers = way.curve and way.curve.for_peers()
    async with (
        _listening(way) as (context, socket, address),
        ZmqSocket(context, SocketKind.DEALER, identity=PEER, curve=peers) as other,
        trio.open_nursery() as nursery,
    ):

        async def call() -> None:
            counts.update(await _call(other, address, (draw, num_messages, duration_s)))

        nursery.start_soon(call)
        counts.update(await _listen(socket, way, (draw, num_messages, duration_s)))
    return counts


async def in_two_processes(draw: random.Random, way: Way, num_messages: int, duration_s: float) -> Counter[str]:
    """Let one side run in a child process; return what was counted on this one."""
    async with _listening(way) as (_, socket, address):
        argv = [sys.executable, "-P", "-c", _CHILD, address, str(draw.random()), str(num_messages), str(duration_s)]
        env = {_KEYS: way.curve.public_key.decode() if way.curve else ""}
        async with open_child("the other side", argv, env=env) as child, trio.open_nursery() as nursery:

            async def watch() -> None:
                status = await child.wait()
                assert status == 0, describe_exit(child.name, status, child.stderr_tail)

            nursery.start_soon(watch)
            return await _listen(socket, way, (draw, num_messages, duration_s))


def child() -> None:
    """Be the other side: arguments are the address, the seed, how many messages and how long at most."""
    child_guard()
    address, seed, num_messages, duration_s = sys.argv[1:]
    keys = os.environ[_KEYS]

    async def main() -> None:
        curve = Curve(keys.encode()) if keys else None
        async with (
            open_context() as context,
            ZmqSocket(context, SocketKind.DEALER, identity=PEER, curve=curve) as socket,
        ):
            await _call(socket, address, (random.Random(seed), int(num_messages), float(duration_s)))

    trio.run(main)


def run(minutes: float, seed: int) -> int:
    """Exchange messages until the time is over; returns how many came.

    Raises:
        AssertionError: One was lost, doubled, reordered or changed.
    """
    deadline = time.monotonic() + 60 * minutes
    draw = random.Random(seed)
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        while (left_s := deadline - time.monotonic()) > 0:
            one_loop = counts["rounds"] % 2 == 1
            way = Way.draw(draw, folder, in_one_loop=one_loop)
            exchange = in_one_loop if one_loop else in_two_processes
            counts.update(trio.run(partial(exchange, draw, way, MAX_MESSAGES, left_s)))
            counts["rounds"] += 1
    print("transport:", ", ".join(f"{number} {name}" for name, number in counts.items()), "- none lost")
    return counts["messages"]
