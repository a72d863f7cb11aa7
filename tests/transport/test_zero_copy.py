"""Large arrays cross without being copied in Python; what was encoded stays intact while buffers are used again."""

from __future__ import annotations

import os
import sys
import textwrap
import tracemalloc

import msgspec
import numpy as np
import pytest
import trio

from transport.channel import ReceiveChannel, SendChannel
from transport.codec import DecodeError
from transport.process import open_child
from transport.zmq_socket import SocketKind, ZmqSocket, open_context

SIZE_BYTES = 64 << 20
MAX_ALLOCATED_BYTES = 1 << 20


class Parcel(msgspec.Struct, array_like=True):
    number: int
    text: str = ""
    array: np.ndarray | None = None


def never(error: DecodeError) -> None:
    raise error


SENDER = """
    import sys, tracemalloc
    import numpy as np, trio
    from transport.process import child_guard
    from transport.channel import SendChannel
    from transport.zmq_socket import SocketKind, ZmqSocket, open_context
    child_guard()

    async def main():
        async with open_context() as context, ZmqSocket(context, SocketKind.PUSH) as push:
            push.connect(sys.argv[1])
            array = np.arange({size_bytes} // 4, dtype=np.uint32)
            channel = SendChannel(push)
            tracemalloc.start()
            await channel.send([1, "", array])
            peak_bytes = tracemalloc.get_traced_memory()[1]
            print(peak_bytes, push.pending_bytes, flush=True)
            await trio.sleep_forever()

    trio.run(main)
"""


async def test_64_mib_cross_between_processes_with_no_copy_on_either_side(tmp_path):
    lines_in, lines = trio.open_memory_channel[str](10)
    async with open_context() as context, ZmqSocket(context, SocketKind.PULL) as pull:
        argv = [sys.executable, "-c", textwrap.dedent(SENDER.format(size_bytes=SIZE_BYTES))]
        argv.append(pull.bind(f"ipc://{tmp_path}/s"))
        channel = ReceiveChannel(pull, Parcel, on_bad_message=never)
        with trio.fail_after(20):
            async with open_child("sender", argv, on_stderr_line=lines_in.send_nowait):
                tracemalloc.start()
                try:
                    parcel = await channel.receive()
                    peak_bytes = tracemalloc.get_traced_memory()[1]
                finally:
                    tracemalloc.stop()
                sender_peak_bytes, pending_bytes = map(int, (await lines.receive()).split())
    assert peak_bytes < MAX_ALLOCATED_BYTES
    assert sender_peak_bytes < MAX_ALLOCATED_BYTES
    assert pending_bytes in (0, SIZE_BYTES)
    # the sender, the socket and the context are gone; the array is what it was, and nobody can change it
    assert np.array_equal(parcel.array[::1000], np.arange(0, SIZE_BYTES // 4, 1000, dtype=np.uint32))
    assert not parcel.array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        parcel.array[0] = 1


def payload(number: int) -> Parcel:
    """A message whose payload is copied, sent without a copy, or goes beside an array, in turn."""
    if number % 3 == 2:
        return Parcel(number, str(number), np.full(20_000, number))
    return Parcel(number, f"{number} " * (10, 20_000)[number % 3])


async def test_a_hundred_messages_in_flight_stay_intact_while_buffers_are_used_again(tmp_path):
    async with (
        open_context() as context,
        ZmqSocket(context, SocketKind.PULL) as pull,
        ZmqSocket(context, SocketKind.PUSH) as push,
    ):
        push.connect(pull.bind(f"ipc://{tmp_path}/s"))
        sender, receiver = SendChannel[Parcel](push), ReceiveChannel(pull, Parcel, on_bad_message=never)
        await sender.send(Parcel(-1))
        await receiver.receive()
        for number in range(100):
            sender.send_nowait(payload(number))
        with trio.fail_after(10):
            received = [await receiver.receive() for _ in range(100)]
        for number, parcel in enumerate(received):
            expected = payload(number)
            assert (parcel.number, parcel.text) == (number, expected.text)
            assert expected.array is None or np.array_equal(parcel.array, expected.array)


async def test_small_messages_are_encoded_into_one_buffer_again_and_again(tmp_path):
    async with (
        open_context() as context,
        ZmqSocket(context, SocketKind.PULL) as pull,
        ZmqSocket(context, SocketKind.PUSH) as push,
    ):
        push.connect(pull.bind(f"ipc://{tmp_path}/s"))
        sender = SendChannel[Parcel](push)
        await sender.send(Parcel(0))
        buffer = push.take_buffer()
        push._socket._pending.give_back(buffer)
        for number in range(10):
            await sender.send(Parcel(number))
        assert push.take_buffer() is buffer


async def test_what_cannot_be_written_is_let_go_with_its_context(tmp_path):
    array = np.zeros(1 << 20, np.uint8)
    references = sys.getrefcount(array)
    with trio.fail_after(5):
        async with open_context() as context, ZmqSocket(context, SocketKind.PUSH) as push:
            push.connect(f"ipc://{tmp_path}/nobody")
            for _ in range(100):
                await SendChannel[np.ndarray](push).send(array)
            assert (push.num_pending, push.pending_bytes) == (100, 100 << 20)
        del push, context
        while sys.getrefcount(array) > references:  # noqa: ASYNC110 - pyzmq's collector says nothing when it is done
            await trio.sleep(0.001)


async def test_a_context_ends_while_its_peer_is_stopped_with_much_unread(tmp_path):
    reader = """
        import sys, zmq, os, signal
        from transport.process import child_guard
        child_guard()
        pull = zmq.Context().socket(zmq.PULL)
        pull.rcvhwm = 1
        pull.connect(sys.argv[1])
        pull.recv()
        os.kill(os.getpid(), signal.SIGSTOP)
    """
    with trio.fail_after(10):
        async with open_context() as context, ZmqSocket(context, SocketKind.PUSH) as push:
            argv = [sys.executable, "-c", textwrap.dedent(reader), push.bind(f"ipc://{tmp_path}/s")]
            async with open_child("reader", argv, term_grace_s=0.1) as child:
                await push.send([b"first"])
                await trio.to_thread.run_sync(os.waitid, os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
                for _ in range(10_000):
                    push.send_nowait([b"x" * 10_000])
                push.send_nowait([b"x" * SIZE_BYTES])
                with trio.fail_after(1):
                    push.close()
                    await trio.to_thread.run_sync(context.destroy, 0)
