"""Which waiting request may start next, and whose place it may take.

The queue's order is strict but for two rules, which keep the engine busy and everybody moving:

- **Look-ahead.** Where a request does not fit, up to `LOOK_AHEAD` others are tried in order, so that one huge prompt
  does not idle the engine. Each admission past it is counted; after `max_overtakes` of them nobody passes it any more,
  the pool runs empty and it gets in. Nobody passes one that was preempted, unless it waits for other protected ones,
  or one for which another had to make way.
- **Yielding.** A request that has had to yield its place `MAX_YIELDS` times is protected: it runs before all others
  and never yields again. That can be promised because protected requests run together only while all of them fit in
  the pool at their full length.
"""

from __future__ import annotations

from itertools import accumulate

from engine.config import EngineConfig
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.match import Match
from engine.request import PREEMPTED, Request
from engine.scheduler.in_flight import PlansInFlight
from engine.scheduler.policy import Policy
from engine.scheduler.waiting_queue import WaitingQueue

LOOK_AHEAD = 8
"""Requests that may be passed over in one step."""
MAX_YIELDS = 4
"""How often one request may lose its place to another."""


def is_protected(request: Request) -> bool:
    """Whether `request` has had to yield its place so often that it must not any more."""
    return request.num_yields >= MAX_YIELDS


class PrefixCacheCounts:
    """Admissions, the tokens they looked up in the prefix cache, and the tokens they found there."""

    def __init__(self) -> None:
        """Start at 0."""
        self.num_requests = self.num_queries = self.num_hits = 0

    def add(self, num_queries: int, num_hits: int) -> None:
        """Count one admission."""
        self.num_requests += 1
        self.num_queries += num_queries
        self.num_hits += num_hits


class Admission:
    """Goes through the waiting queue once a step. The running list is the scheduler's, the rules are here."""

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        running: list[Request],
        in_flight: PlansInFlight,
        kv_cache: KVCacheManager,
        max_concurrent_plans: int,
    ) -> None:
        """Start with nobody waiting; at most `max_concurrent_plans` are in flight."""
        self.waiting = WaitingQueue()
        self.first_counts, self.resumed_counts = PrefixCacheCounts(), PrefixCacheCounts()
        self._config = config
        self._policy = policy
        self._running = running
        self._in_flight = in_flight
        self._kv_cache = kv_cache
        self._max_concurrent_plans = max_concurrent_plans
        self._watermark = int(config.watermark * kv_cache.pool.num_blocks)
        self._passed: list[Request] = []
        self._made_way_for: Request | None = None
        self._refused: tuple[Request, int] | None = None

    def next(self) -> Request | None:
        """Return the next candidate, or None where nobody else may start in this step."""
        if len(self._running) >= self._config.max_num_seqs:
            return None
        if self._passed and max(request.num_overtaken for request in self._passed) >= self._config.max_overtakes:
            return None
        request = self.waiting.peek()
        if self._made_way_for not in (None, request):
            return None  # whoever made way must not come back in the same step
        return request

    def match(self, request: Request, budget: int) -> Match | None:
        """Return the cached beginning of `request` if it can start behind it now, with `budget` tokens left to give."""
        num_reserved = self._watermark if self._running else 0
        max_new = None if self._config.enable_chunked_prefill else budget
        if self._in_flight.has_row_of(request) or self._kv_cache.is_short(request, num_reserved, max_new):
            return None
        if self._awaits_protected(request):
            return None
        match = self._kv_cache.match(request)
        return match if self._kv_cache.has_room(request, match, num_reserved, max_new) else None

    def pass_over(self, request: Request) -> bool:
        """Look past `request`, the last candidate, which cannot start; False where that must not be."""
        has_right_of_way = request.status is PREEMPTED and not self._awaits_protected(request)
        is_overtaken_enough = request.num_overtaken >= self._config.max_overtakes
        if has_right_of_way or is_overtaken_enough or len(self._passed) >= LOOK_AHEAD:
            return False
        self.waiting.set_aside()
        self._passed.append(request)
        return True

    def admit(self, request: Request, match: Match) -> None:
        """Give `request`, the last candidate, the tables that begin with `match`, and take it out of the queue."""
        self._kv_cache.admit(request, match)
        self.waiting.remove(request)
        for passed in self._passed:
            passed.num_overtaken += 1
        if self._config.enable_prefix_caching:
            counts = self.resumed_counts if request.status is PREEMPTED else self.first_counts
            counts.add(request.num_tokens, match.num_tokens)

    def close(self) -> None:
        """End the step: who was passed over has its place back."""
        self.waiting.restore()
        self._passed.clear()

    def forget(self, request: Request) -> None:
        """Let go of `request`, which has ended, where something is remembered of it."""
        if self._made_way_for is request:
            self._made_way_for = None
        if self._refused is not None and self._refused[0] is request:
            self._refused = None

    def displaced(self) -> list[Request]:
        """Return the running requests that have to make way for the next one in the queue, as the policy has it.

        None while blocks are still to come back, and none in vain: only if what they hold is enough. Where it was not,
        that is remembered until somebody comes or gives back blocks, or more of the request is cached.
        """
        self._made_way_for = None
        request = self.waiting.peek()
        if request is None or self._in_flight.has_row_of(request) or self._kv_cache.has_held_blocks:
            return []
        is_unchanged = self._refused == (request, self._kv_cache.num_changes)
        if is_unchanged and self._kv_cache.is_short(request, self._watermark, None):
            return []
        chosen = self._weighed(request)
        if chosen:
            request.num_overtaken = self._config.max_overtakes
            self._made_way_for = request
        return chosen

    def _weighed(self, request: Request) -> list[Request]:
        """Return who has to make way for `request`, if it can start then; what is cheap to know is asked first."""
        victims = [victim for victim in self._policy.victims(request, self._running) if not is_protected(victim)]
        lacks_place = len(self._running) >= self._config.max_num_seqs
        if not victims or self._awaits_protected(request):
            return []
        if not lacks_place and not self._kv_cache.lacks_blocks(request, self._watermark):
            return []  # it has not been tried yet, or waits for tokens alone
        if self._kv_cache.is_short(request, -sum(map(self._kv_cache.num_blocks, victims)), None):
            return []
        match = self._kv_cache.match(request)
        num_new = request.num_tokens - match.num_tokens
        if not self._leaves_tokens(num_new, victims):
            return []
        count = self._kv_cache.num_victims(request, match, victims, self._reserves(victims))
        if count is None:
            self._kv_cache.has_room(request, match, self._watermark)  # remember why
            self._refused = request, self._kv_cache.num_changes
            return []
        chosen = victims[: max(count, lacks_place)]
        return chosen if self._leaves_tokens(num_new, chosen) else []

    def _reserves(self, victims: list[Request]) -> list[int]:
        """Return how many blocks must be left free once none, one, two, … all of `victims` have left.

        The watermark, as long as somebody runs, and what those who run take before blocks held by plans are free.
        """
        num_more = self._max_concurrent_plans - 1
        num_due = {request: self._kv_cache.num_due(request, num_more) for request in self._running}
        reserves = [self._watermark + sum(num_due.values())]
        reserves += [reserves[0] - num_left for num_left in accumulate(num_due[victim] for victim in victims)]
        if len(victims) == len(self._running):
            reserves[-1] = 0
        return reserves

    def _leaves_tokens(self, num_new: int, victims: list[Request]) -> bool:
        """Whether a step's budget has room for a request of `num_new` tokens to start once `victims` have left."""
        max_new = self._config.long_prefill_token_threshold or self._config.max_num_batched_tokens
        others = {*self._running}.difference(victims)
        num_given = sum(
            min(max_new, other.num_tokens + other.num_placeholders - other.num_computed_tokens) for other in others
        )
        least = 1 if self._config.enable_chunked_prefill else num_new
        return num_given + least <= self._config.max_num_batched_tokens

    def _awaits_protected(self, request: Request) -> bool:
        """Whether `request` must wait for other protected ones, which may need the room that it may need."""
        return is_protected(request) and not self._fits_beside_protected(request)

    def _fits_beside_protected(self, request: Request) -> bool:
        protected = [request, *filter(is_protected, self._running)]
        num_blocks = sum(self._kv_cache.max_blocks(each.max_num_tokens - 1) for each in protected)
        return num_blocks <= self._kv_cache.pool.num_blocks
