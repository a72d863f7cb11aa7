"""However an abort races with the end of its request: exactly one terminal output, nothing after it, right tokens.

    python -m fuzz races --minutes 5 --seed 7

Aborts are sent around the step that ends their request: to the bare core, with up to three plans in flight, and to the
server under Trio, whose executor runs in its own task so that every interleaving can come. An abort may come together
with its request, twice, and in one message with others. The integer model says which tokens are right.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from functools import partial
from itertools import count

import trio

from engine.config import EngineConfig
from engine.executor.null import NullModelRunner
from engine.launch import _receive_all
from engine.outputs import FinishReason, RequestId
from engine.protocol import (
    AbortReason,
    AbortRequest,
    Acknowledge,
    ClientMessage,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    EngineStopped,
    Shutdown,
    StepsRead,
)
from engine.sampling_params import SamplingParams
from engine.server import EngineCoreServer
from engine.testing import Completion, CoreDriver, expected_tokens
from fuzz.same_task_executor import SameTaskExecutor

NUM_REQUESTS = 24
"""Of one history."""
MAX_TOKENS = 6
MAX_LATE = 5
"""How many acts or checkpoints after a request was sent its abort is, at most."""

Ends = Counter[FinishReason]


def race_in_core(draw: random.Random) -> Ends:
    """Play one history on a bare core; returns how its requests ended."""
    depth = draw.randint(1, 3)
    driver = CoreDriver.of(
        max_concurrent_plans=depth,
        max_num_seqs=draw.randint(2, 8),
        max_num_batched_tokens=16,
        num_gpu_blocks_override=draw.choice([8, 64]),
        block_size=4,
        max_model_len=28,
        checks_acts=False,
        runs_late=draw.random() < 0.5,
    )
    due: dict[int, list[str]] = {}
    names = [f"r{index}" for index in range(NUM_REQUESTS)]
    for now in count():
        if now < NUM_REQUESTS:
            name = names[now]
            driver.add(name, [65 + now] * draw.randint(1, 9), max_tokens=draw.randint(1, MAX_TOKENS))
            due.setdefault(now + draw.randint(0, 3 * MAX_LATE), []).append(name)
        if now in due:
            driver.abort(*due[now] * draw.randint(1, 2))
        if draw.random() < 0.7 and len(driver.plans) < depth:
            driver.plan()
        elif driver.plans:
            driver.finish_step()
        elif now > max(due) and not driver.core.has_work:
            break
        assert now < 2000, "the history does not end"
    assert driver.core.stats().num_used_blocks == 0
    limits = {name: driver.requests[RequestId(name)].sampling_params.max_tokens or 0 for name in names}
    expected = {name: driver.expected(name, limit) for name, limit in limits.items()}
    return _check({name: driver.completions[RequestId(name)] for name in names}, expected)


def _check(completions: dict[str, Completion], expected: dict[str, list[int]]) -> Ends:
    for name, completion in completions.items():
        reasons = [output.finish_reason for output in completion.outputs if output.finish_reason is not None]
        assert len(reasons) == 1, f"{name}: {len(reasons)} terminal outputs"
        assert completion.outputs[-1].finish_reason is not None, f"{name}: an output after the terminal one"
        tokens, wanted = completion.token_ids, expected[name]
        is_whole = completion.finish_reason is FinishReason.LENGTH
        assert tokens == (wanted if is_whole else wanted[: len(tokens)]), f"{name}: {tokens}, not {wanted}"
    return Counter(completion.finish_reason for completion in completions.values() if completion.finish_reason)


class _Client:
    """One client of bare messages."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        config = EngineConfig.of(model="null", max_num_seqs=draw.randint(2, 32), max_num_batched_tokens=64)
        self._draw = draw
        self._send, receive = trio.open_memory_channel[ClientMessage](float("inf"))
        self._completions: dict[str, Completion] = {}
        self._expected: dict[str, list[int]] = {}
        self._num_ended = 0
        self._all_ended = trio.Event()
        executor = SameTaskExecutor(partial(NullModelRunner, config, depth))
        self._server = EngineCoreServer(config, executor, partial(_receive_all, receive), self._take)

    def _take(self, message: EngineMessage) -> None:
        if isinstance(message, EngineStopped):
            self._send.send_nowait(Acknowledge())
        if isinstance(message, EngineCoreOutputs):
            if message.step:
                self._send.send_nowait(StepsRead(message.step))
            for output in message.outputs:
                completion = self._completions[output.request_id]
                completion.outputs.append(output)
                completion.token_ids += output.new_token_ids
                self._num_ended += output.finish_reason is not None
        if self._num_ended >= NUM_REQUESTS:
            self._all_ended.set()

    async def race(self) -> Ends:
        """Play one history."""
        with trio.fail_after(60):
            async with trio.open_nursery() as engine:
                engine.start_soon(self._server.run)
                async with trio.open_nursery() as requests:
                    for index in range(NUM_REQUESTS):
                        requests.start_soon(self._request, f"r{index}")
                await self._all_ended.wait()
                self._send.send_nowait(Shutdown())
        return _check(self._completions, self._expected)

    async def _request(self, name: str) -> None:
        prompt = [65 + self._draw.randrange(26) for _ in range(self._draw.randint(1, 9))]
        max_tokens = self._draw.randint(1, MAX_TOKENS)
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        self._completions[name] = Completion()
        self._expected[name] = expected_tokens(prompt, params, max_tokens)
        self._send.send_nowait(EngineCoreRequest(RequestId(name), name, prompt, params, 0.0))
        for _ in range(self._draw.randint(0, 8 * MAX_LATE)):
            await trio.lowlevel.checkpoint()
        for _ in range(self._draw.randint(1, 2)):
            others = self._draw.sample(list(self._completions), self._draw.randint(0, 1))
            request_ids = [RequestId(aborted) for aborted in [name, *others]]
            self._send.send_nowait(AbortRequest(request_ids, AbortReason.CLIENT))


def race_in_server(draw: random.Random) -> Ends:
    """Play one history on a server; returns how its requests ended."""

    async def play() -> Ends:
        return await _Client(draw, depth=draw.randint(1, 3)).race()

    return trio.run(play)


def races(num_races: int, seed: int, deadline: float = float("inf")) -> Ends:
    """Race at least that many aborts, half of them in the core, unless the monotonic time `deadline` comes before."""
    draw = random.Random(seed)
    ends: Ends = Counter()
    while ends.total() < num_races and time.monotonic() < deadline:
        ends += race_in_core(draw)
        ends += race_in_server(draw)
    return ends


def run(minutes: float, seed: int) -> int:
    """Race until the time is over; returns how many aborts raced.

    Raises:
        AssertionError: A request had no terminal output, or two, or something after it, or a wrong token.
    """
    deadline = time.monotonic() + 60 * minutes
    ends: Ends = Counter()
    for number in count(seed):
        if time.monotonic() >= deadline:
            break
        ends += races(5000, number, deadline)
        said = ", ".join(f"{num} by {reason}" for reason, num in sorted(ends.items()))
        print(f"races: {ends.total()} aborts raced with the end of their request ({said}), clean", flush=True)
    return ends.total()
