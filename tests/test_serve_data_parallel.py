"""`python -m engine serve -dp 2` as a user runs it: streams from both engines, figures of each, and every end."""

from __future__ import annotations

import os
import re
import select
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.slow


@pytest.fixture
def start(start_server: Any, temporary_folder: Path) -> Iterator[Any]:
    """Starts a server of two engines; neither a process nor a file of it may be left."""
    pidfds: list[int] = []

    def start(*arguments: str, env: Mapping[str, str] | None = None) -> Any:
        environment = {"TMPDIR": str(temporary_folder), **(env or {})}
        server = start_server("null", "-dp", "2", "--null-step-ms", "2", *arguments, env=environment)
        server.wait_line("ready: ")
        pidfds.extend(os.pidfd_open(pid) for pid in server.children)
        return server

    yield start
    assert len(pidfds) == 4, "two engines, and a reaper for each"
    for pidfd in pidfds:
        readable, _, _ = select.select([pidfd], [], [], 5)
        assert readable, "a process is left"
        os.close(pidfd)


def engine_pids(server: Any) -> list[int]:
    return [int(pid) for pid in server.wait_line(r"engine processes (\d+ \d+)")[1].split()]


def figures(server: Any, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(server.get("/metrics").read().decode())
    return {
        sample.labels["engine"]: sample.value for family in families for sample in family.samples if sample.name == name
    }


def test_streams_of_both_engines_and_an_orderly_stop(start: Any) -> None:
    server = start()
    responses = server.open_streams(6)
    assert figures(server, "vllm:num_requests_running") == {"0": 3, "1": 3}
    assert figures(server, "vllm:num_preemptions_total") == {"0": 0, "1": 0}
    short = {"prompt": "go", "max_tokens": 5, "ignore_eos": True, "temperature": 0, "stream": True}
    texts = [
        "".join(e["choices"][0]["text"] for e in server.events(server.post("/v1/completions", short))[:-1])
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    server.process.send_signal(signal.SIGTERM)
    for response in responses:
        *_, last, done = server.events(response)
        assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
    assert server.wait() == 0
    for rank in (0, 1):
        assert any(re.match(rf"\[engine-{rank}\] .*starting: kv_pages", line) for line in server.lines)


def test_the_death_of_one_engine_is_told_to_all_streams_and_ends_the_server_with_exit_code_1(start: Any) -> None:
    server = start("--shutdown-timeout", "600")
    responses, pids = server.open_streams(6), engine_pids(server)
    os.kill(pids[1], signal.SIGKILL)
    for response in responses:
        *_, error, done = server.events(response)
        assert "engine-1 was killed by SIGKILL" in error["error"]["message"]
        assert done == "[DONE]"
    assert server.wait() == 1
    assert server.lines[-1] == "metronome: the engine died: EngineDied: engine-1 was killed by SIGKILL"


def test_an_engine_that_stands_still_costs_its_own_streams_alone_their_end_at_a_stop(
    start: Any, hasty: dict[str, str]
) -> None:
    server = start(env=hasty)
    responses, pids = server.open_streams(4), engine_pids(server)
    os.kill(pids[1], signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    ends = [server.events(response)[-2] for response in responses]
    aborted = [end for end in ends if "choices" in end and end["choices"][0]["finish_reason"] == "abort"]
    stuck = [end for end in ends if "error" in end and "engine 1 did not end its requests" in end["error"]["message"]]
    assert (len(aborted), len(stuck)) == (2, 2)
    assert server.wait() == 1
    assert "engine 1 did not end its requests" in server.lines[-1]


def test_killing_the_front_leaves_nothing_of_either_engine(start: Any) -> None:
    server = start()
    server.process.kill()
    server.process.wait()
