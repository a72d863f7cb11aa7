"""Clients that vanish in the ways of the real world: killed, all at once, at random moments, and while all is quiet."""

from __future__ import annotations

import random
import socket
import subprocess
import sys

import pytest
import trio

from web import serve

CLIENT = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(sys.stdin.buffer.read())
print("sent", flush=True)
while connection.recv(65536):
    pass
"""
LONG = {"max_tokens": 3000, "ignore_eos": True}
PHASES = {
    "decode, whole": ({}, {"prompt": "a", **LONG}),
    "decode, streaming": ({}, {"prompt": "a", "stream": True, **LONG}),
    "decode, n > 1": ({}, {"prompt": ["a", "b"], "n": 2, "stream": True, **LONG}),
    "prefill": ({"max_num_batched_tokens": 8, "max_num_seqs": 8}, {"prompt": [5] * 3000, "max_tokens": 3}),
}


async def all_free(served):
    await served.wait_counts(lambda running, waiting, used: served.engine.num_live == running == waiting == used == 0)


def start_client(served, request: bytes) -> subprocess.Popen:
    argv = [sys.executable, "-I", "-S", "-c", CLIENT, str(served.port)]
    client = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    client.stdin.write(request)
    client.stdin.close()
    client.stdout.readline()
    return client


def kill(client: subprocess.Popen) -> None:
    client.kill()
    client.wait()
    client.stdout.close()


@pytest.mark.parametrize(("settings", "body"), PHASES.values(), ids=PHASES)
async def test_killed_client_process_has_its_requests_aborted(open_served, settings, body):
    async with open_served(null_step_ms=10, **settings) as served:
        client = await trio.to_thread.run_sync(start_client, served, served.http("POST", "/v1/completions", body))
        await served.wait_counts(lambda running, waiting, used: running > 0)
        kill(client)
        await all_free(served)


async def test_killed_client_process_in_the_queue_disturbs_nothing_that_runs(open_served):
    async with open_served(null_step_ms=10, max_num_seqs=1) as served, await served.open_stream(max_tokens=3000):
        await served.wait_counts(lambda running, waiting, used: running == 1)
        request = served.http("POST", "/v1/completions", {"prompt": "a", **LONG})
        client = await trio.to_thread.run_sync(start_client, served, request)
        await served.wait_counts(lambda running, waiting, used: waiting == 1)
        kill(client)
        await served.wait_counts(lambda running, waiting, used: (running, waiting) == (1, 0))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_client_that_leaves_while_nothing_is_said_before_the_head_is_noticed(served, stream):
    await served.engine.pause()
    connection = await served.open_stream() if stream else await served.connect()
    if not stream:
        await connection.send_all(served.http("POST", "/v1/chat/completions", served.chat()))
    await served.wait_counts(lambda running, waiting, used: waiting == 1)
    connection.socket.close()
    await all_free(served)
    await served.engine.resume()
    assert (await served.post(served.chat())).status == 200


async def test_64_streams_cut_at_once_leave_nothing_within_a_second_and_nobody_has_to_ask(open_served):
    async with open_served(null_step_ms=10) as served:
        streams = [await served.open_stream(max_tokens=3000) for _ in range(64)]
        await served.wait_counts(lambda running, waiting, used: running == 64)
        for stream in streams:
            stream.socket.close()
        with trio.fail_after(1):
            await all_free(served)
        assert (await served.post(served.chat())).status == 200


@pytest.mark.slow
async def test_after_many_random_cuts_the_server_is_as_fresh(open_served):
    """`python -m fuzz http` makes thousands of them."""
    draw = random.Random(5)

    async def cut(served):
        for _ in range(25):
            body = served.chat(stream=draw.random() < 0.7, n=draw.randint(1, 3), max_tokens=draw.randint(1, 400))
            request = served.http("POST", "/v1/chat/completions", body)
            async with await served.connect() as connection:
                await connection.send_all(request[: draw.choice([len(request), draw.randint(1, len(request))])])
                with trio.move_on_after(draw.random() * 0.02):
                    while await connection.receive_some():
                        pass

    async with open_served(null_step_ms=2, max_num_seqs=8) as served:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(cut, served)
        await all_free(served)
        assert served.state.num_open_requests == 0
        assert (await served.post(served.chat())).json()["usage"]["completion_tokens"] == 5


async def test_vanished_machine_is_noticed_by_tcps_own_probes():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, await trio.open_tcp_stream(*listener.socket.getsockname()), await listener.accept() as stream:
        serve._probe_when_quiet(stream)
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle_s, interval_s, count = (
            stream.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in serve.KEEP_ALIVE_PROBES
        )
        assert idle_s + interval_s * count == 30
