from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import trio
import trio.testing

from engine.config import EngineConfig
from engine.errors import CheckpointError, ExecutorDead
from engine.executor.inline import InlineExecutor
from engine.outputs import Capacity, GrammarMasks, ModelRunnerOutput, RequestId, ScheduledRequest, SchedulerOutput
from engine.sampling_params import SamplingParams
from engine.verbs import CollectiveRpc, Resume, Sleep

CONFIG = EngineConfig()
CAPACITY = Capacity(num_kv_blocks=9, block_size=4, max_model_len=32, vocab_size=10, model_digest="0")


class RecordingRunner:
    """A runner that only notes what is called, in which order and thread."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.calls: list[str] = ["made"]
        self.threads = {threading.current_thread().name}
        self._gate = gate
        self._executed: list[SchedulerOutput] = []

    def start(self, progress: Callable[[str, int, int], None]) -> Capacity:
        self._note("start")
        for phase in ("weights", "warm_up"):
            for done in range(50):
                progress(phase, done, 50)
        return CAPACITY

    def execute(self, plan: SchedulerOutput) -> None:
        if self._gate is not None:
            self._gate.wait()
        self._note(f"execute {plan.step}")
        if plan.step == 13:
            raise MemoryError("step 13 does not fit")
        self._executed.append(plan)

    def sample(self, grammar_masks: GrammarMasks | None = None) -> ModelRunnerOutput:
        plan = self._executed.pop(0)
        self._note(f"sample {plan.step}{'' if grammar_masks is None else ' masked'}")
        return ModelRunnerOutput(step=plan.step, sampled_token_ids=[[plan.step] for _ in plan.requests])

    def sleep(self, level: int) -> None:
        self._note(f"sleep {level}")

    def memory(self) -> dict[str, int]:
        return {"kv_cache": 7}

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)


def make_plan(step: int, *, masked: bool = False) -> SchedulerOutput:
    request = ScheduledRequest(
        request_id=RequestId("a"),
        tokens=np.array([1], dtype=np.int32),
        start=0,
        num_tokens=1,
        block_tables=(np.array([1], dtype=np.int32),),
        samples=True,
        sampling_params=SamplingParams(),
    )
    return SchedulerOutput(step=step, requests=(request,), num_tokens=1, grammar_rows=(0,) if masked else ())


class Started:
    """A started executor and its runner; closes it on leaving."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.runners: list[RecordingRunner] = []
        self.progress: list[tuple[str, int, int]] = []
        self.executor = InlineExecutor(self._make, name="test executor")
        self._gate = gate

    def _make(self) -> RecordingRunner:
        self.runners.append(RecordingRunner(self._gate))
        return self.runners[-1]

    def note(self, phase: str, done: int, total: int) -> None:
        assert trio.lowlevel.in_trio_run()
        self.progress.append((phase, done, total))

    async def __aenter__(self) -> Started:
        assert await self.executor.start(CONFIG, self.note) == CAPACITY
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.executor.aclose()


async def test_everything_runs_on_one_thread_and_progress_arrives_in_trio_s_before_start_returns() -> None:
    async with Started() as started:
        assert started.progress == [(phase, done, 50) for phase in ("weights", "warm_up") for done in range(50)]
        output = await started.executor.execute(make_plan(1)).result()
        assert (output.step, output.sampled_token_ids) == (1, [[1]])
    assert started.runners[0].threads == {"test executor"}
    assert started.runners[0].calls == ["made", "start", "execute 1", "sample 1"]


async def test_sampling_follows_the_forward_at_once_where_no_mask_is_to_come() -> None:
    async with Started() as started:
        first, second = started.executor.execute(make_plan(1)), started.executor.execute(make_plan(2))
        assert (await second.result()).step == 2
        assert (await first.result()).step == 1
    assert started.runners[0].calls[2:] == ["execute 1", "sample 1", "execute 2", "sample 2"]


async def test_a_masked_plan_is_sampled_with_its_masks_before_the_next_is_executed() -> None:
    async with Started() as started:
        masked = started.executor.execute(make_plan(1, masked=True))
        masked.sample(np.zeros((1, 1), dtype=np.int32))
        plain = started.executor.execute(make_plan(2))
        plain.sample(None)
        assert (await masked.result()).step == 1
        assert (await plain.result()).step == 2
    assert started.runners[0].calls[2:] == ["execute 1", "sample 1 masked", "execute 2", "sample 2"]


async def test_a_step_that_fails_raises_its_own_error_and_the_executor_goes_on() -> None:
    async with Started() as started:
        with pytest.raises(MemoryError, match="step 13"):
            await started.executor.execute(make_plan(13)).result()
        assert (await started.executor.execute(make_plan(14)).result()).step == 14


async def test_a_masked_step_whose_forward_fails_raises_the_forward_s_error() -> None:
    async with Started() as started:
        failing = started.executor.execute(make_plan(13, masked=True))
        failing.sample(np.zeros((1, 1), dtype=np.int32))
        after = started.executor.execute(make_plan(14))
        with pytest.raises(MemoryError, match="step 13"):
            await failing.result()
        assert (await after.result()).step == 14


async def test_a_step_is_waited_for_even_when_cancelled() -> None:
    gate = threading.Event()
    async with Started(gate) as started:
        with trio.CancelScope() as scope:
            execution = started.executor.execute(make_plan(1))
            scope.cancel()
            gate.set()
            assert (await execution.result()).step == 1
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught


async def test_closing_is_idempotent_and_ends_the_thread_also_after_a_failed_or_no_start() -> None:
    def fail() -> RecordingRunner:
        raise CheckpointError("model.safetensors is truncated")

    failed = InlineExecutor(fail)
    with pytest.raises(CheckpointError, match="truncated"):
        await failed.start(CONFIG, lambda *call: None)
    for executor in (failed, failed, InlineExecutor(fail)):
        await executor.aclose()
    assert "executor" not in {thread.name for thread in threading.enumerate()}


async def test_a_verb_runs_on_the_runners_thread_after_the_steps_launched_before_it() -> None:
    gate = threading.Event()
    async with Started(gate) as started:
        step = started.executor.execute(make_plan(1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(started.executor.call, Sleep(1))
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
        await step.result()
        assert await started.executor.call(CollectiveRpc("memory")) == {"kv_cache": 7}
    assert started.runners[0].calls[2:] == ["execute 1", "sample 1", "sleep 1"]
    assert started.runners[0].threads == {"test executor"}


async def test_only_the_methods_of_the_table_can_be_called_and_only_verbs_for_a_runner_run() -> None:
    async with Started() as started:
        for method in ("start", "__init__", "shutdown", "sleep"):
            with pytest.raises(ValueError, match=f"no method '{method}'; known are capacity, memory, ping"):
                await started.executor.call(CollectiveRpc(method))
        with pytest.raises(ValueError, match="ping takes no arguments, got 1"):
            await started.executor.call(CollectiveRpc("ping", [1]))
        with pytest.raises(ValueError, match="Resume is no verb for a runner"):
            await started.executor.call(Resume())
        assert "in thread test executor of process" in await started.executor.call(CollectiveRpc("ping"))


async def test_an_abandoned_thread_is_waited_for_by_nobody() -> None:
    gate = threading.Event()
    async with Started(gate) as started:
        step = started.executor.execute(make_plan(1))
        started.executor.abandon()
        with pytest.raises(ExecutorDead, match="has ended without being asked"):
            await step.result()
    gate.set()
    assert started.executor._worker._thread is not None
    started.executor._worker._thread.join()
    started.executor._worker._bell.close()
