"""The face of several engines that share the requests: data parallelism, under Trio.

Each engine has the whole model and knows nothing of the others. All stand behind one connection, so that one task
receives for all of them, and nothing that is sent to one waits for another. They live and die together: the death of
one is the death of the face, and every stream and waiter learns of it at once, whichever engine had it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import trio

from engine.client.asynchronous import AsyncMPClient, Connection
from engine.config import EngineConfig
from engine.errors import EngineDeadError, UtilityError, UtilityTimeout
from engine.handshake import check_sender
from engine.metrics import SchedulerStats
from engine.outputs import RequestId
from engine.protocol import AbortReason, EngineCoreOutputs, EngineCoreRequest, EngineMessage, EngineReady, SessionPart
from engine.verbs import SaveShardedState, Verb, check_call


class LeastInFlight:
    """The engine with the fewest requests in flight is next; among equals they take turns."""

    def __init__(self) -> None:
        """Begin with the first engine."""
        self._turn = 0

    def choose(self, num_in_flight: Sequence[int]) -> int:
        """Return the rank for one more request, given how many each engine has."""
        num_engines = len(num_in_flight)
        in_turn = [(self._turn + i) % num_engines for i in range(num_engines)]
        rank = min(in_turn, key=num_in_flight.__getitem__)
        self._turn = (rank + 1) % num_engines
        return rank


class DPAsyncMPClient(AsyncMPClient):
    """Joins the faces of single engines: each keeps the count of its own requests, calls and statistics."""

    def __init__(self, config: EngineConfig, readies: Sequence[EngineReady], connection: Connection) -> None:
        """Use `connection`, which whoever opened it closes, to the engines that said `readies`, one a rank."""
        in_order = sorted(readies, key=lambda ready: ready.engine_index)
        smallest = min(in_order, key=lambda ready: ready.num_kv_blocks)
        super().__init__(config, msgspec.structs.replace(in_order[0], num_kv_blocks=smallest.num_kv_blocks), connection)
        self._engines = [AsyncMPClient(config, ready, connection) for ready in in_order]
        self._routing = LeastInFlight()

    @property
    def engines(self) -> Sequence[AsyncMPClient]:
        """The faces of the single engines, by rank."""
        return self._engines

    @property
    def stats(self) -> SchedulerStats:
        """The state of all schedulers as if they were one, as of the last messages."""
        return SchedulerStats.sum(engine.stats for engine in self._engines)

    @property
    def num_live(self) -> int:
        """Requests whose terminal output has not come yet, on all engines."""
        return sum(engine.num_live for engine in self._engines)

    @property
    def max_num_live(self) -> int:
        """Most requests that may be live on all engines together."""
        return sum(engine.max_num_live for engine in self._engines)

    def check_room(self, num_requests: int, data_parallel_rank: int | None = None) -> None:
        """Refuse what the engines together, or the one that is asked for, could not take whole; raises as the base."""
        self._check_rank(data_parallel_rank)
        if data_parallel_rank is None:
            super().check_room(num_requests)
        else:
            self._engines[data_parallel_rank].check_room(num_requests)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send `request` to the engine it asks for, else to the one whose turn it is; raises as the base."""
        rank = request.data_parallel_rank
        self.check_room(1, rank)
        if rank is None:
            rank = self._routing.choose([engine.num_live for engine in self._engines])
        self._engines[rank].add_request(request)

    def extend(self, part: SessionPart) -> None:
        """Send a session's next part to the engine that has it; raises EngineDeadError."""
        for engine in self._engines:
            engine.extend(part)

    def abort_requests(self, request_ids: Iterable[RequestId], reason: AbortReason) -> None:
        """Send an abort for each of the ids that is live to the engine that has it."""
        request_ids = list(request_ids)
        for engine in self._engines:
            engine.abort_requests(request_ids, reason)

    def take(self, message: EngineMessage) -> EngineCoreOutputs | None:
        """Have the engine's own face act on `message`; all have stopped when the last one has.

        Raises:
            EngineDeadError: As the base; or there is no such engine.
        """
        check_sender(message, len(self._engines))
        engine = self._engines[message.engine_index]
        try:
            outputs = engine.take(message)
        except EngineDeadError as death:
            raise EngineDeadError(death.cause.at(f"engine {message.engine_index}")) from None
        if engine.has_stopped and all(engine.has_stopped for engine in self._engines):
            self.has_stopped = True
            self.death = self.death or engine.death
        return outputs

    async def call(self, verb: Verb, timeout_s: float | None = None) -> Any:
        """Ask every engine for `verb` and wait for all answers; returns one result, see `join` of its class.

        The model is saved by the first engine alone, for all have the same.

        Raises:
            UtilityError: The verb failed in the engines that are named; those that are not have done it.
            UtilityTimeout: That it took too long is all that failed.
            EngineDeadError: An engine died before it answered.
            TypeError, ValueError: `verb` is none, or `timeout_s` is negative.
        """
        check_call(verb, timeout_s)
        if isinstance(verb, SaveShardedState):
            return await self._engines[0].call(verb, timeout_s)
        results: dict[int, Any] = {}
        failures: dict[int, UtilityError] = {}
        deaths: list[EngineDeadError] = []

        async def ask(rank: int) -> None:
            try:
                results[rank] = await self._engines[rank].call(verb, timeout_s)
            except UtilityError as failure:
                failures[rank] = failure
            except EngineDeadError as death:
                deaths.append(death)

        async with trio.open_nursery() as nursery:
            for rank in range(len(self._engines)):
                nursery.start_soon(ask, rank)
        if deaths:
            raise deaths[0]
        if failures:
            raise _failure(verb, failures)
        return type(verb).join([results[rank] for rank in range(len(self._engines))])

    @property
    def waiting_calls(self) -> list[str]:
        """The verbs that wait for an engine's answer."""
        return [f"{verb} (engine {rank})" for rank, engine in enumerate(self._engines) for verb in engine.waiting_calls]

    def drain(self) -> None:
        """Have every engine take no verbs any more and run what was accepted. Does not wait."""
        for engine in self._engines:
            engine.drain()

    def shutdown(self) -> None:
        """Ask every engine to stop; `get_output` returns None once all have. Does not wait."""
        for engine in self._engines:
            engine.shutdown()

    def declare_dead(self, death: EngineDeadError) -> None:
        """Count all engines as dead: every live request and waiting call has ended with `death`."""
        super().declare_dead(death)
        for engine in self._engines:
            engine.declare_dead(death)

    def name_engines(self, which: Callable[[AsyncMPClient], bool]) -> str:
        """Say for a message which engines `which` holds of."""
        ranks = [str(engine.ready.engine_index) for engine in self._engines if which(engine)]
        return f"engine{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"

    @property
    def _where(self) -> str:
        return f", on each of {len(self._engines)} engines"


def _failure(verb: Verb, failures: Mapping[int, UtilityError]) -> UtilityError:
    """Return one failure that tells those of the engines in `failures`, by rank."""
    name = type(verb).__name__
    first, *others = (failures[rank].cause.at(f"engine {rank}") for rank in sorted(failures))
    message = "; ".join([first.message, *(f"{other.type}: {other.message}" for other in others)])
    cause = msgspec.structs.replace(first, message=message, causes=(*first.causes, *others))
    timeouts = [failure.timeout_s for failure in failures.values() if isinstance(failure, UtilityTimeout)]
    if len(timeouts) == len(failures):
        return UtilityTimeout(name, timeouts[0], cause)
    return UtilityError(name, cause)
