"""The order of a stop, and where the server listens."""

from __future__ import annotations

import logging
import threading

import pytest
import trio
import trio.testing

from engine.client.input_processor import InputProcessor
from engine.config import ServeConfig
from engine.errors import ConfigError
from engine.protocol import PauseMode
from web import sse
from web.listeners import open_listeners


async def read_to_end(stream):
    received = b""
    while data := await stream.receive_some():
        received += data
    return received


async def test_stop_ends_every_stream_with_a_terminal_event(open_served):
    async with open_served(null_step_ms=5) as served, trio.open_nursery() as nursery:
        whole = await served.connect()
        await whole.send_all(served.http("POST", "/v1/chat/completions", served.chat(max_tokens=3000)))
        await served.wait_counts(lambda running, waiting, used: running == 1)
        streams = [await served.open_stream(max_tokens=3000, n=2) for _ in range(8)]
        begun = {stream: await stream.receive_some() for stream in streams}
        received = []

        async def read(stream):
            async with stream:
                received.append(begun.get(stream, b"") + await read_to_end(stream))

        for stream in [*streams, whole]:
            nursery.start_soon(read, stream)
        served.stop.set()
        with trio.fail_after(2):
            await served.ended.wait()
    assert len(received) == 9
    for answer in received:
        assert answer.count(b'"finish_reason":"abort"') == (2 if b"event-stream" in answer else 1)
    assert sum(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in received) == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_tells_a_queued_request_503_for_it_never_ran(open_served, stream):
    async with open_served(null_step_ms=5, max_num_seqs=1) as served, await served.open_stream(max_tokens=3000) as runs:
        assert await runs.receive_some()
        async with await served.connect() as queued:
            body = served.chat(stream=stream, max_tokens=3000)
            await queued.send_all(served.http("POST", "/v1/chat/completions", body))
            await served.wait_counts(lambda running, waiting, used: waiting == 1)
            served.stop.set()
            received = await read_to_end(queued)
        assert received.startswith(b"HTTP/1.1 503")
        assert b'"finish_reason":"abort"' in await read_to_end(runs)


async def test_drain_lets_streams_finish_and_refuses_new_work_while_probes_are_answered(open_served):
    async with open_served(drain_s=5, null_step_ms=5) as served, await served.open_stream(max_tokens=60) as stream:
        await served.wait_counts(lambda running, waiting, used: running == 1)
        served.stop.set()
        await trio.testing.wait_all_tasks_blocked()
        for answer in (await served.request("GET", "/health"), await served.post(served.chat())):
            assert answer.status == 503
            assert answer.headers["retry-after"]
        assert answer.error["type"] == "server_error"
        assert (await served.request("GET", "/metrics")).status == 200
        received = await read_to_end(stream)
        assert b'"finish_reason":"length"' in received
        await served.ended.wait()
        with pytest.raises(OSError, match="all attempts to connect"):
            await served.connect()


async def test_request_whose_prompt_is_still_read_when_the_stop_comes_is_told_so(open_served, monkeypatch):
    entered, release, tokenize = trio.Event(), threading.Event(), InputProcessor.tokenize

    def slow_tokenize(self, prompt, *options):
        trio.from_thread.run_sync(entered.set)
        release.wait(5)
        return tokenize(self, prompt, *options)

    monkeypatch.setattr(InputProcessor, "tokenize", slow_tokenize)
    async with open_served() as served, await served.connect() as stream:
        await stream.send_all(served.http("POST", "/v1/chat/completions", served.chat(), Connection="close"))
        await entered.wait()
        served.stop.set()
        await trio.testing.wait_all_tasks_blocked()
        release.set()
        received = await read_to_end(stream)
        assert received.startswith(b"HTTP/1.1 503")
        assert b"the server is stopping" in received


@pytest.mark.parametrize("drain_s", [0, 5])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/abort_requests", "/pause"])
async def test_request_whose_body_still_arrives_when_the_stop_comes_is_told_so(open_served, path, drain_s):
    config = ServeConfig(port=0, enable_operations=True)
    async with open_served(drain_s=drain_s, serve_config=config) as served, await served.connect() as stream:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
        await stream.send_all(head.encode())
        await trio.testing.wait_all_tasks_blocked(0.02)
        served.stop.set()
        received = await read_to_end(stream)
        assert received.startswith(b"HTTP/1.1 503")
        assert b"the server is stopping" in received


async def test_drain_that_takes_too_long_ends_in_aborts(open_served):
    async with open_served(drain_s=0.05, null_step_ms=5) as served, await served.open_stream(max_tokens=3000) as stream:
        await served.wait_counts(lambda running, waiting, used: running == 1)
        served.stop.set()
        assert b'"finish_reason":"abort"' in await read_to_end(stream)


async def test_cancelling_the_server_ends_it_at_once(open_served):
    with trio.fail_after(2), trio.CancelScope() as scope:
        async with open_served(null_step_ms=5) as served, await served.open_stream(max_tokens=3000):
            await served.wait_counts(lambda running, waiting, used: running == 1)
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_quiet_stream_gets_comments(open_served, monkeypatch):
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.03)
    async with open_served(null_step_ms=100) as served:
        answer = await served.post(served.chat(stream=True, max_tokens=3))
    assert answer.body.count(b": ping\n\n") >= 3
    assert answer.events[-1] == "[DONE]"
    assert sum(bool(event["choices"][0]["delta"].get("content")) for event in answer.events[:-1]) <= 3


async def test_port_in_use_is_the_operators_error_with_port_and_remedy():
    async with open_listeners(ServeConfig(port=0)) as listeners:
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*--port"):
            async with open_listeners(ServeConfig(port=port)):
                pass


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_drain_of_a_paused_engine_runs_what_waits(open_served, mode, caplog):
    caplog.set_level(logging.DEBUG, "teardown")
    async with open_served(drain_s=5, null_step_ms=1) as served:
        await served.engine.pause(mode)
        async with await served.open_stream(max_tokens=20) as stream:
            await served.wait_counts(lambda running, waiting, used: waiting == 1)
            served.stop.set()
            assert b'"finish_reason":"length"' in await read_to_end(stream)
            await served.ended.wait()
    assert [record.message for record in caplog.records if record.name == "teardown"] == [
        "probes and new work get 503",
        "streams ended, 0 cut",
        "listeners closed",
        "connections closed",
        "engine asked to stop",
        "intake closed",
        "step task ended",
        "last word acknowledged",
        "grammar back end closed",
        "executor closed",
    ]


async def test_stop_of_a_paused_engine_ends_what_waits(open_served):
    async with open_served() as served:
        await served.engine.pause(PauseMode.KEEP)
        async with await served.open_stream(max_tokens=20) as stream:
            await served.wait_counts(lambda running, waiting, used: waiting == 1)
            served.stop.set()
            assert b"HTTP/1.1 503" in await read_to_end(stream)
