"""The face of an engine behind channels, for Trio: the engine may be a child process or a task of this process.

The client cannot tell which: it is given a `Connection` and never asks. One task receives (`get_output` in a loop);
any task may send, for sending never waits. A connection may lead to several engines (data_parallel.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

import trio

from engine.client.client import EngineCoreClient
from engine.config import EngineConfig
from engine.errors import Cause, EngineDeadError, UtilityError, UtilityTimeout
from engine.outputs import RequestId
from engine.protocol import (
    MAX_STEPS_AHEAD,
    AbortReason,
    AbortRequest,
    ClientMessage,
    Drain,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineMessage,
    EngineReady,
    EngineStopped,
    SessionPart,
    Shutdown,
    StepsRead,
    UtilityCall,
    UtilityResult,
)
from engine.verbs import STOPPING, UNSENDABLE, Verb, check_call, value_of


class Connection(Protocol):
    """Both directions to engines, by rank, and the knowledge that one of them died."""

    def send(self, message: ClientMessage, engine_index: int = 0) -> None:
        """Send without waiting; what a dead engine would have got is dropped."""

    def part(self, engine_index: int = 0) -> None:
        """Acknowledge an engine's last word: it may exit, and its end is no death any more."""

    def kill(self, engine_index: int = 0) -> None:
        """End an engine that is stuck at once, if it has a process; does not wait. Its end is no death any more."""

    async def receive(self) -> list[EngineMessage]:
        """Wait for at least one message and return all that wait; a cancelled call took none.

        Raises:
            EngineDeadError: An engine died and all it said has been returned.
        """


class AsyncMPClient(EngineCoreClient):
    """Sends requests and receives outputs over a connection; single-threaded, under Trio.

    Attributes:
        death: What ended the engine, if something did.
        has_stopped: Whether it ended as asked.
    """

    def __init__(self, config: EngineConfig, ready: EngineReady, connection: Connection) -> None:
        """Use `connection`, which whoever opened it closes, to the engine that said `ready`."""
        super().__init__(config, ready)
        self.death: EngineDeadError | None = None
        self.has_stopped = False
        self._connection = connection
        self._received: deque[EngineMessage] = deque()
        self._told_step = 0
        self._aborts: dict[AbortReason, list[RequestId]] = {}
        self._gathers_aborts = False
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
            self._send(request)
        except BaseException:
            self._live.discard(request.request_id)  # nothing was sent, so no terminal output will come
            raise

    def extend(self, part: SessionPart) -> None:
        """Send a session's next part; raises EngineDeadError."""
        if self.death is not None:
            raise self.death
        if part.request_id in self._live:
            self._send(part)

    def abort_requests(self, request_ids: Iterable[RequestId], reason: AbortReason) -> None:
        """Send an abort for those of the ids that are live; those that follow at this moment go in one message."""
        live = [request_id for request_id in request_ids if request_id in self._live]
        if not live or self.death is not None:
            return
        self._aborts.setdefault(reason, []).extend(live)
        if not self._gathers_aborts:
            self._gathers_aborts = True
            trio.lowlevel.current_trio_token().run_sync_soon(self._send_gathered)
            self._send_aborts()

    async def get_output(self) -> EngineCoreOutputs | None:
        """Wait for the next outputs; None once the engine has stopped as asked. For one task only.

        Raises:
            EngineDeadError: The engine died; every live request and waiting call has ended with it.
        """
        try:
            while not self.has_stopped:
                if not self._received:
                    self._received.extend(await self._connection.receive())
                outputs = self.take(self._received.popleft())
                if outputs is not None:
                    return outputs
        except EngineDeadError as death:
            self.declare_dead(death)
            if self.death is not None and self.death is not death:
                raise self.death from death
            raise
        return None

    def take(self, message: EngineMessage) -> EngineCoreOutputs | None:
        """Act on `message` and return it if it holds outputs.

        Raises:
            EngineDeadError: It was the last word of an engine that was not asked to end, or was given up before.
        """
        match message:
            case EngineCoreOutputs():
                self._tell_read(message.step)
                self._settle(message)
                self._answer(message.utility_results)
                return message
            case EngineStopped():
                self._connection.part(self.ready.engine_index)
                if self.death is not None:  # it was given up, and speaks too late
                    raise self.death
                if not self._is_stopping:
                    raise EngineDeadError(Cause("EngineStopped", "the engine stopped without being asked"))
                self.has_stopped = True
                self.declare_dead(EngineDeadError(Cause("EngineStopped", "the engine was shut down")))
            case EngineDead(cause):
                self._connection.part(self.ready.engine_index)
                raise EngineDeadError(cause)
        return None

    async def call(self, verb: Verb, timeout_s: float | None = None) -> Any:
        """Ask for a verb and wait for its answer, at most `timeout_s`; by default as long as the verb's class says.

        A cancelled waiter leaves the verb to run, as one whose time is over does.

        Raises:
            UtilityError: The verb failed, alone; `cause` says whose fault, EngineStopping where nothing is taken.
            UtilityTimeout: There was no answer in time.
            EngineDeadError: The engine died before it answered.
            TypeError, ValueError: `verb` is none, or `timeout_s` is negative.
        """
        check_call(verb, timeout_s)
        if self.death is not None:
            raise self.death
        if self._takes_nothing:
            raise UtilityError(type(verb).__name__, STOPPING)
        timeout_s = verb.timeout_s if timeout_s is None else timeout_s
        self._num_calls += 1
        call_id = self._num_calls
        call = self._calls[call_id] = _Call(verb)
        try:
            self._send(UtilityCall(call_id, verb))
        except UNSENDABLE as error:
            del self._calls[call_id]
            raise UtilityError(type(verb).__name__, Cause.of(error)) from error
        try:
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
            self._send(Drain())

    def shutdown(self) -> None:
        """Ask the engine to stop; `get_output` returns None once it has. Does not wait."""
        self._is_stopping = self._takes_nothing = True
        if self.death is None:
            self._send(Shutdown())

    def kill_engines(self, which: Callable[[AsyncMPClient], bool]) -> None:
        """End at once the engines that `which` holds of, which are stuck. Does not wait."""
        for engine in self.engines:
            assert isinstance(engine, AsyncMPClient)
            if which(engine):
                self._connection.kill(engine.ready.engine_index)

    def name_engines(self, which: Callable[[AsyncMPClient], bool]) -> str:
        """Say for a message which engines `which` holds of."""
        return "the engine"

    def _tell_read(self, step: int) -> None:
        """Let the engine go on: its outputs are read up to this step."""
        if step >= self._told_step + MAX_STEPS_AHEAD // 2:
            self._told_step = step
            self._connection.send(StepsRead(step), self.ready.engine_index)

    def _send(self, message: ClientMessage) -> None:
        """Send `message` after the aborts that were asked for before it."""
        self._send_aborts()
        self._connection.send(message, self.ready.engine_index)

    def _send_gathered(self) -> None:
        self._gathers_aborts = False
        self._send_aborts()

    def _send_aborts(self) -> None:
        aborts, self._aborts = self._aborts, {}
        if self.death is None:
            with suppress(trio.ClosedResourceError):  # whoever opened the connection may have left it since
                for reason, request_ids in aborts.items():
                    self._connection.send(AbortRequest(request_ids, reason), self.ready.engine_index)

    def _answer(self, results: list[UtilityResult]) -> None:
        for result in results:
            call = self._calls.get(result.call_id)
            if call is not None:  # a waiter that was cancelled is gone
                call.result = result
                call.answered.set()

    def declare_dead(self, death: EngineDeadError) -> None:
        """Count the engine as dead: every live request and waiting call has ended, with its first death."""
        self.death = self.death or death
        self._live.clear()
        for call in self._calls.values():
            call.answered.set()


class _Call:
    """One waiting utility call."""

    def __init__(self, verb: Verb) -> None:
        self.verb = verb
        self.answered = trio.Event()
        self.result: UtilityResult | None = None
