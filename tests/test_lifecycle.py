"""How an engine and its server live and end, on real processes: the one order of a teardown, chaos, early signals."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

pytestmark = pytest.mark.slow

FRONT_FIRST = ["probes and new work get 503", "streams ended, 0 cut", "listeners closed", "connections closed"]
ENGINE_ASKED = ["engine asked to stop", "intake closed"]
ENGINE = ["step task ended", "last word acknowledged", "executor closed"]
SOCKETS = ["socket closed", "socket closed", "context closed"]
WHOLE = [*FRONT_FIRST, *ENGINE_ASKED, *ENGINE, *SOCKETS, "engine-0 ended", *SOCKETS]
"""The engine's lines come through the front's log, which has read them all once its process has ended."""


def teardown_of(server: Any) -> list[str]:
    return [line.partition(" teardown: ")[2] for line in server.lines if " teardown: " in line]


# -- the one order of a teardown ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drain_s", "max_tokens", "reason"),
    [("0", 8000, "abort"), ("60", 150, "length"), ("0.2", 8000, "abort")],
    ids=["abort", "drain", "expired drain"],
)
def test_a_stop_has_one_order(start_server: Any, drain_s: str, max_tokens: int, reason: str) -> None:
    server = start_server("null", "--null-step-ms", "2", "--shutdown-timeout", drain_s, "--log-level", "debug")
    responses = [server.post("/v1/completions", {**server.LONG, "max_tokens": max_tokens}) for _ in range(4)]
    server.process.send_signal(signal.SIGTERM)
    for response in responses:
        *_, last, done = server.events(response)
        assert (last["choices"][0]["finish_reason"], done) == (reason, "[DONE]")
    assert server.wait() == 0
    assert teardown_of(server) == WHOLE


def test_a_stop_while_the_model_loads_has_the_same_order(start_server: Any) -> None:
    server = start_server("smollm2", "--num-threads", "1", "--log-level", "debug")
    server.wait_line("starting: weights")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert teardown_of(server) == ["listeners closed", "engine-0 ended", *SOCKETS]


def test_an_engine_that_dies_while_draining_is_torn_down_in_the_same_order(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "2", "--shutdown-timeout", "600", "--log-level", "debug")
    responses = server.open_streams(4)
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("teardown: probes and new work")
    os.kill(server.engine_pid, signal.SIGKILL)
    for response in responses:
        *_, error, done = server.events(response)
        assert "SIGKILL" in error["error"]["message"]
        assert done == "[DONE]"
    assert server.wait() == 1
    assert teardown_of(server) == [*FRONT_FIRST, "engine-0 ended", *SOCKETS]


def test_an_engine_that_fails_is_torn_down_in_the_same_order(start_server: Any, tmp_path: Any) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif sys.argv[0] == '-c':\n"
        "    from engine.executor.null import NullModelRunner\n"
        "    def execute(self, plan):\n"
        "        raise RuntimeError('the device is on fire')\n"
        "    NullModelRunner.execute = execute\n"
    )
    path = f"{tmp_path}:{os.getcwd()}"
    server = start_server("null", "--log-level", "debug", env={"PYTHONPATH": path})
    for _ in range(2):
        with pytest.raises(OSError, match=r"50\d"):
            server.post("/v1/completions", {"prompt": "x"})
    assert server.wait() == 1
    assert "the device is on fire" in server.lines[-1]
    front = ["probes and new work get 503", "streams ended, 0 cut", "listeners closed", "connections closed"]
    told = teardown_of(server)
    assert [line for line in told if line in front] == front
    assert [line for line in told if line not in front] == [*ENGINE, *SOCKETS, "engine-0 ended", *SOCKETS]
