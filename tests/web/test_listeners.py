"""Where the server listens: TCP and unix sockets, and what stands in the way."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

import pytest
import trio

from engine.config import ServeConfig
from engine.errors import ConfigError
from web.listeners import MAX_ACCEPTED_AT_ONCE, Arrivals, EagerListener, address_of, open_listeners


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metronome.sock"


async def test_requests_over_a_unix_socket_are_answered_and_a_vanished_client_is_noticed(open_served, path):
    async with open_served(serve_config=ServeConfig(uds=str(path)), null_step_ms=5) as served:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert address_of(served.listener) == f"unix:{path}"
        answer = await served.post(served.chat(stream=True))
        assert answer.events[-1] == "[DONE]"
        stream = await served.open_stream(max_tokens=3000)
        await served.wait_counts(lambda running, waiting, used: running == 1)
        await stream.aclose()
        await served.wait_counts(lambda running, waiting, used: running == waiting == used == 0)
    assert not path.exists()


async def test_stale_socket_is_replaced(path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with open_listeners(ServeConfig(uds=str(path))), await trio.open_unix_socket(path):
        pass
    assert not path.exists()


async def test_socket_of_a_living_server_is_left_alone(path):
    async with open_listeners(ServeConfig(uds=str(path))):
        with pytest.raises(ConfigError, match=r"metronome\.sock.*another server listens"):
            async with open_listeners(ServeConfig(uds=str(path))):
                pass
        async with await trio.open_unix_socket(path):
            pass


def stands(path):
    return os.path.lexists(path)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
async def test_what_is_no_socket_is_left_alone(path, kind):
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("elsewhere")
    else:
        path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        async with open_listeners(ServeConfig(uds=str(path))):
            pass
    assert stands(path)


async def test_path_that_cannot_be_a_socket_is_the_operators_error(tmp_path):
    for wrong, text in ((tmp_path / "nowhere" / "x", "No such file"), (tmp_path / ("x" * 120), "too long")):
        with pytest.raises(ConfigError, match=text):
            async with open_listeners(ServeConfig(uds=str(wrong))):
                pass


async def test_at_the_end_the_socket_of_another_server_is_not_removed(path):
    async with open_listeners(ServeConfig(uds=str(path))):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"uds": ""}, "--uds must not be empty"),
        ({"api_key": ""}, "--api-key must not be empty"),
        ({"api_key": "a\nb"}, "printable ASCII"),
        ({"served_model_name": ""}, "--served-model-name"),
        ({"root_path": "llm"}, "'llm'"),
        ({"root_path": "/llm/"}, "'/llm/'"),
        ({"port": 65536}, "65535"),
    ],
)
def test_wrong_settings_name_flag_and_value(fields, text):
    with pytest.raises(ConfigError, match=text):
        ServeConfig(**fields)


@pytest.mark.parametrize("host", ["nosuchhost.invalid", "x" * 64 + ".invalid", "192.0.2.1"])
async def test_a_host_that_is_no_address_of_this_machine_is_what_the_message_speaks_of(host):
    with pytest.raises(ConfigError, match=r"cannot listen on .*; choose a --host that is an address of this machine"):
        async with open_listeners(ServeConfig(host=host, port=0)):
            pass


@pytest.mark.parametrize("is_unix", [False, True])
async def test_connections_that_wait_are_accepted_many_at_a_time(path, is_unix, monkeypatch):
    num_clients = 3 * MAX_ACCEPTED_AT_ONCE + 1
    config = ServeConfig(uds=str(path)) if is_unix else ServeConfig(host="127.0.0.1", port=0)
    arrivals = Arrivals()
    async with open_listeners(config) as (own,), EagerListener(own, arrivals) as listener:
        accept_one, num_waits = own.accept, 0

        async def accept():
            nonlocal num_waits
            num_waits += 1
            return await accept_one()

        monkeypatch.setattr(own, "accept", accept)
        with contextlib.ExitStack() as clients:
            for _ in range(num_clients):
                clients.enter_context(socket.socket(own.socket.family)).connect(own.socket.getsockname())
            for _ in range(num_clients):
                await (await listener.accept()).aclose()
                arrivals.num_waiting -= 1
        assert num_waits < num_clients / 4


async def test_while_as_many_are_not_begun_with_as_may_be_only_one_is_accepted_at_a_time(path):
    """So it is on all listeners together."""
    arrivals, num_clients = Arrivals(), 2 * MAX_ACCEPTED_AT_ONCE
    config = ServeConfig(uds=str(path))
    async with (
        open_listeners(config) as (own,),
        EagerListener(own, arrivals) as first,
        EagerListener(own, arrivals) as second,
    ):
        with contextlib.ExitStack() as clients:
            for _ in range(num_clients):
                clients.enter_context(socket.socket(own.socket.family)).connect(own.socket.getsockname())
            streams = [await first.accept()]
            assert arrivals.num_waiting == MAX_ACCEPTED_AT_ONCE
            streams.append(await second.accept())
            assert arrivals.num_waiting == MAX_ACCEPTED_AT_ONCE + 1
            while len(streams) < num_clients:
                streams.append(await first.accept())
        for stream in streams:
            await stream.aclose()
