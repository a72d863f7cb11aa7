"""How a serving process ends: signals, deaths and kills, in every phase, and what is left afterwards (nothing)."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

STUCK = ("null", "--null-step-ms", "30000")
"""Steps so long that whoever waits for one has failed."""


@contextmanager
def all_gone(pids: list[int], timeout_s: float = 5.0) -> Any:
    """Assert that the processes, alive at the start of the block, have ended soon after it."""
    pidfds = [os.pidfd_open(pid) for pid in pids]
    assert pidfds
    try:
        yield
        for pid, pidfd in zip(pids, pidfds, strict=True):
            readable, _, _ = select.select([pidfd], [], [], timeout_s)
            assert readable, f"process {pid} is left"
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def start_stuck_request(server: Any) -> socket.socket:
    """Send a request whose first step does not end, and return its connection once the engine waits for that step."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    body = json.dumps(server.LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    while not any("_finish < " in line for line in server.lines):
        os.kill(server.engine_pid, signal.SIGUSR1)
        time.sleep(0.02)
    return connection


def health(server: Any) -> int | None:
    """The status of /health; None where nobody answers."""
    try:
        return int(server.get("/health").status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return None


def test_sigterm_with_64_streams_gives_64_terminal_events_and_exit_0(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "5")
    responses = server.open_streams(64)
    with all_gone(server.children):
        server.process.send_signal(signal.SIGTERM)
        for response in responses:
            *_, last, done = server.events(response)
            assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
        assert server.wait() == 0


def test_drain_lets_64_streams_finish_and_refuses_new_ones(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "5", "--shutdown-timeout", "60")
    responses = [server.post("/v1/completions", {**server.LONG, "max_tokens": 150}) for _ in range(64)]
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("stopping")
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.post("/v1/completions", server.LONG)
    assert refusal.value.code == 503
    assert refusal.value.headers["Retry-After"]
    refusal.value.close()
    for response in responses:
        *_, last, done = server.events(response)
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert server.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_second_signal_does_not_wait_for_a_stuck_step(start_server: Any, number: int) -> None:
    server = start_server(*STUCK, "--shutdown-timeout", "600")
    with start_stuck_request(server), all_gone(server.children):
        server.process.send_signal(number)
        server.wait_line("stopping")
        server.process.send_signal(number)
        assert server.wait() == 128 + number


def test_a_signal_while_the_model_loads_exits_0_and_leaves_no_child(start_server: Any) -> None:
    """See test_lifecycle.py for a model that takes its time."""
    server = start_server("null")
    server.wait_line("starting: weights")
    children = server.children
    with all_gone(children) if children else open(os.devnull):
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not any("Traceback" in line for line in server.lines)


def test_an_engine_killed_while_it_loads_is_the_cause_on_the_last_line(start_server: Any) -> None:
    server = start_server("smollm2", "--num-threads", "1")
    server.wait_line("starting: weights")
    os.kill(server.children[0], signal.SIGKILL)
    assert server.wait() == 1
    assert "engine-0 was killed by SIGKILL" in server.lines[-1]


def test_an_engine_that_crashes_while_it_loads_says_its_own_last_words(start_server: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif sys.argv[0] == '-c':\n"
        "    from engine.executor.null import NullModelRunner\n"
        "    def start(self, progress):\n"
        "        progress('weights', 0, 1)\n"
        "        raise RuntimeError('the weights are on fire')\n"
        "    NullModelRunner.start = start\n"
    )
    server = start_server("null", env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parent.parent}"})
    assert server.wait() == 1
    assert server.lines[-1] == (
        "metronome: the engine died: RuntimeError: the weights are on fire (while starting: weights)"
    )
    assert any("Traceback" in line for line in server.lines[:-1])


def test_death_of_the_engine_is_told_to_all_and_no_probe_sees_200_again(start_server: Any) -> None:
    """Even with a drain of ten minutes and a client that reads nothing."""
    server = start_server("null", "--null-step-ms", "1", "--shutdown-timeout", "600")
    with server.post("/v1/completions", server.LONG):
        responses = server.open_streams(16)
        statuses: list[int | None] = []
        may_probe = threading.Event()

        def probe() -> None:
            may_probe.wait()
            while server.process.poll() is None:
                statuses.append(health(server))
                time.sleep(0.02)

        prober = threading.Thread(target=probe)
        prober.start()
        os.kill(server.engine_pid, signal.SIGKILL)
        ends = [server.events(response) for response in responses]
        may_probe.set()
        assert server.wait() == 1
        prober.join()
    for *_, error, done in ends:
        assert "engine-0 was killed by SIGKILL" in error["error"]["message"]
        assert done == "[DONE]"
    assert set(statuses) <= {503, None}
    assert server.lines[-1] == "metronome: the engine died: EngineDied: engine-0 was killed by SIGKILL"


def test_a_signal_during_the_death_of_the_engine_does_not_hide_it(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "5")
    responses = server.open_streams(4)
    os.kill(server.engine_pid, signal.SIGKILL)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 1
    assert all("SIGKILL" in server.events(response)[-2]["error"]["message"] for response in responses)
    assert "SIGKILL" in server.lines[-1]


def test_killing_the_front_leaves_nothing(start_server: Any, tmp_path: Path, temporary_folder: Path) -> None:
    """`python -m fuzz kills` does it many times, at random moments."""
    path = tmp_path / "socket"
    server = start_server("null", "--uds", str(path), env={"TMPDIR": str(temporary_folder)})
    server.wait_line("ready")
    with all_gone(server.children):
        server.process.kill()
        server.process.wait()
    assert not list(temporary_folder.iterdir())
    again = start_server("null", "--uds", str(path))  # the stale socket hinders nobody
    again.wait_line("ready")
    again.process.send_signal(signal.SIGTERM)
    assert again.wait() == 0
    assert not path.exists()


def test_killing_the_front_while_the_engine_starts_leaves_nothing(
    start_server: Any, tmp_path: Path, temporary_folder: Path
) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text("import sys, time\nif sys.argv[0] == '-c': time.sleep(30)\n")
    server = start_server("null", env={"TMPDIR": str(temporary_folder), "PYTHONPATH": str(tmp_path / "slow")})
    while len(server.children) < 2:  # the engine and its reaper
        time.sleep(0.01)
    assert list(temporary_folder.iterdir())
    with all_gone(server.children):
        server.process.kill()
        server.process.wait()
    assert not list(temporary_folder.iterdir())


def test_what_is_left_where_the_reaper_was_killed_too_is_removed_at_the_next_start(
    start_server: Any, tmp_path: Path, temporary_folder: Path
) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text("import sys, time\nif sys.argv[0] == '-c': time.sleep(30)\n")
    server = start_server("null", env={"TMPDIR": str(temporary_folder), "PYTHONPATH": str(tmp_path / "slow")})
    while len(server.children) < 2:  # the engine and its reaper
        time.sleep(0.01)
    children = server.children
    with all_gone(children):
        for pid in (children[1], server.process.pid, children[0]):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
    assert list(temporary_folder.iterdir())
    again = start_server("null", env={"TMPDIR": str(temporary_folder)})
    again.wait_line("ready")
    assert not list(temporary_folder.iterdir())
    (reaper,) = set(again.children) - {again.engine_pid}
    with all_gone(again.children):
        os.kill(reaper, signal.SIGKILL)
        again.process.kill()
        again.process.wait()
    assert not list(temporary_folder.iterdir())


def test_killing_the_reaper_ends_nothing_and_killing_the_engine_then_the_front(start_server: Any) -> None:
    server = start_server("null")
    server.wait_line("ready")
    children = server.children
    (reaper,) = set(children) - {server.engine_pid}
    with all_gone([reaper]):
        os.kill(reaper, signal.SIGKILL)
    assert health(server) == 200
    with all_gone([server.engine_pid]):
        os.kill(server.engine_pid, signal.SIGKILL)
    assert server.wait() == 1


def test_a_hung_process_shows_its_tasks_and_threads(start_server: Any) -> None:
    server = start_server(*STUCK)
    with start_stuck_request(server):
        server.wait_line(f"tasks of process {server.engine_pid}")
        server.wait_line(r"step_loop\.StepLoop\.run at .*executor/inline\.py:\d+ result")
        server.process.send_signal(signal.SIGUSR1)
        server.wait_line(f"tasks of process {server.process.pid}")
        server.wait_line(r"web/serve\.py:\d+ serve")
        os.kill(server.engine_pid, signal.SIGUSR2)
        server.wait_line(r"executor/null\.py.* in execute")
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("stopping")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM


def test_sigterm_while_another_process_fills_the_model_cache_exits_0_at_once(start_server: Any, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = start_server(env={"METRONOME_CACHE": str(tmp_path)})
        server.wait_line("waiting for it")
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.wait() == 0
        assert time.monotonic() - began < 2


def test_an_engine_that_is_stopped_by_the_system_costs_each_stream_an_error_event_and_exit_code_1(
    start_server: Any, hasty: dict[str, str]
) -> None:
    server = start_server("null", "--null-step-ms", "5", env=hasty)
    responses = server.open_streams(8)
    with all_gone(server.children, timeout_s=20):
        os.kill(server.engine_pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        for response in responses:
            *_, last, done = server.events(response)
            assert "did not end its requests" in last["error"]["message"]
            assert done == "[DONE]"
        assert server.wait() == 1
    assert "did not end its requests" in server.lines[-1]
