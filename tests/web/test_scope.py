"""A client that leaves, in whatever way and phase, has its request aborted within a step."""

from __future__ import annotations

import logging
import socket
import struct

import pytest
import trio

STEP_MS = 10.0


def fin(stream: trio.SocketStream) -> None:
    stream.socket.close()


def rst(stream: trio.SocketStream) -> None:
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


def half_close(stream: trio.SocketStream) -> None:
    stream.socket.shutdown(socket.SHUT_WR)


AHEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
PIPELINED = {"alone": b"", "pipelined": AHEAD, "flooded": AHEAD * 10_000}
LEAVE = {leave.__name__: leave for leave in (fin, rst, half_close)}

pytestmark = [
    pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE),
    pytest.mark.parametrize("extra", PIPELINED.values(), ids=PIPELINED),
]


async def all_free(served):
    await served.wait_counts(lambda running, waiting, used: running == waiting == used == 0)


@pytest.fixture
def reasons(caplog):
    """Why each request ended, in order: a request that ran to its length would be free in the end too."""
    caplog.set_level(logging.DEBUG, logger="engine.client.async_llm")

    def reasons() -> list[str]:
        return [str(record.args[1]) for record in caplog.records if "ended" in record.msg]

    return reasons


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_in_decode_aborts(open_served, reasons, leave, extra, stream, n):
    async with open_served(null_step_ms=STEP_MS) as served:
        connection = await served.connect()
        body = served.chat(stream=stream, n=n, max_tokens=3000)
        await connection.send_all(served.http("POST", "/v1/chat/completions", body) + extra)
        await served.wait_counts(lambda running, waiting, used: running == n and used > 0)
        if stream:
            assert (await connection.receive_some()).startswith(b"HTTP/1.1 200")
        leave(connection)
        await all_free(served)
        assert reasons() == ["abort"] * n
        await connection.aclose()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_leaving_in_the_queue_aborts_without_disturbing_what_runs(open_served, reasons, leave, extra, stream):
    async with open_served(null_step_ms=STEP_MS, max_num_seqs=1) as served, await served.connect() as running:
        await running.send_all(served.http("POST", "/v1/chat/completions", served.chat(max_tokens=3000)))
        await served.wait_counts(lambda running, waiting, used: running == 1)
        queued = await served.connect()
        body = served.chat(stream=stream, max_tokens=3000)
        await queued.send_all(served.http("POST", "/v1/chat/completions", body) + extra)
        await served.wait_counts(lambda running, waiting, used: waiting == 1)
        leave(queued)
        await served.wait_counts(lambda running, waiting, used: waiting == 0)
        assert served.counts()[0] == 1
        assert reasons() == ["abort"]
        await queued.aclose()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_leaving_in_prefill_aborts(open_served, reasons, leave, extra, stream):
    async with open_served(null_step_ms=STEP_MS, max_num_seqs=8, max_num_batched_tokens=8) as served:
        connection = await served.connect()
        body = {"prompt": [5] * 3000, "max_tokens": 3, "stream": stream}
        await connection.send_all(served.http("POST", "/v1/completions", body) + extra)
        await served.wait_counts(lambda running, waiting, used: running == 1)
        leave(connection)
        await all_free(served)
        assert reasons() == ["abort"]
        await connection.aclose()


async def test_leaving_while_several_prompts_run_aborts_them_all(open_served, reasons, leave, extra):
    async with open_served(null_step_ms=STEP_MS) as served:
        connection = await served.connect()
        body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 3000, "stream": True, "ignore_eos": True}
        await connection.send_all(served.http("POST", "/v1/completions", body) + extra)
        await served.wait_counts(lambda running, waiting, used: running == 6)
        leave(connection)
        await all_free(served)
        assert reasons() == ["abort"] * 6
        await connection.aclose()
