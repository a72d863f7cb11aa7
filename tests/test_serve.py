"""`python -m engine serve` as a user runs it: real processes, sockets and signals."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

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


class Server:
    """A serving process; its log is read as it comes."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine", "serve", *arguments, "--port", "0"],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def wait_line(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.lines)), None)

        with self._news:
            self._news.wait_for(lambda: found() or self._has_ended, timeout=60)
            match = found()
            assert match, "\n".join(self.lines)
            return match

    @property
    def url(self) -> str:
        return self.wait_line(r"ready: .* on (http://[\d.:]+)")[1]

    @property
    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=60)

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait()
        self._reader.join()
        self.process.stderr.close()
        return code

    def wait(self) -> int:
        code = self.process.wait(timeout=20)
        self._reader.join()
        return code


@pytest.fixture
def start() -> Iterator[Any]:
    servers: list[Server] = []

    def start(*arguments: str, env: dict[str, str] | None = None) -> Server:
        servers.append(Server(*arguments, env=env))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def events(response: Any) -> list[Any]:
    datas = [line.decode().strip()[6:] for line in response if line.startswith(b"data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


LONG = {"prompt": "go on", "max_tokens": 8000, "stream": True, "ignore_eos": True}


def open_streams(server: Server, number: int) -> list[Any]:
    """Open streams and read a first event of each, so that all are under way."""
    responses = [server.post("/v1/completions", LONG) for _ in range(number)]
    for response in responses:
        assert response.readline().startswith(b"data: ")
    return responses


def test_sigterm_ends_each_open_stream_with_a_terminal_event_and_exits_0(start: Any) -> None:
    server = start("null", "--null-step-ms", "5")
    responses = open_streams(server, 4)
    server.process.send_signal(signal.SIGTERM)
    for response in responses:
        *_, last, done = events(response)
        assert last["choices"][0]["finish_reason"] == "abort"
        assert done == "[DONE]"
    assert server.wait() == 0
    assert "stopped" in server.lines[-1]


def test_drain_lets_streams_finish_before_the_exit(start: Any) -> None:
    server = start("null", "--null-step-ms", "5", "--shutdown-timeout", "30")
    response = server.post("/v1/completions", {**LONG, "max_tokens": 100})
    response.readline()
    server.process.send_signal(signal.SIGINT)
    *_, last, done = events(response)
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert server.wait() == 0


def test_a_second_signal_stops_at_once_with_its_own_code(start: Any) -> None:
    server = start("null", "--null-step-ms", "5", "--shutdown-timeout", "600")
    open_streams(server, 1)
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("stopping")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM


def test_killing_the_front_takes_the_engine_process_with_it(start: Any) -> None:
    server = start("null", "--null-step-ms", "5")
    open_streams(server, 2)
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


def test_killing_the_engine_gives_streams_an_error_event_and_exit_code_1(start: Any) -> None:
    server = start("null", "--null-step-ms", "5")
    (response,) = open_streams(server, 1)
    engine_pid = int(server.wait_line(r"engine process (\d+)")[1])
    os.kill(engine_pid, signal.SIGKILL)
    *_, last, _ = events(response)
    assert "SIGKILL" in last["error"]["message"]
    assert server.wait() == 1
    assert "SIGKILL" in server.lines[-1]


def test_no_process_runs_an_asyncio_loop_and_the_front_has_no_torch(start: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TRAP.format(folder=str(tmp_path)))
    server = start("null", env={"PYTHONPATH": str(tmp_path)})
    for path in ("/health", "/v1/models", "/metrics", "/version", "/"):
        assert urllib.request.urlopen(server.url + path, timeout=10).status == 200
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert server.post("/v1/chat/completions", body).status == 200
    assert events(server.post("/v1/chat/completions", {**body, "stream": True}))[-1] == "[DONE]"
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("process-*.json")]
    assert len(reports) == 2, reports
    assert all(report["loops"] == [] for report in reports)
    assert all(report["modules"] == [] for report in reports)


def test_a_stop_while_the_model_loads_exits_0(start: Any) -> None:
    server = start("null")
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
def test_wrong_arguments_exit_2_with_one_clear_line(start: Any, arguments: list[str], text: str) -> None:
    server = start(*arguments)
    assert server.wait() == 2
    assert text in server.lines[-1]
    assert not any("Traceback" in line for line in server.lines)
