from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
import trio
import trio.testing

from transport.zmq_socket import SocketKind, ZmqSocket, open_context


@pytest.fixture
async def context():
    async with open_context() as context:
        yield context


@pytest.fixture(params=["ipc", "inproc", "tcp"])
def address(request, tmp_path):
    return {"ipc": f"ipc://{tmp_path}/s", "inproc": "inproc://s", "tcp": "tcp://127.0.0.1:*"}[request.param]


def open_pair(context, address, kinds=(SocketKind.DEALER, SocketKind.DEALER), identity=None):
    listening, calling = ZmqSocket(context, kinds[0]), ZmqSocket(context, kinds[1], identity=identity)
    calling.connect(listening.bind(address))
    return listening, calling


async def test_messages_cross_both_ways_with_all_their_frames(context, address):
    left, right = open_pair(context, address)
    async with left, right:
        with trio.fail_after(5):
            await right.send([b"to left", b"", memoryview(b"three")])
            assert await left.receive() == [b"to left", b"", b"three"]
            await left.send([b"to right"])
            assert await right.receive() == [b"to right"]


async def test_bind_returns_the_address_to_connect_to(context):
    async with ZmqSocket(context, SocketKind.PULL) as pull:
        assert pull.bind("tcp://127.0.0.1:*").removeprefix("tcp://127.0.0.1:").isdecimal()


async def test_an_address_that_cannot_be_had_is_an_os_error_that_names_it(context, tmp_path):
    async with ZmqSocket(context, SocketKind.PULL) as first, ZmqSocket(context, SocketKind.PULL) as second:
        taken = first.bind("tcp://127.0.0.1:*")
        with pytest.raises(OSError, match=f"cannot bind {taken}: Address already in use"):
            second.bind(taken)
        with pytest.raises(OSError, match=r"cannot bind ipc:.*longer than"):
            second.bind(f"ipc://{tmp_path}/{'x' * 200}")
        with pytest.raises(OSError, match="cannot connect to nonsense"):
            second.connect("nonsense")


async def test_a_waiting_receiver_is_woken_while_the_same_socket_sends(context, address):
    left, right = open_pair(context, address)
    num_rounds = 200
    received = []

    async def receive():
        for _ in range(num_rounds):
            received.extend(await left.receive())

    async with left, right:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                for index in range(num_rounds):
                    await right.send([b"%d" % index])
                    await left.send([b"chatter"])
    assert received == [b"%d" % index for index in range(num_rounds)]


async def test_a_send_waits_for_the_first_peer_and_no_longer(context, address):
    async with ZmqSocket(context, SocketKind.PUSH) as push, ZmqSocket(context, SocketKind.PULL) as pull:
        bound = push.bind(address)
        with pytest.raises(trio.WouldBlock):
            push.send_nowait([b"nobody"])
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(push.send, [b"first"])
                nursery.start_soon(push.send, [b"second"])
                await trio.testing.wait_all_tasks_blocked()
                pull.connect(bound)
            assert sorted([await pull.receive(), await pull.receive()]) == [[b"first"], [b"second"]]


async def test_a_sender_inherits_the_descriptor_from_a_receiver_that_gives_up(context, address):
    async with ZmqSocket(context, SocketKind.DEALER) as socket, ZmqSocket(context, SocketKind.DEALER) as peer:
        bound = socket.bind(address)
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                receiving = trio.CancelScope()
                nursery.start_soon(cancellable, receiving, socket.receive)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(socket.send, [b"late"])
                await trio.testing.wait_all_tasks_blocked()
                receiving.cancel()
                await trio.testing.wait_all_tasks_blocked()
                peer.connect(bound)
            assert await peer.receive() == [b"late"]


async def cancellable(scope, call):
    with scope:
        await call()


async def test_send_nowait_sees_a_peer_that_connected_a_moment_ago(context):
    for index in range(20):
        async with ZmqSocket(context, SocketKind.PUSH) as push, ZmqSocket(context, SocketKind.PULL) as pull:
            push.bind(f"inproc://{index}")
            with pytest.raises(trio.WouldBlock):
                push.send_nowait([b"nobody"])
            pull.connect(f"inproc://{index}")
            push.send_nowait([b"somebody"])


async def test_sending_never_waits_for_a_slow_reader(context, address):
    pull, push = open_pair(context, address, (SocketKind.PULL, SocketKind.PUSH))
    async with pull, push:
        for index in range(5000):
            push.send_nowait([b"%d" % index])
        received = []
        with trio.fail_after(20):
            while len(received) < 5000:
                received += await pull.receive_many(64)
    assert received == [[b"%d" % index] for index in range(5000)]


async def test_receive_many_takes_what_waits_up_to_its_limit(context):
    pull, push = open_pair(context, "inproc://s", (SocketKind.PULL, SocketKind.PUSH))
    async with pull, push:
        for index in range(10):
            push.send_nowait([b"%d" % index])
        assert len(await pull.receive_many(4)) == 4
        assert len(await pull.receive_many(64)) == 6
        with pytest.raises(trio.WouldBlock):
            pull.receive_nowait()
        with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
            await pull.receive_many(0)


async def test_a_router_names_its_peers_and_refuses_one_it_does_not_know(context, address):
    router, dealer = open_pair(context, address, (SocketKind.ROUTER, SocketKind.DEALER), identity=b"\x01\x00")
    async with router, dealer:
        with trio.fail_after(5):
            await dealer.send([b"hello"])
            assert await router.receive() == [b"\x01\x00", b"hello"]
            await router.send([b"\x01\x00", b"welcome"])
            assert await dealer.receive() == [b"welcome"]
            for _ in range(2):
                with pytest.raises(trio.BrokenResourceError, match=r"no peer with identity 0200 "):
                    await router.send([b"\x02\x00", b"anyone?"])


async def test_a_peer_that_left_breaks_the_router_send_and_not_the_socket(context, address):
    router = ZmqSocket(context, SocketKind.ROUTER)
    dealer, other = (ZmqSocket(context, SocketKind.DEALER, identity=name) for name in (b"gone", b"here"))
    async with router, dealer, other:
        bound = router.bind(address)
        dealer.connect(bound)
        other.connect(bound)
        with trio.fail_after(5):
            for socket in (dealer, other):
                await socket.send([b"hello"])
                await router.receive()
            dealer.close()
            with pytest.raises(trio.BrokenResourceError):  # noqa: PT012  # its going is noticed at a time of its own
                while True:
                    await router.send([b"gone", b"?"])
            await router.send([b"here", b"!"])
            assert await other.receive() == [b"!"]


async def test_closing_wakes_every_kind_of_waiter(context):
    socket = ZmqSocket(context, SocketKind.DEALER)
    socket.bind("inproc://nobody")
    num_closed = 0

    async def expect_closed(call, *args):
        nonlocal num_closed
        with pytest.raises(trio.ClosedResourceError):
            await call(*args)
        num_closed += 1

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(expect_closed, socket.receive)
                nursery.start_soon(expect_closed, socket.send, [b"x"])
            await trio.testing.wait_all_tasks_blocked()
            socket.close()
            socket.close()
        for call in (socket.send, socket.receive_many):
            await expect_closed(call, *([[b"x"]] if call == socket.send else []))
        for call in (socket.receive_nowait, lambda: socket.send_nowait([b"x"])):
            with pytest.raises(trio.ClosedResourceError):
                call()
        await socket.aclose()
    assert num_closed == 6


async def test_sending_and_receiving_are_checkpoints(context):
    left, right = open_pair(context, "inproc://s")
    async with left, right:
        with trio.testing.assert_checkpoints():
            await left.send([b"x"])
        with trio.testing.assert_checkpoints():
            await right.receive()


async def test_a_cancelled_call_has_done_nothing(context):
    left, right = open_pair(context, "inproc://s")
    async with left, right:
        await left.send([b"only"])
        with trio.CancelScope() as scope:
            scope.cancel()
            await right.receive()
        with trio.CancelScope() as scope:
            scope.cancel()
            await left.send([b"never"])
        assert right.receive_nowait() == [b"only"]
        with pytest.raises(trio.WouldBlock):
            right.receive_nowait()


async def test_large_frames_are_held_until_written_and_let_go_then(context, tmp_path):
    pull, push = open_pair(context, f"ipc://{tmp_path}/s", (SocketKind.PULL, SocketKind.PUSH))
    async with pull, push:
        large = np.arange(1 << 20, dtype=np.uint8)
        push.send_nowait([b"head", memoryview(large), b"small", memoryview(large[: 1 << 17])])
        push.send_nowait([b"small alone"])
        assert push.num_pending <= 1
        assert push.pending_bytes in (0, (1 << 20) + (1 << 17))
        with trio.fail_after(5):
            received = await pull.receive()
            assert received[1] == large.tobytes()
            assert await pull.receive() == [b"small alone"]
            while push.num_pending:
                await trio.lowlevel.checkpoint()
        assert push.pending_bytes == 0


async def test_a_context_ends_without_waiting_for_unsent_messages(tmp_path):
    with trio.fail_after(5):
        async with open_context() as context, ZmqSocket(context, SocketKind.PUSH) as push:
            push.connect(f"ipc://{tmp_path}/nobody")
            push.send_nowait([b"x" * 1000])
    assert context.closed


async def test_a_context_ends_in_a_cancelled_scope():
    with trio.CancelScope() as scope:
        async with open_context() as context:
            scope.cancel()
    assert context.closed


@pytest.mark.parametrize(
    ("address", "kinds"),
    [
        ("ipc", (SocketKind.DEALER, SocketKind.DEALER)),
        ("ipc", (SocketKind.ROUTER, SocketKind.DEALER)),
        ("inproc", (SocketKind.DEALER, SocketKind.DEALER)),
        ("tcp", (SocketKind.ROUTER, SocketKind.DEALER)),
    ],
    indirect=["address"],
)
async def test_random_cancellation_loses_duplicates_and_reorders_nothing(context, address, kinds):
    draw = random.Random(7)
    num_senders, num_each = 8, 250
    num_cancelled = defaultdict(int)
    left, right = open_pair(context, address, kinds, identity=b"peer")
    to_right = [b"peer"] if kinds[0] == SocketKind.ROUTER else []

    def maybe_cancel():
        scope = trio.CancelScope()
        chance = draw.random()
        if chance < 0.1:
            scope.cancel()
        elif chance < 0.2:
            scope.deadline = trio.current_time() + draw.random() * 2e-4
        return scope

    async def send(socket, head, sender):
        index = 0
        while index < num_each:
            with maybe_cancel() as scope:
                await socket.send([*head, b"%d" % sender, b"%d" % index])
                index += 1
            num_cancelled["send"] += scope.cancelled_caught

    async def receive(socket):
        expected = [0] * num_senders
        while sum(expected) < num_senders * num_each:
            with maybe_cancel() as scope:
                for message in await socket.receive_many(draw.randint(1, 3)):
                    sender, index = map(int, message[-2:])
                    assert index == expected[sender]
                    expected[sender] += 1
            num_cancelled["receive"] += scope.cancelled_caught
        with pytest.raises(trio.WouldBlock):
            socket.receive_nowait()

    async with left, right:
        with trio.fail_after(60):
            if to_right:
                await right.send([b"hello"])
                await left.receive()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive, left)
                nursery.start_soon(receive, right)
                for sender in range(num_senders):
                    nursery.start_soon(send, left, to_right, sender)
                    nursery.start_soon(send, right, [], sender)
    assert num_cancelled["send"] > 100
    assert num_cancelled["receive"] > 10
