"""The operating routes: who may use them, what they do, what they refuse."""

from __future__ import annotations

import pytest
import trio

from engine.config import ServeConfig
from web.verbs import ROUTES

OPEN = ServeConfig(port=0, enable_operations=True)
KEY = "sk-a-secret"


@pytest.fixture
async def operated(open_served):
    async with open_served(serve_config=OPEN, null_step_ms=1) as served:
        yield served


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_a_key_a_unix_socket_or_the_setting_they_answer_403_and_do_nothing(served, method, path):
    answer = await served.request(method, path, {"request_ids": []})
    assert answer.status == 403
    assert answer.error["type"] == "permission_error"
    assert "--enable-operations" in answer.error["message"]
    assert await served.engine.is_paused() is False


async def test_with_a_key_they_want_it(open_served):
    async with open_served(serve_config=ServeConfig(port=0, api_key=KEY)) as served:
        assert (await served.request("POST", "/pause")).status == 401
        assert (await served.request("POST", "/pause", Authorization=f"Bearer {KEY}")).status == 200


async def test_on_a_unix_socket_they_are_its_owners(open_served, tmp_path):
    async with open_served(serve_config=ServeConfig(uds=str(tmp_path / "socket"))) as served:
        assert (await served.request("GET", "/is_paused")).json() == {"is_paused": False}


OTHER_SITES = [
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:1", "Host": "localhost:2"},
]


@pytest.mark.parametrize("headers", OTHER_SITES, ids=str)
async def test_pages_of_other_sites_cannot_operate(operated, headers):
    answer = await operated.request("POST", "/pause", **headers)
    assert answer.status == 403
    assert await operated.engine.is_paused() is False
    own = {"Sec_Fetch_Site": "same-origin", "Origin": "http://here:1", "Host": "here:1"}
    assert (await operated.request("POST", "/pause", **own)).status == 200


async def test_pause_and_resume(operated):
    assert (await operated.request("POST", "/pause?mode=keep&clear_cache=false")).json() == {"status": "paused"}
    assert (await operated.request("GET", "/is_paused")).json() == {"is_paused": True}
    assert (await operated.request("GET", "/health")).status == 200
    async with await operated.open_stream(max_tokens=5) as stream:
        await operated.wait_counts(lambda running, waiting, used: waiting == 1)
        assert (await operated.request("POST", "/resume")).json() == {"status": "resumed"}
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += await stream.receive_some()
    assert received.count(b'"finish_reason":"length"') == 1


async def test_a_pause_by_abort_gives_every_open_stream_its_terminal_event(operated):
    async with await operated.open_stream(max_tokens=5000) as stream:
        received = await stream.receive_some()
        assert (await operated.request("POST", "/pause")).status == 200
        while not received.endswith(b"0\r\n\r\n"):
            received += await stream.receive_some()
    assert b'"finish_reason":"abort"' in received


async def test_sleep_and_wake_up(operated):
    assert (await operated.request("POST", "/sleep?level=2")).json() == {"status": "sleeping"}
    assert (await operated.request("GET", "/is_sleeping")).json() == {"is_sleeping": True}
    answer = await operated.request("POST", "/resume")
    assert answer.status == 400
    assert answer.error["message"].startswith("Call to Resume failed: ValueError: kv_cache and weights sleep")
    assert (await operated.request("POST", "/wake_up?tags=weights")).json() == {"status": "sleeping"}
    assert (await operated.request("POST", "/wake_up?tags=kv_cache&tags=weights")).json() == {"status": "awake"}
    assert (await operated.post(operated.chat())).status == 200


async def test_a_prefix_cache_in_use_is_reset_only_if_asked(operated):
    assert (await operated.request("POST", "/reset_prefix_cache")).json() == {"reset": True}
    async with await operated.open_stream(max_tokens=5000) as stream:
        await stream.receive_some()
        assert (await operated.request("POST", "/reset_prefix_cache")).json() == {"reset": False}
        path = "/reset_prefix_cache?reset_running_requests=true"
        assert (await operated.request("POST", path)).json() == {"reset": True}


async def test_requests_are_aborted_by_the_id_of_their_answer_or_their_label(operated):
    async with await operated.connect() as labelled, await operated.open_stream(max_tokens=5000) as named:
        body = operated.chat(stream=True, max_tokens=5000)
        await labelled.send_all(operated.http("POST", "/v1/chat/completions", body, X_Request_Id="mine"))
        begun = [await stream.receive_some() for stream in (labelled, named)]
        while b'"id":"' not in begun[1]:
            begun[1] += await named.receive_some()
        answer_id = begun[1].partition(b'"id":"')[2].partition(b'"')[0].decode()
        aborted = await operated.post({"request_ids": ["mine", answer_id, "nobody"]}, "/abort_requests")
        assert aborted.json() == {"num_aborted": 2}
        for stream, received in zip((labelled, named), begun, strict=True):
            while not received.endswith(b"0\r\n\r\n"):
                received += await stream.receive_some()
            assert b'"finish_reason":"abort"' in received
    assert (await operated.post({"request_ids": ["mine"]}, "/abort_requests")).json() == {"num_aborted": 0}


async def test_an_abort_reaches_a_request_that_waits(open_served):
    async with open_served(serve_config=OPEN, null_step_ms=1) as served, trio.open_nursery() as nursery:
        await served.engine.pause("wait")
        answers = []

        async def ask():
            answers.append(await served.post(served.chat(), X_Request_Id="queued"))

        nursery.start_soon(ask)
        await served.wait_counts(lambda running, waiting, used: waiting == 1)
        assert (await served.post({"request_ids": ["queued"]}, "/abort_requests")).json() == {"num_aborted": 1}
        await served.wait_counts(lambda running, waiting, used: waiting == 0)
    assert answers[0].json()["choices"][0]["finish_reason"] == "abort"


async def test_load_counts_open_requests_and_needs_no_permission(open_served):
    async with open_served(null_step_ms=1) as served:
        assert (await served.request("GET", "/load")).json() == {"server_load": 0}
        async with await served.open_stream(max_tokens=5000) as stream:
            await stream.receive_some()
            assert (await served.request("GET", "/load")).json() == {"server_load": 1}


async def test_a_profile_is_written_where_the_operator_said_so(open_served, tmp_path):
    async with open_served(serve_config=OPEN) as served:
        answer = await served.request("POST", "/start_profile")
        assert (answer.status, "--profile-dir" in answer.error["message"]) == (400, True)
    async with open_served(serve_config=OPEN, profile_dir=str(tmp_path)) as served:
        assert (await served.request("POST", "/start_profile")).json() == {"status": "profiling"}
        await served.post(served.chat())
        path = (await served.request("POST", "/stop_profile")).json()["path"]
    assert await trio.Path(path).exists()
    assert path.startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/pause?mode=abrupt", "Invalid enum value 'abrupt'"),
        ("/pause?mod=keep", "unknown field `mod`"),
        ("/pause?mode=keep&mode=wait", "query parameter 'mode' is given 2 times"),
        ("/sleep?level=3", "Invalid enum value 3"),
        ("/sleep?level=deep", "got `str`"),
        ("/wake_up?tags=everything", "Invalid enum value 'everything'"),
        ("/resume?now=1", "unknown field `now`"),
        ("/reset_prefix_cache?reset_running_requests=maybe", "Expected `bool`"),
    ],
)
async def test_what_cannot_be_asked_is_refused_by_name(operated, path, fault):
    answer = await operated.request("POST", path)
    assert answer.status == 400, answer.body
    assert fault in answer.error["message"]
    assert await operated.engine.is_paused() is False


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route[1] != "/abort_requests"])
async def test_a_body_that_nobody_would_heed_is_refused(operated, method, path):
    answer = await operated.request(method, path, {"mode": "keep"})
    assert answer.status == 400
    assert f"{path} takes no body: what it can be asked goes into the query" in answer.error["message"]
    assert await operated.engine.is_paused() is False


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_an_unknown_parameter_is_refused_on_every_route(operated, method, path):
    body = {"request_ids": []} if path == "/abort_requests" else None
    answer = await operated.request(method, f"{path}?x=1", body)
    assert answer.status == 400
    assert "unknown field `x`" in answer.error["message"]


@pytest.mark.parametrize("body", [{}, {"request_ids": "a"}, {"request_ids": [1]}, {"request_ids": ["a"] * 5000}, []])
async def test_a_wrong_list_of_ids_is_refused(operated, body):
    assert (await operated.post(body, "/abort_requests")).status == 400


async def test_while_stopping_they_answer_503(operated):
    async with await operated.open_stream(max_tokens=200) as stream:
        await stream.receive_some()
        operated.state.stop()
        answer = await operated.request("POST", "/pause")
        assert answer.status == 503
        assert answer.headers["retry-after"]


@pytest.mark.parametrize("path", ["/pause?mode=keep", "/sleep?level=1&mode=keep"])
async def test_a_paused_or_sleeping_server_drains_too(open_served, path):
    async with open_served(serve_config=OPEN, null_step_ms=1, drain_s=10) as served:
        async with await served.open_stream(max_tokens=50) as stream:
            received = await stream.receive_some()
            assert (await served.request("POST", path)).status == 200
            served.stop.set()
            while not received.endswith(b"0\r\n\r\n"):
                received += await stream.receive_some()
            assert b'"finish_reason":"length"' in received
        with trio.fail_after(2):
            await served.ended.wait()
