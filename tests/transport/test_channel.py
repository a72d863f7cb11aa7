from __future__ import annotations

import msgspec
import numpy as np
import pytest
import trio

from transport.channel import ReceiveChannel, RouterReceiveChannel, SendChannel
from transport.zmq_socket import SocketKind, ZmqSocket, open_context


class Ping(msgspec.Struct, tag=True, array_like=True, frozen=True):
    number: int


class Picture(msgspec.Struct, tag=True, array_like=True, frozen=True, eq=False):
    pixels: np.ndarray


Message = Ping | Picture
ENGINE = b"\x00\x00"


@pytest.fixture
async def pair(tmp_path):
    """A PUSH and a PULL socket."""
    async with (
        open_context() as context,
        ZmqSocket(context, SocketKind.PULL) as pull,
        ZmqSocket(context, SocketKind.PUSH) as push,
    ):
        push.connect(pull.bind(f"ipc://{tmp_path}/s"))
        yield push, pull


def refuse_bad(error):
    raise AssertionError(f"no bad message was expected: {error}")


async def test_a_channel_carries_typed_messages_with_arrays(pair):
    push, pull = pair
    sender = SendChannel[Message](push)
    receiver = ReceiveChannel[Message](pull, Message, on_bad_message=refuse_bad)
    pixels = np.arange(300_000, dtype=np.float32)
    with trio.fail_after(5):
        await sender.send(Ping(1))
        sender.send_nowait(Picture(pixels))
        assert await receiver.receive() == Ping(1)
        picture = await receiver.receive()
    assert isinstance(picture, Picture)
    assert np.array_equal(picture.pixels, pixels)
    assert not picture.pixels.flags.writeable


async def test_what_came_before_a_bad_message_that_ends_the_receiving_is_received_first(pair):
    push, pull = pair
    receiver = ReceiveChannel[Message](pull, Message, on_bad_message=refuse_bad)
    sender = SendChannel[Message](push)
    with trio.fail_after(5):
        await sender.send(Ping(1))
        await sender.send(Ping(2))
        push.send_nowait([b"\xc1"])
        await sender.send(Ping(3))
        received = []
        with pytest.raises(AssertionError, match="no bad message"):  # noqa: PT012
            while True:
                received += await receiver.receive_many()
        assert received == [Ping(1), Ping(2)]
        assert await receiver.receive() == Ping(3)


async def test_something_else_may_be_received_in_a_bad_messages_place(pair):
    push, pull = pair
    receiver = ReceiveChannel[Message](pull, Message, on_bad_message=lambda error: Ping(7))
    push.send_nowait([b"\xc1"])
    with trio.fail_after(5):
        assert await receiver.receive() == Ping(7)


async def test_a_bad_message_costs_itself_alone(pair):
    push, pull = pair
    bad = []
    receiver = ReceiveChannel[Message](pull, Message, on_bad_message=bad.append)
    sender = SendChannel[Message](push)
    with trio.fail_after(5):
        for number in range(3):
            push.send_nowait([b"\xc1"])
            push.send_nowait([b"\x92\xa4Ping\x01", b"surplus frame"])
            await sender.send(Ping(number))
        received = []
        while len(received) < 2:
            received += await receiver.receive_many(1)
        received.append(await receiver.receive())
    assert received == [Ping(0), Ping(1), Ping(2)]
    assert len(bad) == 6
    push.send_nowait([b"\xc1"])
    with pytest.raises(trio.WouldBlock), trio.fail_after(5):  # noqa: PT012
        while True:
            receiver.receive_nowait()
            await trio.lowlevel.checkpoint()


async def test_receive_many_takes_what_waits(pair):
    push, pull = pair
    sender = SendChannel[Message](push)
    receiver = ReceiveChannel[Message](pull, Message, on_bad_message=refuse_bad)
    for number in range(100):
        sender.send_nowait(Ping(number))
    received = []
    with trio.fail_after(5):
        while len(received) < 100:
            batch = await receiver.receive_many(16)
            assert len(batch) <= 16
            received += batch
    assert received == [Ping(number) for number in range(100)]


async def test_receive_nowait_returns_what_waits_and_skips_bad_messages(tmp_path):
    bad = []
    async with (
        open_context() as context,
        ZmqSocket(context, SocketKind.PULL) as pull,
        ZmqSocket(context, SocketKind.PUSH) as push,
    ):
        push.connect(pull.bind("inproc://s"))
        receiver = ReceiveChannel(pull, Ping, on_bad_message=bad.append)
        push.send_nowait([b"junk"])
        SendChannel[Ping](push).send_nowait(Ping(5))
        push.send_nowait([b"junk"])
        assert receiver.receive_nowait() == Ping(5)
        with pytest.raises(trio.WouldBlock):
            receiver.receive_nowait()
        assert len(bad) == 2


async def test_router_channels_address_one_peer_and_name_the_sender(tmp_path):
    async with open_context() as context:
        router = ZmqSocket(context, SocketKind.ROUTER)
        address = router.bind(f"ipc://{tmp_path}/s")
        dealers = [ZmqSocket(context, SocketKind.DEALER, identity=bytes([rank, 0])) for rank in range(2)]
        from_engines = RouterReceiveChannel(router, Ping, on_bad_message=refuse_bad)
        async with router, dealers[0], dealers[1]:
            with trio.fail_after(5):
                for rank, dealer in enumerate(dealers):
                    dealer.connect(address)
                    await SendChannel[Ping](dealer).send(Ping(rank))
                    assert await from_engines.receive() == (bytes([rank, 0]), Ping(rank))
                for rank, dealer in enumerate(dealers):
                    await SendChannel[Ping](router, to=bytes([rank, 0])).send(Ping(10 + rank))
                    receiver = ReceiveChannel(dealer, Ping, on_bad_message=refuse_bad)
                    assert await receiver.receive() == Ping(10 + rank)
                with pytest.raises(trio.BrokenResourceError):
                    await SendChannel[Ping](router, to=b"\x09\x00").send(Ping(0))
                with pytest.raises(trio.BrokenResourceError):
                    SendChannel[Ping](router, to=b"\x09\x00").send_nowait(Ping(0))


async def test_a_bad_message_on_a_router_names_its_sender():
    bad = []
    async with open_context() as context:
        router = ZmqSocket(context, SocketKind.ROUTER)
        dealer = ZmqSocket(context, SocketKind.DEALER, identity=ENGINE)
        async with router, dealer:
            dealer.connect(router.bind("inproc://s"))
            channel = RouterReceiveChannel(router, Ping, on_bad_message=bad.append)
            dealer.send_nowait([b"junk"])
            SendChannel[Ping](dealer).send_nowait(Ping(1))
            with trio.fail_after(5):
                assert await channel.receive() == (ENGINE, Ping(1))
    assert str(bad[0]).startswith("from peer 0000: ")


async def test_closing_a_channel_leaves_a_shared_socket_open_and_an_owned_one_closed(pair):
    push, pull = pair
    first, second = SendChannel[Ping](push), SendChannel[Ping](push, owns_socket=True)
    receiver = ReceiveChannel(pull, Ping, on_bad_message=refuse_bad, owns_socket=True)
    await first.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await first.send(Ping(0))
    with pytest.raises(trio.ClosedResourceError):
        first.send_nowait(Ping(0))
    with trio.fail_after(5):
        await second.send(Ping(1))
        assert await receiver.receive() == Ping(1)
    for channel in (second, receiver):
        await channel.aclose()
        await channel.aclose()
    for socket in pair:
        with pytest.raises(trio.ClosedResourceError):
            socket.receive_nowait()
    with pytest.raises(trio.ClosedResourceError):
        await receiver.receive()


async def test_what_cannot_be_sent_is_the_callers_type_error_and_sends_nothing(pair):
    push, pull = pair
    sender = SendChannel[object](push)
    with pytest.raises(TypeError, match="cannot send a object"):
        await sender.send(object())
    with trio.fail_after(5):
        await sender.send(Ping(3))
        assert await ReceiveChannel(pull, Ping, on_bad_message=refuse_bad).receive() == Ping(3)
