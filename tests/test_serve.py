"""`python -m engine serve` as a user runs it: real processes, sockets and signals."""

from __future__ import annotations

import json
import os
import select
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TRAP = """
import asyncio.base_events, atexit, json, os, sys
_made = []
_init = asyncio.base_events.BaseEventLoop.__init__
def _trap(self, *args, **kwargs):
    _made.append(repr(self))
    _init(self, *args, **kwargs)
asyncio.base_events.BaseEventLoop.__init__ = _trap
def _report():
    names = [name for name in ("torch", "transformers") if name in sys.modules]
    with open(os.path.join({folder!r}, f"process-%d.json" % os.getpid()), "w") as file:
        json.dump({{"argv": sys.argv, "loops": _made, "modules": names}}, file)
atexit.register(_report)
"""


def test_sigterm_ends_each_open_stream_with_a_terminal_event_and_exits_0(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "5")
    responses = server.open_streams(4)
    server.process.send_signal(signal.SIGTERM)
    for response in responses:
        *_, last, done = server.events(response)
        assert last["choices"][0]["finish_reason"] == "abort"
        assert done == "[DONE]"
    assert server.wait() == 0
    assert "stopped" in server.lines[-1]


def test_drain_lets_streams_finish_before_the_exit(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "5", "--shutdown-timeout", "30")
    response = server.post("/v1/completions", {**server.LONG, "max_tokens": 100})
    response.readline()
    server.process.send_signal(signal.SIGINT)
    *_, last, done = server.events(response)
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert server.wait() == 0


def test_a_second_signal_stops_at_once_with_its_own_code(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "5", "--shutdown-timeout", "600")
    server.open_streams(1)
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("stopping")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM


def test_killing_the_front_takes_the_engine_process_with_it(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "5")
    server.open_streams(2)
    pidfds = [os.pidfd_open(child) for child in server.children]
    assert pidfds
    server.process.kill()
    try:
        for pidfd in pidfds:
            readable, _, _ = select.select([pidfd], [], [], 1.0)
            assert readable, "a child outlived the front by a second"
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def test_killing_the_engine_gives_streams_an_error_event_and_exit_code_1(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "5")
    (response,) = server.open_streams(1)
    engine_pid = int(server.wait_line(r"engine process (\d+)")[1])
    os.kill(engine_pid, signal.SIGKILL)
    *_, last, _ = server.events(response)
    assert "SIGKILL" in last["error"]["message"]
    assert server.wait() == 1
    assert "SIGKILL" in server.lines[-1]


def test_no_process_runs_an_asyncio_loop_and_the_front_has_no_torch(start_server: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TRAP.format(folder=str(tmp_path)))
    server = start_server("null", env={"PYTHONPATH": str(tmp_path)})
    for path in ("/health", "/v1/models", "/metrics", "/version", "/"):
        assert urllib.request.urlopen(server.url + path, timeout=10).status == 200
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert server.post("/v1/chat/completions", body).status == 200
    assert server.events(server.post("/v1/chat/completions", {**body, "stream": True}))[-1] == "[DONE]"
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("process-*.json")]
    assert len(reports) == 2, reports
    assert all(report["loops"] == [] for report in reports)
    assert all(report["modules"] == [] for report in reports)


def test_a_stop_while_the_model_loads_exits_0(start_server: Any) -> None:
    server = start_server("null")
    server.wait_line("starting: weights")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no-such-model"], "no-such-model"),
        (["null", "--max-num-seqs", "0"], "max-num-seqs must be at least 1"),
        (["null", "--device", "cuda:0"], "only CPU back ends"),
        (["null", "--host", "999.1.1.1"], "999.1.1.1"),
        (["null", "--max-model-len", "100", "--num-gpu-blocks-override", "2"], "num-gpu-blocks-override 2"),
        (["null", "--no-such-flag"], "no-such-flag"),
    ],
)
def test_wrong_arguments_exit_2_with_one_clear_line(start_server: Any, arguments: list[str], text: str) -> None:
    server = start_server(*arguments)
    assert server.wait() == 2
    assert text in server.lines[-1]
    assert not any("Traceback" in line for line in server.lines)
