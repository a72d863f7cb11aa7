"""The face of an engine in a process of its own for a caller without an event loop: no task, no thread, no Trio.

Every wait is one poll in the caller's thread, on the output socket and on the engine's end. Ctrl-C may come at any
time: it interrupts the wait, and no output is lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from engine.client.blocking_connection import BlockingConnection
from engine.client.interrupts import InterruptsHeld
from engine.client.synchronous import STOP_TIMEOUT_S, SynchronousClient
from engine.config import EngineConfig
from engine.errors import Cause, EngineDeadError, UtilityError, UtilityTimeout, startup_error
from engine.executor.base import Progress
from engine.handshake import TERM_GRACE_S
from engine.outputs import RequestId
from engine.protocol import (
    MAX_STEPS_AHEAD,
    AbortReason,
    AbortRequest,
    Acknowledge,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineMessage,
    EngineReady,
    EngineStopped,
    SessionPart,
    Shutdown,
    StartProgress,
    StepsRead,
    UtilityCall,
    UtilityResult,
)
from engine.verbs import UNSENDABLE, Verb, check_call, value_of


class SyncMPClient(SynchronousClient):
    """Owns an engine process; for the main thread, with whose end the engine would die."""

    def __init__(self, config: EngineConfig, progress: Progress, *, engine_index: int = 0) -> None:
        """Start an engine and wait until it is ready; `progress` gets the phases. What fails leaves nothing.

        Raises:
            ConfigError, ModelError: The engine cannot be started as `config` asks.
            EngineDeadError: It died while starting; the cause names the phase.
            RuntimeError: Not called from the main thread.
        """
        self._connection = connection = BlockingConnection(engine_index)
        self._answers: dict[int, UtilityResult | None] = {}
        self._num_calls = 0
        self._told_step = 0
        self._is_stopping = False
        try:
            connection.open(config)
            ready = self._wait_ready(progress)
        except BaseException:
            connection.close()
            raise
        super().__init__(config, ready)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send `request`; raises QueueFull or EngineDeadError, and then nothing was sent."""
        if self.death is not None:
            raise self.death
        with InterruptsHeld():
            self._admit(request)
            try:
                self._connection.send(request)
            except BaseException:
                self._live.discard(request.request_id)  # nothing was sent, so no terminal output will come
                raise

    def extend(self, part: SessionPart) -> None:
        """Send a session's next part; raises EngineDeadError."""
        if self.death is not None:
            raise self.death
        if part.request_id in self._live:
            with InterruptsHeld():
                self._connection.send(part)

    def abort_requests(self, request_ids: Iterable[RequestId], reason: AbortReason) -> None:
        """Send an abort for those of the ids that are live."""
        live = [request_id for request_id in request_ids if request_id in self._live]
        if live and self.death is None:
            with InterruptsHeld():
                self._connection.send(AbortRequest(live, reason))

    def call(self, verb: Verb, timeout_s: float | None = None) -> Any:
        """See `SynchronousClient.call`; outputs that come meanwhile are kept for `get_output`."""
        check_call(verb, timeout_s)
        if self.death is not None:
            raise self.death
        timeout_s = verb.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        self._num_calls += 1
        call_id = self._num_calls
        self._answers[call_id] = None
        try:
            try:
                with InterruptsHeld():
                    self._connection.send(UtilityCall(call_id, verb))
            except UNSENDABLE as error:
                raise UtilityError(type(verb).__name__, Cause.of(error)) from error
            while (result := self._answers[call_id]) is None:
                if self.death is not None:
                    raise self.death
                if not self._receive(deadline_s):
                    raise UtilityTimeout(type(verb).__name__, timeout_s)
        finally:
            self._answers.pop(call_id, None)
        return value_of(verb, result.value, result.failure)

    def shutdown(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """See `SynchronousClient.shutdown`; interrupted, it kills the engine."""
        if self.death is not None:
            self._connection.close()
            return
        stuck = EngineDeadError(Cause("EngineStuck", f"the engine did not stop within {timeout_s:g} seconds"))
        try:
            self._stop(time.monotonic() + timeout_s)
        finally:
            death = self.death or stuck
            self._end(death)
            self._connection.close()
        if not self.has_stopped:
            raise death

    def _stop(self, deadline_s: float) -> None:
        """Ask the engine to stop, take its last words and wait for its end."""
        self._is_stopping = True
        with InterruptsHeld():
            self._connection.send(Shutdown())
        while self.death is None:
            if not self._receive(deadline_s):
                return
        self._connection.wait_exit(TERM_GRACE_S)

    def _wait_ready(self, progress: Progress) -> EngineReady:
        """Follow the engine's start to READY; raises what stopped it."""
        while True:
            self._connection.wait()
            for message in self._connection.take():
                match message:
                    case StartProgress(phase, done, total):
                        self._connection.phase = f"{phase} {done}/{total}" if total else phase
                        progress(phase, done, total)
                    case EngineReady():
                        self._connection.phase = ""
                        return message
                    case EngineDead(cause):
                        self._connection.send(Acknowledge())
                        self._connection.wait_exit(TERM_GRACE_S)
                        raise startup_error(cause)
                    case _:
                        raise EngineDeadError(Cause("ProtocolError", f"unexpected {type(message).__name__} at start"))

    def _advance(self) -> None:
        self._receive(math.inf)

    def _receive(self, deadline_s: float) -> bool:
        """Wait for messages and take them in; False at the deadline. Interrupted, it has taken none."""
        try:
            if not self._connection.wait(deadline_s):
                return False
            with InterruptsHeld():
                for message in self._connection.take():
                    self._take_in(message)
        except EngineDeadError as death:
            self._end(death)
        return True

    def _take_in(self, message: EngineMessage) -> None:
        match message:
            case EngineCoreOutputs():
                for result in message.utility_results:
                    if result.call_id in self._answers:  # else nobody waits for it any more
                        self._answers[result.call_id] = result
                self._outputs.append(message)
                if message.step >= self._told_step + MAX_STEPS_AHEAD // 2:  # kept here, so as good as read
                    self._told_step = message.step
                    self._connection.send(StepsRead(message.step))
            case EngineStopped():
                self._connection.send(Acknowledge())
                self.has_stopped = self._is_stopping
                how = "was shut down" if self._is_stopping else "stopped without being asked"
                self._end(EngineDeadError(Cause("EngineStopped", f"the engine {how}")))
            case EngineDead(cause):
                self._connection.send(Acknowledge())
                self._end(EngineDeadError(cause))

    def _end(self, death: EngineDeadError) -> None:
        """Count the engine as ended, by its first death: whoever calls learns why, readers after all that had come."""
        self.death = self.death or death
