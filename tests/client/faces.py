"""The faces of an engine behind one interface, for what is asked of all of them; a further face is a row of `FACES`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, NamedTuple, Protocol

import trio

from engine.client.asynchronous import AsyncMPClient
from engine.client.client import EngineCoreClient
from engine.client.data_parallel import DPAsyncMPClient
from engine.client.synchronous import SynchronousClient
from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.launch import make_client
from engine.outputs import FinishReason, RequestId
from engine.protocol import (
    EngineCoreOutputs,
    EngineCoreRequest,
)
from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens
from engine.verbs import (
    Verb,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=4000)
_numbers = itertools.count()


# -- adapters ----------------------------------------------------------------------------------------------------------


class Face(Protocol):
    """What the behaviours need of a face; only waiting looks different from face to face."""

    client: EngineCoreClient

    async def message(self) -> EngineCoreOutputs | None:
        """Wait for the next outputs; None once the engine has stopped."""

    async def call(self, verb: Verb, timeout_s: float | None = None) -> Any:
        """Ask for a verb and wait for its answer."""

    async def shutdown(self) -> None:
        """Stop the engine; what it still says is read by `message`."""


class PlainFace:
    """A face without Trio: its calls block, and nothing else runs here meanwhile."""

    def __init__(self, client: SynchronousClient) -> None:
        self.client = client

    async def message(self) -> EngineCoreOutputs | None:
        await trio.lowlevel.checkpoint()
        return self.client.get_output()

    async def call(self, verb: Verb, timeout_s: float | None = None) -> Any:
        await trio.lowlevel.checkpoint()
        return self.client.call(verb, timeout_s)

    async def shutdown(self) -> None:
        await trio.lowlevel.checkpoint()
        self.client.shutdown()


class TrioFace:
    """A face under Trio: somebody must receive while a call waits."""

    def __init__(self, client: AsyncMPClient) -> None:
        self.client = client
        self._kept: deque[EngineCoreOutputs] = deque()

    async def message(self) -> EngineCoreOutputs | None:
        return self._kept.popleft() if self._kept else await self.client.get_output()

    async def call(self, verb: Verb, timeout_s: float | None = None) -> Any:
        answer, error = None, None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive)
            try:
                answer = await self.client.call(verb, timeout_s)
            except Exception as raised:
                error = raised
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error
        return answer

    async def shutdown(self) -> None:
        self.client.shutdown()
        await trio.lowlevel.checkpoint()

    async def _receive(self) -> None:
        with suppress(EngineDeadError):
            while (message := await self.client.get_output()) is not None:
                self._kept.append(message)


class AlwaysTheLast:
    """A routing rule under which one of several engines behaves like one alone."""

    def choose(self, num_in_flight: Sequence[int]) -> int:
        return len(num_in_flight) - 1


class FaceKind(NamedTuple):
    """A row of `FACES`: how `make_client` is asked for it, and whether its engine can be killed."""

    isolation: str
    is_async: bool
    num_engines: int = 1

    @property
    def has_process(self) -> bool:
        return self.isolation == "process"

    @asynccontextmanager
    async def open(self, **settings: Any) -> AsyncIterator[Face]:
        settings |= {"data_parallel_size": self.num_engines}
        config = EngineConfig(model="null", prefix_hash_seed="x", log_level="error", **settings)
        made = make_client(config, isolation=self.isolation, trio=self.is_async)
        if isinstance(made, SynchronousClient):
            with made:
                yield PlainFace(made)
            return
        async with made as client:
            if isinstance(client, DPAsyncMPClient):  # each behaviour at one engine beside others
                client._routing = AlwaysTheLast()
            face = TrioFace(client)
            try:
                yield face
            finally:
                with trio.CancelScope(shield=True):
                    client.shutdown()
                    await face._receive()


FACES = {
    "InprocClient": FaceKind("none", False),
    "SyncMPClient": FaceKind("process", False),
    "AsyncMPClient-process": FaceKind("process", True),
    "AsyncMPClient-channels": FaceKind("thread", True),
    "DPAsyncMPClient": FaceKind("process", True, num_engines=2),
}
Open = Callable[..., AbstractAsyncContextManager[Face]]


# -- what is asked, and what came ------------------------------------------------------------------------------------


def request(prompt: list[int], params: SamplingParams = GREEDY, label: str = "r") -> EngineCoreRequest:
    return EngineCoreRequest(RequestId(f"{label}-0.{next(_numbers)}"), label, prompt, params, 0.0)


class Log:
    """All that a face said of requests; a token or a word after the last one fails at once."""

    def __init__(self, face: Face) -> None:
        self.tokens: dict[RequestId, list[int]] = {}
        self.ends: dict[RequestId, FinishReason] = {}
        self._face = face

    async def read(self) -> bool:
        message = await self._face.message()
        if message is None:
            return False
        for output in message.outputs:
            assert output.request_id not in self.ends, "an output after the terminal one"
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason
        return True

    async def read_until(self, reached: Callable[[], bool]) -> None:
        with trio.fail_after(30):
            while not reached():
                assert await self.read()

    async def until_ended(self, *asked: EngineCoreRequest) -> list[FinishReason]:
        await self.read_until(lambda: all(each.request_id in self.ends for each in asked))
        return [self.ends[each.request_id] for each in asked]

    async def until_tokens(self, asked: EngineCoreRequest, number: int = 1) -> None:
        await self.read_until(lambda: len(self.tokens.get(asked.request_id, [])) >= number)

    def has_right_tokens(self, asked: EngineCoreRequest) -> bool:
        """Whether the tokens are the definition's, as far as they go."""
        tokens = self.tokens.get(asked.request_id, [])
        return tokens == expected_tokens(asked.prompt_token_ids, asked.sampling_params, len(tokens))


async def assert_idle_and_well(face: Face, log: Log) -> None:
    """Nothing lives, no block is held, and the next request gets its exact tokens."""
    after = request([77] * 9)
    face.client.add_request(after)
    assert await log.until_ended(after) == [FinishReason.LENGTH]
    assert log.tokens[after.request_id] == expected_tokens([77] * 9, GREEDY, 12)
    assert face.client.num_live == 0
    stats = face.client.stats
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
