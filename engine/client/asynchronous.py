"""The face of an engine behind channels, for Trio: the engine may be a child process or a task of this process.

The client cannot tell which: it is given a `Connection` and never asks. One task receives (`get_output` in a loop);
any task may send, for sending never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

import trio

from engine.client.client import EngineCoreClient
from engine.config import EngineConfig
from engine.errors import Cause, EngineDeadError, UtilityError, UtilityTimeout
from engine.outputs import RequestId
from engine.protocol import (
    AbortReason,
    AbortRequest,
    Acknowledge,
    ClientMessage,
    Drain,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineMessage,
    EngineReady,
    EngineStopped,
    Shutdown,
    UtilityCall,
    UtilityResult,
)
from engine.verbs import STOPPING, Verb, value_of


class Connection(Protocol):
    """Both directions to one engine, and the knowledge that it died."""

    def send(self, message: ClientMessage) -> None:
        """Send without waiting; what a dead engine would have got is dropped."""

    async def receive(self) -> list[EngineMessage]:
        """Wait for at least one message and return all that wait; a cancelled call took none.

        Raises:
            EngineDeadError: The engine died and all it said has been returned.
        """


class AsyncMPClient(EngineCoreClient):
    """Sends requests and receives outputs over a connection; single-threaded, under Trio."""

    def __init__(self, config: EngineConfig, ready: EngineReady, connection: Connection) -> None:
        """Use `connection`, which whoever opened it closes."""
        super().__init__(config, ready)
        self.death: EngineDeadError | None = None
        self.has_stopped = False
        self._connection = connection
        self._received: deque[EngineMessage] = deque()
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0
        self._is_stopping = False
        self._takes_nothing = False

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send `request`; raises QueueFull or EngineDeadError, and then nothing was sent."""
        if self.death is not None:
            raise self.death
        self._admit(request)
        try:
            self._connection.send(request)
        except BaseException:
            self._live.discard(request.request_id)  # nothing was sent, so no terminal output will come
            raise

    def abort_requests(self, request_ids: Iterable[RequestId], reason: AbortReason) -> None:
        """Send an abort for those of the ids that are live."""
        live = [request_id for request_id in request_ids if request_id in self._live]
        if live and self.death is None:
            self._connection.send(AbortRequest(live, reason))

    async def get_output(self) -> EngineCoreOutputs | None:
        """Wait for the next outputs; None once the engine has stopped as asked. For one task only.

        Raises:
            EngineDeadError: The engine died; every live request and waiting call has ended with it.
        """
        while True:
            while self._received:
                message = self._received.popleft()
                if isinstance(message, EngineCoreOutputs):
                    self._settle(message)
                    self._answer(message.utility_results)
                    return message
                if isinstance(message, EngineStopped):
                    self._connection.send(Acknowledge())
                    if self._is_stopping:
                        self.has_stopped = True
                        self.declare_dead(EngineDeadError(Cause("EngineStopped", "the engine was shut down")))
                        return None
                    self._raise_death(EngineDeadError(Cause("EngineStopped", "the engine stopped without being asked")))
                if isinstance(message, EngineDead):
                    self._connection.send(Acknowledge())
                    self._raise_death(EngineDeadError(message.cause))
            try:
                self._received.extend(await self._connection.receive())
            except EngineDeadError as death:
                self._raise_death(death)

    async def call(self, verb: Verb, timeout_s: float | None = None) -> Any:
        """Ask for a verb and wait for its answer, at most `timeout_s`; by default as long as the verb's class says.

        A cancelled waiter leaves the verb to run, as one whose time is over does.

        Raises:
            UtilityError: The verb failed, alone; `cause` says whose fault, EngineStopping where nothing is taken.
            UtilityTimeout: There was no answer in time.
            EngineDeadError: The engine died before it answered.
        """
        if self.death is not None:
            raise self.death
        if self._takes_nothing:
            raise UtilityError(type(verb).__name__, STOPPING)
        timeout_s = verb.timeout_s if timeout_s is None else timeout_s
        self._num_calls += 1
        call_id = self._num_calls
        call = self._calls[call_id] = _Call(verb)
        try:
            self._connection.send(UtilityCall(call_id, verb))
            with trio.move_on_after(timeout_s):
                await call.answered.wait()
        finally:
            del self._calls[call_id]
        if call.result is not None:
            return value_of(verb, call.result.value, call.result.failure)
        if self.death is not None:
            raise self.death
        raise UtilityTimeout(type(verb).__name__, timeout_s)

    @property
    def waiting_calls(self) -> list[str]:
        """The verbs that wait for their answer."""
        return [type(call.verb).__name__ for call in self._calls.values()]

    def drain(self) -> None:
        """Take no verbs any more, and let what was accepted run, also where it is paused or asleep. Does not wait."""
        self._takes_nothing = True
        if self.death is None:
            self._connection.send(Drain())

    def shutdown(self) -> None:
        """Ask the engine to stop; `get_output` returns None once it has. Does not wait."""
        self._is_stopping = self._takes_nothing = True
        if self.death is None:
            self._connection.send(Shutdown())

    def _answer(self, results: list[UtilityResult]) -> None:
        for result in results:
            call = self._calls.get(result.call_id)
            if call is not None:  # a waiter that was cancelled is gone
                call.result = result
                call.answered.set()

    def declare_dead(self, death: EngineDeadError) -> None:
        """Count the engine as dead: every live request and waiting call has ended with `death`."""
        self.death = death
        self._live.clear()
        for call in self._calls.values():
            call.answered.set()

    def _raise_death(self, death: EngineDeadError) -> NoReturn:
        self.declare_dead(death)
        raise death


class _Call:
    """One waiting utility call."""

    def __init__(self, verb: Verb) -> None:
        self.verb = verb
        self.answered = trio.Event()
        self.result: UtilityResult | None = None
