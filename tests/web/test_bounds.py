"""Every bound has a value, every default that hurts a server of long streams is set, and waiting has an end."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest
import trio
from hypercorn.config import Config

from web import app, guard, listeners, serve, sse
from web.app import create_app

SOMAXCONN = int(Path("/proc/sys/net/core/somaxconn").read_text())


async def test_defaults_that_hurt_long_streams_are_set(served):
    config = create_app(served.state).config
    assert config["RESPONSE_TIMEOUT"] is None  # else every stream is cut at 60 s
    assert config["BODY_TIMEOUT"] == app.BODY_TIMEOUT_S == 60
    assert config["MAX_CONTENT_LENGTH"] == config["MAX_FORM_MEMORY_SIZE"] == app.MAX_BODY_BYTES == 2 * 2**20


def test_hypercorns_defaults_that_hurt_are_set():
    config = serve._hypercorn_config()
    assert config.alpn_protocols == ["http/1.1"]
    assert config.keep_alive_timeout == 75
    assert config.keep_alive_max_requests >= 2**31
    assert config.h11_max_incomplete_size == 2**16
    assert not config.include_server_header
    assert config.logger_class(config).access_logger is None
    # hypercorn's own server, whose time-outs these are, is not used.
    assert {"graceful_timeout", "shutdown_timeout", "startup_timeout", "read_timeout", "backlog"} <= set(dir(Config))


async def test_listener_has_room_for_a_storm_and_sends_without_delay(served):
    info = served.listener.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    (backlog,) = struct.unpack_from("I", info, 28)  # tcpi_sacked, which is a listener's backlog
    assert backlog == min(listeners.BACKLOG, SOMAXCONN)
    (connection,) = [c for c in [await served.connect()] if c]
    async with connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_stream_is_never_cut_by_a_timer(open_served, monkeypatch):
    """All timers of a connection run out many times during it."""
    for module, name in ((serve, "KEEP_ALIVE_S"), (guard, "HEAD_TIMEOUT_S"), (sse, "KEEP_ALIVE_S")):
        monkeypatch.setattr(module, name, 0.05)
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.05)
    async with open_served(null_step_ms=100) as served:
        answers = []

        async def ask(stream):
            answers.append(await served.post(served.chat(stream=stream, max_tokens=4), Connection="keep-alive"))

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for stream in (False, True):
                    nursery.start_soon(ask, stream)
    for answer in answers:
        assert answer.status == 200
        assert b'"finish_reason":"length"' in answer.body


async def test_sse_is_not_buffered_on_its_way(served):
    answer = await served.post(served.chat(stream=True))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "server" not in answer.headers


async def test_slow_body_is_408(open_served, monkeypatch):
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.05)
    async with open_served() as served, await served.connect() as stream:
        await stream.send_all(served.http("POST", "/v1/completions", Content_Length="10"))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 408")


async def test_a_burst_of_refused_connections_is_told_at_once_and_then_counted(open_served, monkeypatch, caplog):
    def told():
        return [record.getMessage() for record in caplog.records if "connections refused" in record.getMessage()]

    monkeypatch.setattr(serve, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(serve, "REFUSALS_TOLD_EVERY_S", 1e9)
    async with open_served() as served, await served.connect():
        for _ in range(20):
            async with await served.connect() as refused:
                assert await refused.receive_some() == b""
            assert told() == ["connections refused: 1; 1 are open, the most allowed"]
    assert told()[1:] == ["connections refused: 19; 1 are open, the most allowed"]


async def test_connections_beyond_the_limit_are_closed_and_those_within_go_on(open_served, monkeypatch):
    monkeypatch.setattr(serve, "MAX_CONNECTIONS", 2)
    async with open_served() as served, await served.connect() as first, await served.connect() as second:
        for stream in (first, second):
            await stream.send_all(served.http("GET", "/health"))
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        async with await served.connect() as third:
            assert await third.receive_some() == b""
        await first.send_all(served.http("GET", "/health", Connection="close"))
        assert (await first.receive_some()).startswith(b"HTTP/1.1 200")
        assert await first.receive_some() == b""
        assert (await served.request("GET", "/health")).status == 200


def test_no_more_connections_than_descriptors(monkeypatch):
    for soft, allowed in ((1024, 1024 - serve.RESERVED_DESCRIPTORS), (2**20, 4096), (-1, 4096), (64, 1)):
        monkeypatch.setattr(serve.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert serve._max_connections() == allowed


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_request_that_waits_too_long_is_503_with_retry_after_and_cause(open_served, stream):
    async with (
        open_served(null_step_ms=10, max_num_seqs=1, queue_timeout=0.1) as served,
        await served.open_stream(max_tokens=3000) as running,
    ):
        await served.wait_counts(lambda running, waiting, used: running == 1)
        answer = await served.post(served.chat(stream=stream))
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "QueueTimeout" in answer.error["message"]
        assert "--queue-timeout 0.1 seconds" in answer.error["message"]
        assert answer.error["type"] == "server_error"
        assert (await running.receive_some()).startswith(b"HTTP/1.1 200")
        await served.wait_counts(lambda running, waiting, used: (running, waiting) == (1, 0))


async def test_choice_that_waits_too_long_ends_its_whole_answer(open_served):
    async with open_served(null_step_ms=10, max_num_seqs=1, queue_timeout=0.1) as served:
        answer = await served.post(served.chat(stream=True, n=2, max_tokens=3000))
        assert answer.status == 200  # the first choice had begun
        *_, error, done = answer.events
        assert "QueueTimeout" in error["error"]["message"]
        assert done == "[DONE]"
        await served.wait_counts(lambda running, waiting, used: running == waiting == used == 0)
