"""`python -m engine serve` as a user runs it: real processes, sockets and signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
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
_exit = os._exit
os._exit = lambda status: (_report(), _exit(status))
"""


@pytest.mark.parametrize("model", ["null", "smollm2"])
def test_no_process_runs_an_asyncio_loop_and_the_front_has_no_torch(
    start_server: Any, tmp_path: Path, model: str, smollm2_folder: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(TRAP.format(folder=str(tmp_path)))
    server = start_server(model, "--max-model-len", "512", "--num-threads", "1", env={"PYTHONPATH": str(tmp_path)})
    for path in ("/health", "/v1/models", "/metrics", "/version", "/"):
        assert urllib.request.urlopen(server.url + path, timeout=10).status == 200
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert server.post("/v1/chat/completions", body).status == 200
    assert server.events(server.post("/v1/chat/completions", {**body, "stream": True}))[-1] == "[DONE]"
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("process-*.json")]
    assert [report["loops"] for report in reports] == [[], []]
    front = [report["modules"] for report in reports if report["argv"][0].endswith("__main__.py")]
    assert front == [[]]


def test_a_storm_of_connections_leaves_the_descriptors_that_are_kept_from_them(
    start_server: Any, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (200, 200))\n")
    path = str(tmp_path / "socket")
    server = start_server("null", "--uds", path, env={"PYTHONPATH": str(tmp_path)})
    server.wait_line("ready")
    with contextlib.ExitStack() as clients:
        os.kill(server.process.pid, signal.SIGSTOP)
        connections = [clients.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(700)]
        for connection in connections:
            connection.connect(path)
        os.kill(server.process.pid, signal.SIGCONT)
        assert connections[-1].recv(1) == b""
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not [line for line in server.lines if "EMFILE" in line]
    refused = [
        int(line.partition("connections refused: ")[2].partition(";")[0])
        for line in server.lines
        if "connections refused" in line
    ]
    assert (refused[0], sum(refused), len(refused)) == (1, 700 - (200 - 128), 2)
