from __future__ import annotations

import random
import re
import traceback

import pytest
import trio

from fuzz.transport import NUM_SENDERS, Side, Way, in_one_loop, in_two_processes, item, run
from transport import zmq_socket
from transport.zmq_socket import Curve, SocketKind

NUM_MESSAGES = 6_000


@pytest.fixture(params=["ipc router", "ipc dealer", "inproc dealer", "tcp curve"])
def way(request, tmp_path):
    return {
        "ipc router": Way(f"ipc://{tmp_path}/s", SocketKind.ROUTER),
        "ipc dealer": Way(f"ipc://{tmp_path}/s", SocketKind.DEALER),
        "inproc dealer": Way("inproc://s", SocketKind.DEALER),
        "tcp curve": Way("tcp://127.0.0.1:*", SocketKind.ROUTER, Curve.draw()),
    }[request.param]


@pytest.mark.slow
async def test_no_message_between_two_processes_is_lost_doubled_or_reordered_by_cancellation(tmp_path):
    way = Way(f"ipc://{tmp_path}/s", SocketKind.ROUTER)
    counts = await in_two_processes(random.Random(7), way, 2 * NUM_MESSAGES, 60.0)
    assert counts["messages"] == 2 * NUM_MESSAGES
    assert counts["sends cancelled"] > 100
    assert counts["receives cancelled"] > 10


@pytest.mark.slow
async def test_nor_is_one_in_one_loop(way):
    counts = await in_one_loop(random.Random(7), way, NUM_MESSAGES // 4, 60.0)
    assert counts["messages"] == 2 * (NUM_MESSAGES // 4 // NUM_SENDERS) * NUM_SENDERS
    assert counts["sends cancelled"] > 50


FOUND = re.compile("came in place of|messages came from sender|the other side exited with status 1")


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [in_one_loop, in_two_processes])
async def test_a_socket_that_loses_what_a_cancelled_receive_took_is_found(tmp_path, monkeypatch, exchange):
    monkeypatch.setattr(zmq_socket, "cancel_shielded_checkpoint", trio.lowlevel.checkpoint)
    way = Way(f"ipc://{tmp_path}/s", SocketKind.DEALER)
    with pytest.raises(ExceptionGroup) as raised:  # several tasks, and the other process, may find it at once
        await exchange(random.Random(7), way, NUM_MESSAGES, 60.0)
    found, rest = raised.value.split(AssertionError)
    assert found is not None
    assert rest is None
    assert FOUND.search("".join(traceback.format_exception(found)))


@pytest.mark.slow
def test_the_target_ends_when_its_time_is_over(capsys, monkeypatch):
    monkeypatch.setattr("fuzz.transport.MAX_MESSAGES", 800)
    assert run(0.02, 7) > 0
    assert capsys.readouterr().out.startswith("transport: ")


def test_a_sides_first_wrong_message_is_told_by_number():
    side = Side(None, None, random.Random(7), 10, 1.0)
    with pytest.raises(AssertionError, match="message 1 of sender 0 came in place of 0"):
        side._check(item(0, 1))
