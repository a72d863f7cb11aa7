"""No client, however malformed or stuck, ends the server, disturbs a stream beside it, or delays a stop."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import random
import socket

import pytest
import trio
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer

from fuzz.http import KILLERS, PIECES
from web import guard, serve


async def talk(served, pieces, *, ends_rudely=False):
    with contextlib.suppress(trio.BrokenResourceError):
        async with await served.connect() as stream:
            for piece in pieces:
                await stream.send_all(piece)
            if not ends_rudely:
                with trio.move_on_after(0.01):
                    while await stream.receive_some():
                        pass


@contextlib.asynccontextmanager
async def a_stream_beside(served, num_tokens=100):
    """Run a stream during the block and check afterwards that nothing happened to it."""
    answers = []

    async def run():
        answers.append(await served.post(served.chat(stream=True, max_tokens=num_tokens)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await served.wait_counts(lambda running, waiting, used: running >= 1)
        yield
    (answer,) = answers
    assert answer.status == 200
    assert answer.events[-1] == "[DONE]"
    assert answer.events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("killer", KILLERS.values(), ids=KILLERS)
async def test_what_kills_hypercorns_own_connection_hurts_nobody(open_served, killer):
    async with open_served(null_step_ms=2) as served, a_stream_beside(served):
        for _ in range(20):
            await talk(served, killer, ends_rudely=True)
        await talk(served, killer)
        assert (await served.request("GET", "/health")).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_burst_of_malformed_bytes_hurts_nobody(open_served, seed):
    draw = random.Random(seed)

    async def rude_client(served):
        for _ in range(25):
            pieces = draw.choices(PIECES, k=draw.randint(1, 4))
            cut = [piece[: draw.randint(1, len(piece))] if draw.random() < 0.3 else piece for piece in pieces]
            noise = [draw.randbytes(draw.randint(1, 200))] if draw.random() < 0.2 else []
            await talk(served, [*cut, *noise], ends_rudely=draw.random() < 0.5)

    async with open_served(null_step_ms=2) as served, a_stream_beside(served, num_tokens=300):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(rude_client, served)
        assert (await served.request("GET", "/health")).status == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [(b"nonsense\r\n\r\n", 400), (b"GET / HTTP/1.1\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nX: " + b"a" * 10**5, 431)],
)
async def test_malformed_request_gets_an_error_body(served, request_bytes, status):
    async with await served.connect() as stream:
        await stream.send_all(request_bytes)
        received = b""
        while data := await stream.receive_some():
            received += data
    assert received.startswith(b"HTTP/1.1 %d" % status)
    assert b'{"error":{"message":"not a valid HTTP/1.1 request' in received


async def test_pipelined_requests_are_answered_in_order_on_one_connection(served):
    async with await served.connect() as stream:
        first = served.http("POST", "/v1/chat/completions", served.chat())
        await stream.send_all(
            first + served.http("GET", "/version") + served.http("GET", "/health", Connection="close")
        )
        received = b""
        while data := await stream.receive_some():
            received += data
    assert received.count(b"HTTP/1.1 200") == 3
    assert received.index(b"chat.completion") < received.index(b'"version"')


async def test_request_pipelined_behind_another_is_not_begun_once_its_client_has_left(served):
    two = served.http("GET", "/health") + served.http(
        "POST", "/v1/chat/completions", served.chat(stream=True, max_tokens=8000)
    )

    async def leave_at_once():
        async with await served.connect() as stream:
            await stream.send_all(two)

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(leave_at_once)
    await served.wait_counts(lambda running, waiting, used: running == waiting == used == 0)
    await served.request("GET", "/health")
    assert served.state.num_open_requests == 0


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["alone", "pipelined"])
async def test_body_in_many_pieces_that_nobody_reads_does_not_hold_the_connection(open_served, monkeypatch, before):
    monkeypatch.setattr(serve, "GRACE_S", float("inf"))  # a connection that is held holds the stop
    async with open_served() as served, await served.connect() as stream:
        head = served.http(
            "POST", "/v1/completions", Content_Length="", Transfer_Encoding="chunked", Content_Type="no/json"
        )
        await stream.send_all(before + head + b"1\r\nx\r\n" * 5000)
        received = b""
        while data := await stream.receive_some():
            received += data
        assert b"HTTP/1.1 415" in received


async def test_more_pipelined_than_is_kept_closes_the_connection_after_the_response_under_way(open_served):
    async with open_served(null_step_ms=5) as served, await served.connect() as stream:
        first = served.http("POST", "/v1/chat/completions", served.chat(max_tokens=20))
        await stream.send_all(first + served.http("GET", "/health") * (4 * guard.MAX_PIPELINED_BYTES // 50))
        received = b""
        while data := await stream.receive_some():
            received += data
    assert received.count(b"HTTP/1.1 200") == 1
    assert b'"finish_reason":"length"' in received


async def test_http_1_0_client_is_answered_and_its_connection_closed(served):
    async with await served.connect() as stream:
        await stream.send_all(b"GET /version HTTP/1.0\r\n\r\n")
        received = b""
        while data := await stream.receive_some():
            received += data
    assert received.startswith(b"HTTP/1.1 200")
    assert b"chunked" not in received


async def test_client_that_expects_to_be_asked_for_its_body_is_asked(served):
    request = served.http("POST", "/v1/chat/completions", served.chat(), Expect="100-continue", Connection="close")
    head, _, body = request.partition(b"\r\n\r\n")
    async with await served.connect() as stream:
        await stream.send_all(head + b"\r\n\r\n")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 100")
        await stream.send_all(body)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


async def test_connection_is_kept_for_the_next_request_and_closed_when_idle(open_served, monkeypatch):
    monkeypatch.setattr(serve, "GRACE_S", float("inf"))
    async with open_served() as served, await served.connect() as stream:
        for _ in range(3):
            await stream.send_all(served.http("GET", "/health"))
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        served.stop.set()
        assert await stream.receive_some() == b""


async def test_head_that_never_ends_is_given_up(open_served, monkeypatch):
    monkeypatch.setattr(guard, "HEAD_TIMEOUT_S", 0.05)
    async with open_served() as served, await served.connect() as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\n")
        assert await stream.receive_some() == b""


async def test_client_that_half_closes_is_told_nothing_more(open_served):
    async with open_served(null_step_ms=5) as served, await served.connect() as stream:
        await stream.send_all(served.http("POST", "/v1/chat/completions", served.chat(max_tokens=3000)))
        await served.wait_counts(lambda running, waiting, used: running == 1)
        await stream.send_eof()
        assert await stream.receive_some() == b""


async def test_client_that_leaves_an_idle_connection_leaves_nothing_behind(served):
    async with await served.connect() as stream:
        await stream.send_all(served.http("GET", "/health"))
        await stream.receive_some()
        await stream.send_eof()
        assert await stream.receive_some() == b""


@contextlib.asynccontextmanager
async def a_stuck_stream(served):
    """A client whose stream fills all buffers, small ones, because it reads nothing."""
    served.listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    stream = trio.SocketStream(trio.socket.socket())
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await stream.socket.connect((served.host, served.port))
    body = served.chat(stream=True, max_tokens=3000)
    async with stream:
        await stream.send_all(served.http("POST", "/v1/chat/completions", body))
        await served.wait_counts(lambda running, waiting, used: running == 1)
        yield


@pytest.mark.slow
async def test_reader_that_is_stuck_delays_neither_others_nor_a_stop(open_served, monkeypatch):
    monkeypatch.setattr(serve, "ABORT_GRACE_S", float("inf"))
    monkeypatch.setattr(serve, "GRACE_S", float("inf"))
    async with open_served() as served, a_stuck_stream(served):
        answer = await served.post(served.chat(stream=True))
        assert answer.events[-1] == "[DONE]"
        await served.wait_counts(lambda running, waiting, used: running == 0)
        assert served.state.num_open_requests == 1
        served.stop.set()
        await served.ended.wait()


async def test_reader_that_is_stuck_for_too_long_is_dropped(open_served, monkeypatch):
    monkeypatch.setattr(guard, "SEND_STALL_S", 0.1)
    async with open_served() as served, a_stuck_stream(served):
        await served.state.wait_idle()
        await served.wait_counts(lambda running, waiting, used: running == waiting == used == 0)


async def test_failure_nobody_foresaw_ends_its_connection_alone(served, monkeypatch, caplog):
    monkeypatch.setattr(guard._Http11Protocol, "_refuse", lambda self, error: 1 / 0)
    async with await served.connect() as stream:
        await stream.send_all(b"nonsense\r\n\r\n")
        assert await stream.receive_some() == b""
    assert (await served.request("GET", "/health")).status == 200
    assert "connection dropped: ZeroDivisionError" in caplog.text


def test_what_the_guard_leans_on_in_hypercorn_is_still_there():
    assert importlib.metadata.version("hypercorn") == "0.18.0"
    for name in ("stream_send", "_send_h11_event", "_maybe_recycle", "_close_stream", "handle", "_handle_events"):
        assert hasattr(H11Protocol, name)
    assert hasattr(HTTPStream, "app_send")
    assert {"spawn", "spawn_app"} <= set(dir(TaskGroup))
    assert "except OSError" in inspect.getsource(TCPServer.run)
