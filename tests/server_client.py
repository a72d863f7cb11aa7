"""A server over memory channels and a real worker thread, its steps made to fail or to wait, and a bare client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from engine.config import EngineConfig
from engine.errors import Cause
from engine.executor.inline import InlineExecutor
from engine.executor.null import NullModelRunner
from engine.metrics import SchedulerStats
from engine.outputs import RequestId, SchedulerOutput
from engine.protocol import (
    Acknowledge,
    ClientMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineMessage,
    EngineReady,
    EngineStopped,
    Shutdown,
    StartProgress,
    StepsRead,
    UtilityCall,
    UtilityResult,
)
from engine.sampling_params import SamplingParams
from engine.server import EngineCoreServer

GREEDY = SamplingParams(temperature=0, max_tokens=10)


Fault = Callable[[int, SchedulerOutput], Exception | None]


class FailingRunner(NullModelRunner):
    """Raises what `fault(step number, plan)` gives, in place of running the step."""

    def __init__(self, config: EngineConfig, fault: Fault, depth: int = 1) -> None:
        super().__init__(config, depth)
        self._fault = fault
        self._num_steps = 0

    def execute(self, plan: SchedulerOutput) -> None:
        if plan.requests:
            self._num_steps += 1
            error = self._fault(self._num_steps, plan)
            if error is not None:
                raise error
        super().execute(plan)


class Harness:
    """A client of bare messages."""

    def __init__(
        self, send: trio.MemorySendChannel[ClientMessage], received: trio.MemoryReceiveChannel[EngineMessage]
    ) -> None:
        self._send = send
        self._received = received
        self.server: EngineCoreServer
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineCoreOutput] = {}
        self.results: dict[int, UtilityResult] = {}
        self.last_word: EngineMessage | None = None
        self.cause: Cause | None = None
        self.phases: list[str] = []
        self.stats: SchedulerStats | None = None
        self.num_calls = 1000
        self.step = 0
        self.says_what_it_reads = True
        self.num_ends_by_message: list[int] = []

    def send(self, message: ClientMessage) -> None:
        self._send.send_nowait(message)

    def add(self, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> None:
        self.send(EngineCoreRequest(RequestId(name), name, prompt, params, 0.0))

    async def call(self, verb: Any) -> UtilityResult:
        """Ask for a verb and return its answer."""
        self.num_calls += 1
        call_id = self.num_calls
        self.send(UtilityCall(call_id, verb))
        await self.read_until(lambda: call_id in self.results)
        return self.results[call_id]

    async def read_until(self, reached: Callable[[], bool]) -> None:
        with trio.fail_after(5):
            while not reached():
                self._take(await self._received.receive())

    def _take(self, message: EngineMessage) -> None:
        match message:
            case StartProgress(phase):
                if phase not in self.phases:
                    self.phases.append(phase)
            case EngineReady():
                self.phases.append("ready")
            case EngineCoreOutputs():
                self.step = message.step or self.step
                if message.step and self.says_what_it_reads:
                    self.send(StepsRead(message.step))
                if num_ends := sum(output.finish_reason is not None for output in message.outputs):
                    self.num_ends_by_message.append(num_ends)
                self.stats = message.scheduler_stats or self.stats
                self.results |= {result.call_id: result for result in message.utility_results}
                for output in message.outputs:
                    assert output.request_id not in self.ends, "an output came after the terminal one"
                    self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                    if output.finish_reason is not None:
                        self.ends[output.request_id] = output
            case EngineStopped() | EngineDead():
                self.last_word = message
                self.send(Acknowledge())

    async def stop(self) -> None:
        self.send(Shutdown())
        await self.read_until(lambda: self.last_word is not None)


async def receive_all(channel: trio.MemoryReceiveChannel[ClientMessage]) -> list[ClientMessage]:
    return [await channel.receive()]


@asynccontextmanager
async def running(fault: Fault = lambda step, plan: None, depth: int = 1, **settings: object) -> AsyncIterator[Harness]:
    """Run a server until the body has ended and stopped it."""
    config = EngineConfig.of(model="null", **settings)
    client_send, engine_receive = trio.open_memory_channel[ClientMessage](float("inf"))
    engine_send, client_receive = trio.open_memory_channel[EngineMessage](float("inf"))
    harness = Harness(client_send, client_receive)
    executor = InlineExecutor(partial(FailingRunner, config, fault, depth))
    server = EngineCoreServer(config, executor, partial(receive_all, engine_receive), engine_send.send_nowait)
    harness.server = server

    async def run() -> None:
        harness.cause = await server.run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await harness.read_until(lambda: "ready" in harness.phases or harness.last_word is not None)
        yield harness
        if harness.last_word is None:
            await harness.stop()
