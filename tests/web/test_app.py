"""Routes, limits and errors over a real socket."""

from __future__ import annotations

import asyncio
import logging

import pytest

from engine.config import ServeConfig
from web.app import create_app

WRONG = [
    ({"messages": [{"role": "user", "content": "hi"}], "nonsense": 1}, 400, "nonsense"),
    ({"messages": [{"role": "user", "content": "hi"}], "temperature": -1}, 400, "temperature"),
    ({"messages": [{"role": "user", "content": "hi"}], "n": 0, "stream": True}, 400, "n"),
    ({"messages": [{"role": "user", "content": "hi"}], "model": "other"}, 404, "model"),
    ({}, 400, "messages"),
    (b"{", 400, None),
    (b'{"temperature": NaN}', 400, None),
]


@pytest.mark.parametrize(("body", "status", "param"), WRONG)
async def test_bad_request_gets_openais_error_body_and_the_field(served, body, status, param):
    answer = await served.post(body)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert answer.error["type"] == "invalid_request_error"


async def test_unknown_model_has_openais_code_and_names_what_is_served(served):
    answer = await served.post(served.chat(model="other"))
    assert answer.error["code"] == "model_not_found"
    assert "'other'" in answer.error["message"]
    assert "'null'" in answer.error["message"]


@pytest.mark.parametrize("prompt", ["", [], [-1], [2**30], [[]], [5] * 8192])
async def test_prompt_the_engine_cannot_run_is_refused_with_its_status_also_as_a_stream(served, prompt):
    for stream in (False, True):
        answer = await served.post({"prompt": prompt, "stream": stream}, "/v1/completions")
        assert answer.status == 400
        assert answer.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/%ff%00", 404),
        ("GET", "/v1/models/other", 404),
        ("PUT", "/health", 405),
        ("GET", "/v1/chat/completions", 405),
        ("OPTIONS", "*", 400),
        ("CONNECT", "host:80", 400),
    ],
)
async def test_wrong_route_or_method_gets_an_error_body(served, method, path, status):
    answer = await served.request(method, path)
    assert answer.status == status
    assert answer.error["message"]
    if status == 405:
        assert answer.headers["allow"]


async def test_absolute_form_of_a_target_is_its_path(served):
    assert (await served.request("GET", "http://localhost/health")).status == 200
    assert (await served.request("GET", "http://localhost")).status == 200


async def test_other_content_types_are_refused(served):
    answer = await served.post(b"a=b", Content_Type="application/x-www-form-urlencoded")
    assert (answer.status, answer.error["type"]) == (415, "invalid_request_error")
    answer = await served.post(b"x", Content_Encoding="gzip")
    assert answer.status == 415
    assert (await served.post(served.chat(), Content_Type="application/json; charset=utf-8")).status == 200
    assert (await served.post(served.chat(), Content_Type="")).status == 415


@pytest.mark.parametrize("form", ["declared", "chunked"])
async def test_body_over_the_limit_gets_413_even_while_the_client_still_sends(open_served, form):
    limit = 100_000
    async with open_served(max_body_bytes=limit) as served, await served.connect() as stream:
        if form == "declared":
            await stream.send_all(served.http("POST", "/v1/completions", Content_Length=str(2**27)))
        else:
            head = served.http("POST", "/v1/completions", Content_Length="", Transfer_Encoding="chunked")
            await stream.send_all(head)
        chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
        for _ in range(2**21 // len(chunk)):
            await stream.send_all(chunk)
        await stream.send_eof()
        received = b""
        while data := await stream.receive_some():
            received += data
        assert received.startswith(b"HTTP/1.1 413")
        assert str(limit).encode() in received


async def test_request_id_is_echoed_or_made_up_and_only_ever_a_label(served):
    answer = await served.request("GET", "/health", X_Request_Id="mine-7")
    assert answer.headers["x-request-id"] == "mine-7"
    for bad in ("", "x" * 129, "a b"):
        made_up = (await served.request("GET", "/health", X_Request_Id=bad)).headers["x-request-id"]
        assert len(made_up) == 32
    answer = await served.post(served.chat(), X_Request_Id="mine-7")
    assert answer.headers["x-request-id"] == "mine-7"
    assert "mine-7" not in answer.json()["id"]
    assert (await served.request("GET", "/nowhere", X_Request_Id="mine-8")).headers["x-request-id"] == "mine-8"


async def test_full_queue_is_429_with_retry_after(open_served):
    async with (
        open_served(max_num_seqs=1, max_num_waiting=1, null_step_ms=50) as served,
        await served.open_stream(max_tokens=1000),
        await served.open_stream(max_tokens=1000),
    ):
        await served.wait_counts(lambda running, waiting, used: running + waiting == 2)
        for stream in (False, True):
            answer = await served.post(served.chat(stream=stream))
            assert answer.status == 429
            assert answer.error["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1


async def test_bug_in_a_handler_is_500_without_detail_and_logged(served, monkeypatch, caplog):
    monkeypatch.setattr(type(served.engine), "stats_by_engine", lambda self: 1 / 0)
    with caplog.at_level(logging.ERROR):
        answer = await served.request("GET", "/metrics")
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert "division" not in answer.error["message"]
    assert "ZeroDivisionError" in caplog.text


async def test_page_is_one_file_that_asks_nobody_else(served):
    answer = await served.request("GET", "/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert b"http://" not in answer.body
    assert b"https://" not in answer.body
    assert "default-src 'none'" in answer.headers["content-security-policy"]


async def test_no_asyncio_loop_is_made_by_any_route(open_served, monkeypatch):
    def trap(*_, **__):
        raise AssertionError("an asyncio loop was made")

    monkeypatch.setattr(asyncio, "new_event_loop", trap)
    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "__init__", trap)
    async with open_served(serve_config=ServeConfig(port=0, enable_operations=True)) as served:
        app = create_app(served.state)
        routes = {(rule.rule, method) for rule in app.url_map.iter_rules() for method in rule.methods}
        for route, method in sorted(routes):
            answer = await served.request(method, route.replace("<path:name>", "null"))
            assert answer.status in {200, 400}, (method, route)
        for stream in (False, True):
            assert (await served.post(served.chat(stream=stream, n=2))).status == 200
            body = {"prompt": ["a", "b"], "max_tokens": 2, "stream": stream}
            assert (await served.post(body, "/v1/completions")).status == 200
        assert (await served.post(b"x" * 10**6)).status == 400
        assert (await served.request("GET", "/nowhere")).status == 404
