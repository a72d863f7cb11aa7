"""`python -m engine serve` as a user runs it: real processes, sockets and signals."""

from __future__ import annotations

import json
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
