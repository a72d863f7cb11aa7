"""What the faces without an event loop share: outputs are kept here until they were handed over.

An interrupt (KeyboardInterrupt) may come between any two bytecodes of the caller's thread. So an output is stored in
one piece with its arrival (`InterruptsHeld`), and leaves `_outputs` by the very last thing that `get_output` does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from engine.client.client import EngineCoreClient
from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.outputs import RequestId
from engine.protocol import EngineCoreOutputs, EngineCoreRequest, EngineReady, Verb

STOP_TIMEOUT_S = 10.0
"""How long a stopped engine may take to end its step and say its last word."""


class SynchronousClient(EngineCoreClient):
    """A face for one thread whose calls wait themselves; a context manager that shuts the engine down.

    Attributes:
        death: What ended the engine, if something did; a shutdown too.
        has_stopped: Whether it ended as asked.
    """

    def __init__(self, config: EngineConfig, ready: EngineReady) -> None:
        """Start with nothing received."""
        super().__init__(config, ready)
        self.death: EngineDeadError | None = None
        self.has_stopped = False
        self._outputs: deque[EngineCoreOutputs] = deque()

    def __enter__(self) -> Self:
        """Give the face itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Shut the engine down; what goes wrong meanwhile is raised only where the body ended well."""
        try:
            self.shutdown()
        except EngineDeadError:
            if error is None:
                raise

    def get_output(self) -> EngineCoreOutputs | None:
        """Wait for the next outputs; None once the engine has stopped as asked and all were returned.

        A call that is interrupted has returned nothing and lost nothing: what it would have returned comes next.

        Raises:
            EngineDeadError: The engine died, and all outputs before were returned.
        """
        message = self.peek_output()
        if message is None:
            return None
        live = self._live_after(message)
        # From here to the caller's assignment Python runs no signal handler: it does so at calls and jumps back.
        self._live = live
        if message.scheduler_stats is not None:
            self._stats = message.scheduler_stats
        del self._outputs[0]
        return message

    def peek_output(self) -> EngineCoreOutputs | None:
        """Wait for the next outputs as `get_output` does, and leave them there until `drop_output`."""
        while not self._outputs:
            if self.death is not None:
                self._live.clear()
                if self.has_stopped:
                    return None
                raise self.death
            self._advance()
        return self._outputs[0]

    def drop_output(self) -> None:
        """Count what `peek_output` returned as handed over."""
        self._settle(self._outputs.popleft())

    def prepare_request(self, request: EngineCoreRequest) -> Callable[[], None]:
        """Do what takes time before `request` can be added; return what adds it, as `add_request` does, at once."""
        return partial(self.add_request, request)

    @abstractmethod
    def call(self, verb: Verb, timeout_s: float | None = None) -> Any:
        """Ask for a verb and wait for its answer, at most `timeout_s` or what the verb says.

        Raises:
            UtilityError: The verb failed, alone.
            UtilityTimeout: There was no answer in time.
            EngineDeadError: The engine died before it answered.
            TypeError, ValueError: `verb` is none, or `timeout_s` is negative.
        """

    @abstractmethod
    def shutdown(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the engine and free all it has; every live request gets its terminal output first. Idempotent.

        Raises:
            EngineDeadError: It died meanwhile, or did not stop within `timeout_s` and was killed.
        """

    def _live_after(self, message: EngineCoreOutputs) -> set[RequestId]:
        ended = {output.request_id for output in message.outputs if output.finish_reason is not None}
        return self._live - ended if ended else self._live

    @abstractmethod
    def _advance(self) -> None:
        """Do or wait for something that may bring an output; raises EngineDeadError."""
