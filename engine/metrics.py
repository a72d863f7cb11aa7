"""What is counted, under which name. vLLM's names where they mean the same, so that dashboards made for it work."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """The core's state after a step; set by `EngineCore.stats`, sent in exactly one message a step.

    Attributes:
        num_running: Requests in the running list.
        num_waiting: Requests waiting to be admitted, also preempted ones and those that await a grammar or input.
        num_kv_blocks: Blocks that can be handed out.
        num_used_blocks: Blocks referenced by a request or by a plan in flight.
        num_preemptions: Preemptions since the start.
        prefix_cache_queries: Prompt tokens looked up since the start, each request at its first admission and each
            turn of a session at its own.
        prefix_cache_hits: Of these, tokens found.
        prefix_cache_requests: Requests looked up, each turn of a session anew.
        preempted_prefix_cache_queries: The same for requests that were admitted again after a preemption.
        preempted_prefix_cache_hits: Of these, tokens found.
        preempted_prefix_cache_requests: Admissions after a preemption.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks: int = 0
    num_used_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_requests: int = 0
    preempted_prefix_cache_queries: int = 0
    preempted_prefix_cache_hits: int = 0
    preempted_prefix_cache_requests: int = 0

    @classmethod
    def sum(cls, parts: Iterable[SchedulerStats]) -> SchedulerStats:
        """Return the state of several engines as if they were one."""
        return cls(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.num_used_blocks / self.num_kv_blocks if self.num_kv_blocks else 0.0


GAUGES: dict[str, tuple[str, str]] = {
    "vllm:num_requests_running": ("Requests in the running batch.", "num_running"),
    "vllm:num_requests_waiting": ("Requests waiting to be admitted.", "num_waiting"),
    "vllm:kv_cache_usage_perc": ("Share of KV blocks in use; 1 means all.", "kv_cache_usage"),
}
"""Gauge name → (help, attribute of `SchedulerStats`)."""

COUNTERS: dict[str, tuple[str, str]] = {
    "vllm:num_preemptions": ("Requests whose blocks were taken back.", "num_preemptions"),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
}
"""Counter name, without `_total` → (help, attribute of `SchedulerStats`)."""
