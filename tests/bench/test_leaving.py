"""The figures of streams that are left are of what they say: the engine runs in this process, and by one clock."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.bench import leaving
from engine.bench.leaving import departures_of, leave_all, leave_one_by_one, output_len_of, take_traces
from engine.bench.workload import Workload
from engine.client.asynchronous import AsyncMPClient
from engine.errors import ConfigError
from engine.inbox import Inbox
from engine.launch import open_engine
from engine.protocol import AbortReason, AbortRequest
from engine.step_loop import StepLoop

NUM_STREAMS = 4
STEP_S = 0.01


class Told(NamedTuple):
    at_s: float
    num_running: int
    num_left_over: int
    """Blocks in use that none of those who run have."""


class Notes:
    """When aborts were queued by the client and reached the engine, and what the engine then told of itself."""

    def __init__(self) -> None:
        self.queued: list[tuple[float, list[str]]] = []
        self.arrived_s: list[float] = []
        self.told: list[Told] = []

    def free_s(self, num_running: int, since_s: float) -> float:
        """When it was first told, from a time on, that so many run and nobody else has a block."""
        return next(told.at_s for told in self.told if told.at_s > since_s and told[1:] == (num_running, 0))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes, abort, put, tell = Notes(), AsyncMPClient.abort_requests, Inbox.put, StepLoop._tell

    def noted_abort(client: AsyncMPClient, request_ids: Iterable[Any], reason: AbortReason) -> None:
        ids = list(request_ids)
        if ids:
            notes.queued.append((time.monotonic(), ids))
        abort(client, ids, reason)

    def noted_put(inbox: Inbox, message: Any) -> None:
        if isinstance(message, AbortRequest):
            notes.arrived_s.append(time.monotonic())
        put(inbox, message)

    def noted_tell(loop: StepLoop, *arguments: Any, **named: Any) -> None:
        tell(loop, *arguments, **named)
        scheduler, kv_cache = loop._core._scheduler, loop._core._kv_cache
        held = sum(kv_cache.num_blocks(request) for request in scheduler.running)
        left_over = kv_cache.pool.num_used_blocks - held
        notes.told.append(Told(time.monotonic(), len(scheduler.running), left_over))

    monkeypatch.setattr(AsyncMPClient, "abort_requests", noted_abort)
    monkeypatch.setattr(Inbox, "put", noted_put)
    monkeypatch.setattr(StepLoop, "_tell", noted_tell)
    return notes


def open_null(folder: Path, **settings: Any) -> Any:
    return open_engine(
        "null", isolation="thread", null_step_ms=1000 * STEP_S, block_size=4, profile_dir=str(folder), **settings
    )


async def test_one_that_leaves_is_timed_from_its_leaving_until_what_it_had_is_free(
    notes: Notes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "NUM_DEPARTURES", 10)
    async with open_null(tmp_path) as llm:
        workload = Workload(NUM_STREAMS, 8, output_len_of(llm, 8), seed=0)
        await llm.start_profile()
        left_s = await leave_one_by_one(llm, workload, random.Random(1), until_s=float("inf"))
        await llm.stop_profile()
    departures = departures_of(left_s, take_traces(tmp_path, NUM_STREAMS))
    alone = notes.queued[:-NUM_STREAMS]
    assert len(left_s) == len(alone) == 10
    assert all(len(ids) == 1 for _, ids in alone)
    took_s = [notes.free_s(NUM_STREAMS - 1, queued_s) - queued_s for queued_s, _ in alone]
    late_s = [measured_s - true_s for measured_s, true_s in zip(departures.free_s, took_s, strict=True)]
    assert statistics.median(map(abs, late_s)) < STEP_S / 10
    assert all(0 < seen_s <= free_s for seen_s, free_s in zip(departures.seen_s, departures.free_s, strict=True))
    assert max(departures.beyond_s) < STEP_S
    assert min(took_s) < STEP_S / 2 < max(took_s)  # at different moments of a step
    began_s, ended_s = alone[0][0], alone[-1][0]
    assert all(told.num_running >= NUM_STREAMS - 1 for told in notes.told if began_s < told.at_s < ended_s)


async def test_all_that_leave_are_timed_from_their_own_leaving_until_nothing_is_held(
    notes: Notes, tmp_path: Path
) -> None:
    async with open_null(tmp_path) as llm:
        await llm.start_profile()
        burst = await leave_all(llm, Workload(NUM_STREAMS, 8, output_len_of(llm, 8), seed=0), random.Random(1))
        await llm.stop_profile()
    free_s = notes.free_s(0, notes.arrived_s[-1])
    queued_s = [at_s for at_s, _ in notes.queued]
    assert all(before <= after for before, after in zip(burst.left_s, queued_s, strict=True))
    assert burst.cancelled_s <= burst.left_s[0] < queued_s[-1] <= notes.arrived_s[0] < free_s <= burst.told_s
    times = take_traces(tmp_path, NUM_STREAMS)
    assert times.seen_to_free_s == [pytest.approx(free_s - notes.arrived_s[0], abs=STEP_S / 2)]
    assert times.num_steps_between == [0]
    assert min(times.steps_s) >= STEP_S


def test_a_step_that_begins_between_the_last_abort_and_the_end_of_what_was_held_is_counted(tmp_path: Path) -> None:
    def event(name: str, row: str, at_ms: float, **arguments: int) -> dict[str, Any]:
        return {"name": name, "cat": row, "ph": "X", "ts": 1000 * at_ms, "dur": 8000, "args": arguments}

    rows = {"num_requests": 2, "num_tokens": 2}
    events = [
        event("step 1", "steps", 0, **rows),
        event("load", "load", 10, num_used_blocks=2, num_requests=2),
        event("abort", "aborts", 12, num_requests=1),
        event("step 2", "steps", 10, **rows),
        event("abort", "aborts", 15, num_requests=1),
        event("step 3", "steps", 20, num_requests=1, num_tokens=1),
        event("step 4", "steps", 31, num_requests=0, num_tokens=0),  # tells the executor alone of an end
        event("load", "load", 32, num_used_blocks=0, num_requests=0),
    ]
    (tmp_path / "steps-1-1.json").write_bytes(msgspec.json.encode({"traceEvents": events}))
    times = take_traces(tmp_path, 2)
    assert times.steps_s == [pytest.approx(0.01)]
    assert times.seen_to_free_s == [pytest.approx(0.02)]
    assert times.num_steps_between == [1]
    assert times.fewer_s == [pytest.approx(0.032)]
    departures = departures_of([0.011], times)
    assert [pytest.approx([each], abs=1e-9) for each in (0.001, 0.021, 0.013)] == list(departures)
    assert not list(tmp_path.iterdir())


async def test_streams_that_would_end_before_they_are_left_are_refused(tmp_path: Path) -> None:
    async with open_null(tmp_path, max_model_len=100) as llm:
        with pytest.raises(ConfigError, match=r"need a context of 136 tokens, and --max-model-len is 100"):
            output_len_of(llm, 8)
