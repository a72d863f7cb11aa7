"""Failures of the engine, before and after the head of an answer is sent.

One failed step ends the requests it held; a second in a row ends the engine.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing

from engine.executor.null import NullModelRunner


@pytest.fixture
def break_device(monkeypatch):
    """Makes every later step with a request in it fail."""
    execute = NullModelRunner.execute

    def now():
        def fail(self, plan):
            if plan.requests:
                raise RuntimeError("the device fell off")
            execute(self, plan)

        monkeypatch.setattr(NullModelRunner, "execute", fail)

    return now


def tasks_below(task):
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield child
            yield from tasks_below(child)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 3}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
    ],
    ids=["one", "choices", "prompts"],
)
async def test_failed_step_ends_its_streams_with_one_error_event(open_served, break_device, caplog, path, fields):
    async with open_served(null_step_ms=5) as served, await served.connect() as stream:
        body = {"stream": True, "max_tokens": 3000, "ignore_eos": True} | fields
        await stream.send_all(served.http("POST", path, body))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        break_device()
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += await stream.receive_some()
        await served.state.wait_idle()  # though the connection is kept
        await trio.testing.wait_all_tasks_blocked()
        assert not [record for record in caplog.records if record.name.startswith("web.h")]
        assert not any("forward" in task.name for task in tasks_below(trio.lowlevel.current_root_task()))
        assert received.count(b'data: {"error"') == 1
        assert b"the device fell off" in received
        assert b'"type":"server_error"' in received
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert (await served.request("GET", "/health")).status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_failure_before_the_first_output_keeps_its_status(open_served, break_device, stream):
    break_device()
    async with open_served() as served:
        failed = await served.post(served.chat(stream=stream))
        assert (failed.status, failed.error["type"]) == (500, "server_error")
        killed = await served.post(served.chat(stream=stream))
        refused = await served.post(served.chat(stream=stream))
        for answer in (killed, refused):
            assert (answer.status, answer.error["type"]) == (503, "server_error")
            assert answer.headers["retry-after"]
        assert all("the device fell off" in answer.error["message"] for answer in (failed, killed, refused))


async def test_dead_engine_is_unhealthy_at_once_and_its_metrics_still_answer(open_served, break_device):
    break_device()
    async with open_served() as served:
        for _ in range(2):
            await served.post(served.chat())
        assert (await served.request("GET", "/health")).status == 503
        assert (await served.request("GET", "/metrics")).status == 200
        assert (await served.request("GET", "/v1/models")).status == 503  # probes ask it too
