"""What every face of an engine shares: admission, the count of live requests, the latest statistics.

A request is live from `add_request` to its terminal output, or to the engine's death; on nothing else does the count
end. The faces say how messages travel: `InprocClient` calls the core, `AsyncMPClient` sends over channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from engine.config import EngineConfig
from engine.errors import InvalidRequest, QueueFull
from engine.metrics import SchedulerStats
from engine.outputs import RequestId
from engine.protocol import AbortReason, EngineCoreOutputs, EngineCoreRequest, EngineReady, SessionPart


class EngineCoreClient(ABC):
    """A face of one engine. Tokens in, tokens out; text is the business of the shells above."""

    def __init__(self, config: EngineConfig, ready: EngineReady) -> None:
        """Remember the engine's settings and what it said when it was ready."""
        self.config = config
        self.ready = ready
        self._stats = SchedulerStats(num_kv_blocks=ready.num_kv_blocks)
        self._live: set[RequestId] = set()

    @property
    def engines(self) -> Sequence[EngineCoreClient]:
        """The faces of single engines that this one stands for, by rank: itself, unless it joins several."""
        return (self,)

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's state as of the last message."""
        return self._stats

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
            InvalidRequest: There is no engine of the rank that it asks for; nothing was sent.
            EngineDeadError: The engine has ended.
        """

    @abstractmethod
    def extend(self, part: SessionPart) -> None:
        """Hand the next part of a live session to its engine, without waiting; that of an ended one is dropped.

        Raises:
            EngineDeadError: The engine has ended.
        """

    @abstractmethod
    def abort_requests(self, request_ids: Iterable[RequestId], reason: AbortReason) -> None:
        """Ask for the end of live requests, without waiting; ended or unknown ids are ignored."""

    def check_room(self, num_requests: int, data_parallel_rank: int | None = None) -> None:
        """Refuse before anything is sent what could not be sent whole, to the engine of that rank if one is given.

        Raises:
            InvalidRequest: So many requests may never be live at once, or there is no such rank.
            QueueFull: So many are too many now.
        """
        self._check_rank(data_parallel_rank)
        limits = f"(--max-num-seqs {self.config.max_num_seqs} + --max-num-waiting {self.config.max_num_waiting}"
        limits += f"{self._where})"
        if num_requests > self.max_num_live:
            raise InvalidRequest(
                f"{num_requests} completions are asked for, and at most {self.max_num_live} may run or wait {limits}: "
                "ask for fewer",
                param="n",
            )
        if self.num_live + num_requests > self.max_num_live:
            raise QueueFull(
                f"{self.num_live} requests are running or waiting, and with {num_requests} more there would be over "
                f"{self.max_num_live} {limits}; try again later"
            )

    @property
    def _where(self) -> str:
        """Which engine has the limits, where there are several."""
        return f", engine {self.ready.engine_index}" if self.config.data_parallel_size > 1 else ""

    def _check_rank(self, rank: int | None) -> None:
        highest = self.config.data_parallel_size - 1
        if rank is not None and not (type(rank) is int and 0 <= rank <= highest):
            raise InvalidRequest(
                f"data_parallel_rank is {rank!r}, and the engines are numbered 0 to {highest}: --data-parallel-size "
                f"is {highest + 1}",
                param="data_parallel_rank",
            )

    def _admit(self, request: EngineCoreRequest) -> None:
        """Count `request` as live, or raise QueueFull or InvalidRequest."""
        self.check_room(1, request.data_parallel_rank)
        self._live.add(request.request_id)

    def _settle(self, message: EngineCoreOutputs) -> None:
        """Take from `message` what ends live requests, and the statistics."""
        if message.scheduler_stats is not None:
            self._stats = message.scheduler_stats
        for output in message.outputs:
            if output.finish_reason is not None:
                self._live.discard(output.request_id)
