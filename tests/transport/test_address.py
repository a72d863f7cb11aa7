"""Who can hear a socket: this user's processes, or those who hold its keys; anything else is refused by name."""

from __future__ import annotations

import contextlib
import os

import pytest
import trio
import zmq

from transport.address import Curve, check_connecting, check_listening
from transport.zmq_socket import SocketKind, ZmqSocket, open_context

LOOPBACK = ["tcp://127.0.0.1:5555", "tcp://127.1.2.3:*", "tcp://[::1]:5555", "tcp://localhost:5555", "inproc://x"]
BEYOND = ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:5555", "tcp://[::]:1", "tcp://eth0:1", "tcp://host:1"]


@pytest.fixture
async def context():
    async with open_context() as context:
        yield context


@pytest.mark.parametrize("address", LOOPBACK)
def test_this_machine_needs_no_keys(address):
    check_listening(address, None)
    check_connecting(address, None)


@pytest.mark.parametrize("address", [*BEYOND, "tcp://127.0.0.1;10.0.0.1:5555", "tcp://nonsense"])
def test_beyond_this_machine_is_refused_in_the_clear_and_said_what_to_do(address):
    for check, verb in ((check_listening, "bind"), (check_connecting, "connect to")):
        with pytest.raises(PermissionError) as caught:
            check(address, None)
        assert caught.value.strerror.startswith(f"cannot {verb} {address}: messages would leave this machine")
        assert "give the socket a Curve, or use 127.0.0.1" in caught.value.strerror


@pytest.mark.parametrize("address", BEYOND)
def test_beyond_this_machine_is_fine_with_keys(address):
    curve = Curve.draw()
    check_listening(address, curve)
    check_connecting(address, curve.for_peers())


@pytest.mark.parametrize("address", ["udp://127.0.0.1:1", "ws://127.0.0.1:1", "nonsense", ""])
def test_other_transports_are_refused(address):
    with pytest.raises(OSError, match=r"use ipc://, tcp:// or inproc://"):
        check_connecting(address, Curve.draw())


def test_who_listens_needs_the_secret_key():
    with pytest.raises(PermissionError, match="a listening socket needs the secret key"):
        check_listening("tcp://127.0.0.1:1", Curve.draw().for_peers())


@pytest.mark.parametrize("path", ["*", "@abstract", "relative/s"])
def test_a_unix_socket_has_an_absolute_path(path):
    with pytest.raises(PermissionError, match="use the absolute path"):
        check_listening(f"ipc://{path}", None)


def test_a_unix_socket_lies_where_no_other_user_may_enter(tmp_path):
    tmp_path.chmod(0o700)
    check_listening(f"ipc://{tmp_path}/s", None)
    for mode in (0o710, 0o701, 0o755):
        tmp_path.chmod(mode)
        with pytest.raises(PermissionError, match=rf"others may enter its folder \(owner \d+, mode {mode:o}\)"):
            check_listening(f"ipc://{tmp_path}/s", None)
    with pytest.raises(FileNotFoundError):
        check_listening(f"ipc://{tmp_path}/missing/s", None)


def test_a_unix_socket_in_anothers_folder_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="others may enter"):
        check_listening(f"ipc://{tmp_path}/s", None)


@contextlib.contextmanager
def refusals(socket):
    """Gives what waits until `socket` has refused a peer; ZeroMQ's thread does so without our loop."""
    monitored = socket._socket._socket
    failed = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    monitor = monitored.get_monitor_socket(failed)

    def wait():
        assert monitor.poll(5000), "nobody was refused"

    yield wait
    monitor.close()
    monitored.disable_monitor()


def test_keys_are_not_shown():
    curve = Curve.draw()
    assert repr(curve) == repr(curve.for_peers()) == "Curve()"
    assert curve.for_peers().secret_key is None


async def test_the_right_key_lets_messages_pass_both_ways(context):
    curve = Curve.draw()
    async with (
        ZmqSocket(context, SocketKind.ROUTER, curve=curve) as router,
        ZmqSocket(context, SocketKind.DEALER, identity=b"peer", curve=curve.for_peers()) as dealer,
    ):
        dealer.connect(router.bind("tcp://127.0.0.1:*"))
        with trio.fail_after(5):
            await dealer.send([b"hello", b"x" * 100_000])
            assert await router.receive() == [b"peer", b"hello", b"x" * 100_000]
            await router.send([b"peer", b"welcome"])
            assert await dealer.receive() == [b"welcome"]


@pytest.mark.parametrize("intruder", ["wrong key", "no key"])
async def test_a_peer_without_the_right_key_gets_no_message_in_and_none_out(context, intruder):
    keys = {"wrong key": Curve.draw().for_peers(), "no key": None}[intruder]
    curve = Curve.draw()
    async with (
        ZmqSocket(context, SocketKind.DEALER, curve=curve) as listening,
        ZmqSocket(context, SocketKind.DEALER, curve=keys) as intruding,
        ZmqSocket(context, SocketKind.DEALER, curve=curve.for_peers()) as invited,
    ):
        with refusals(listening) as wait_refused:
            bound = listening.bind("tcp://127.0.0.1:*")
            intruding.connect(bound)
            await intruding.send([b"let me in"])
            wait_refused()
            with trio.fail_after(5):
                invited.connect(bound)
                await invited.send([b"hello"])
                assert await listening.receive() == [b"hello"]
                await listening.send([b"for the invited"])
                assert await invited.receive() == [b"for the invited"]
        for socket in (listening, intruding):
            with pytest.raises(trio.WouldBlock):
                socket.receive_nowait()


async def test_a_listener_without_keys_does_not_get_what_was_meant_for_one_with_them(context):
    async with (
        ZmqSocket(context, SocketKind.PULL) as impostor,
        ZmqSocket(context, SocketKind.PUSH, curve=Curve.draw().for_peers()) as push,
    ):
        with refusals(impostor) as wait_refused:
            push.connect(impostor.bind("tcp://127.0.0.1:*"))
            await push.send([b"secret"])
            wait_refused()
        with pytest.raises(trio.WouldBlock):
            impostor.receive_nowait()
