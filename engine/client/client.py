"""What every face of an engine shares: admission, the count of live requests, the latest statistics.

A request is live from `add_request` to its terminal output, or to the engine's death; on nothing else does the count
end. The faces say how messages travel: `InprocClient` calls the core, `AsyncMPClient` sends over channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from engine.config import EngineConfig
from engine.errors import InvalidRequest, QueueFull
from engine.metrics import SchedulerStats
from engine.outputs import RequestId
from engine.protocol import AbortReason, EngineCoreOutputs, EngineCoreRequest, EngineReady


class EngineCoreClient(ABC):
    """A face of one engine. Tokens in, tokens out; text is the business of the shells above."""

    def __init__(self, config: EngineConfig, ready: EngineReady) -> None:
        """Remember the engine's settings and what it said when it was ready."""
        self.config = config
        self.ready = ready
        self.stats = SchedulerStats(num_kv_blocks=ready.num_kv_blocks)
        self._live: set[RequestId] = set()

    @property
    def num_live(self) -> int:
        """Requests whose terminal output has not come yet."""
        return len(self._live)

    @property
    def max_num_live(self) -> int:
        """Most requests that may be live: those that run and those that may wait."""
        return self.config.max_num_seqs + self.config.max_num_waiting

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand `request` to the engine, without waiting.

        Raises:
            QueueFull: As many requests are live as may be; nothing was sent.
            EngineDeadError: The engine has ended.
        """

    @abstractmethod
    def abort_requests(self, request_ids: Iterable[RequestId], reason: AbortReason) -> None:
        """Ask for the end of live requests, without waiting; ended or unknown ids are ignored."""

    def check_room(self, num_requests: int) -> None:
        """Refuse before anything is sent what could not be sent whole.

        Raises:
            InvalidRequest: So many requests may never be live at once.
            QueueFull: So many are too many now.
        """
        limits = f"(--max-num-seqs {self.config.max_num_seqs} + --max-num-waiting {self.config.max_num_waiting})"
        if num_requests > self.max_num_live:
            raise InvalidRequest(
                f"{num_requests} completions are asked for, and at most {self.max_num_live} may run or wait {limits}: "
                "ask for fewer",
                param="n",
            )
        if len(self._live) + num_requests > self.max_num_live:
            raise QueueFull(
                f"{len(self._live)} requests are running or waiting, and with {num_requests} more there would be over "
                f"{self.max_num_live} {limits}; try again later"
            )

    def _admit(self, request: EngineCoreRequest) -> None:
        """Count `request` as live, or raise QueueFull."""
        self.check_room(1)
        self._live.add(request.request_id)

    def _settle(self, message: EngineCoreOutputs) -> None:
        """Take from `message` what ends live requests, and the statistics."""
        if message.scheduler_stats is not None:
            self.stats = message.scheduler_stats
        for output in message.outputs:
            if output.finish_reason is not None:
                self._live.discard(output.request_id)
