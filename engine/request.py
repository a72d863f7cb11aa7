"""A request inside the engine: its tokens, how far they are computed, and its status.

Statuses move only along `TRANSITIONS`; any other move raises, for it means that two ways out met. Who may move a
request: the scheduler between waiting, running and preempted, the core to a finished status.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from engine.append_only_array import AppendOnlyArray
from engine.outputs import BlockId, FinishReason, Logprobs
from engine.protocol import EngineCoreEvent, EngineCoreRequest, SessionPart
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.structured_output.grammar import Grammar


class RequestStatus(enum.IntEnum):
    """Where a request is; every status after PREEMPTED is final."""

    WAITING = enum.auto()
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = enum.auto()
    WAITING_FOR_STREAMING_REQ = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()
    """vLLM's end of prompts that do not fit; here they are refused with an error, and nothing leads to it."""
    FINISHED_ERROR = enum.auto()
    FINISHED_REPETITION = enum.auto()

    __hash__ = int.__hash__

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self > PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """What the client is told, or None while the request goes on."""
        return _FINISH_REASONS.get(self)


RUNNING, PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED
"""Where each row of each step asks for a status: a member looked up in its class costs as much as ten attributes."""

_FINISH_REASONS = {
    RequestStatus.WAITING_FOR_STREAMING_REQ: FinishReason.STOP,
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}

_FROM_OUTSIDE = frozenset(
    {RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ERROR}
)
"""Ends that may come at any time: an abort, a stop string seen by the client, a refusal or a failure."""
_BY_SAMPLING = frozenset(status for status in RequestStatus if status.is_finished) - {RequestStatus.FINISHED_IGNORED}
"""Ends that a sampled token may bring, also to a preempted request whose last plan was still in flight."""
_END_OF_TURN = frozenset({RequestStatus.WAITING_FOR_STREAMING_REQ})
"""Where a session goes when its present turn is done."""

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: _FROM_OUTSIDE | {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR},
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: _FROM_OUTSIDE | {RequestStatus.WAITING},
    RequestStatus.WAITING_FOR_STREAMING_REQ: _FROM_OUTSIDE
    | {RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR},
    RequestStatus.RUNNING: _BY_SAMPLING | _END_OF_TURN | {RequestStatus.PREEMPTED},
    RequestStatus.PREEMPTED: _BY_SAMPLING | _END_OF_TURN | {RequestStatus.RUNNING},
}
"""Every legal move. A status that is not a key is final."""


def draw_transitions() -> str:
    """Return `TRANSITIONS` as text, one line a status, for ARCHITECTURE.md."""
    width = max(len(status.name) for status in TRANSITIONS)
    return "\n".join(
        f"{status:<{width}} → {', '.join(map(str, sorted(after)))}" for status, after in TRANSITIONS.items()
    )


class IllegalTransition(RuntimeError):
    """A request was moved against `TRANSITIONS`: a broken invariant, never a caller's fault."""


class MediaSpan(NamedTuple):
    """Where the tokens of a media item stand in the prompt; `identifier` is a digest of its content."""

    identifier: str
    offset: int
    length: int


class Shortage(NamedTuple):
    """Why a request was not admitted.

    Attributes:
        num_blocks: Free blocks it would have taken in the end.
        num_new: Tokens it would have computed.
        next_block: Hash and group of the first block that was not cached; None where nothing more can be hit.
        free_hit: The first cached block that nobody used then: once somebody does, fewer are needed.
    """

    num_blocks: int
    num_new: int
    next_block: tuple[bytes, int] | None
    free_hit: BlockId | None


class Request:
    """One request between `EngineCore.add` and its terminal output.

    Attributes:
        request_id: Internal id.
        sampling_params: Resolved parameters; those of the present turn, in a session.
        priority: Lower is more urgent; for the priority policy.
        client_key: Who asks; for the fair policy.
        cache_salt: Separates its prefix cache entries from those of other salts.
        adapter_key: Separates them from those of other adapters.
        media: Separates them by what the media tokens stand for.
        reads_prefix_cache: Whether it may take what others computed; what it computes can be hit in any case.
        arrival_number: Place in the order of arrival; set by the core.
        place: Urgency and position in the order of the policy; set by the scheduler each time it waits.
        ending_token_ids: Those that can end it, EOS and stop tokens.
        num_prompt_tokens: Length of the prompt; in a session, of all that stands before the present turn's output.
        num_tokens_before: Tokens that a session had before the present turn's part; 0 in its first.
        max_num_tokens: Length, prompt included, at which it ends with reason `length`.
        tokens: Prompt and all sampled tokens; extended by `append` and `begin_turn` alone.
        num_tokens: Known tokens: the prompt and what was sampled and committed.
        num_computed_tokens: Tokens whose K/V the plans so far compute or the prefix cache gave; set by the scheduler.
        num_processed_tokens: Those of them that no plan in flight is still to compute; set by the scheduler.
        num_placeholders: Tokens that plans in flight will sample; set by the scheduler.
        generation: Rows planned in an earlier generation are void; raised by `rewind`.
        last_step: Step of the newest plan with a row of it, 0 before the first; set by the scheduler.
        num_preemptions: How often its blocks were taken back; set by the scheduler.
        num_yields: How often that was done for another request's sake; set by the scheduler.
        num_overtaken: How many later requests were admitted past it; set by the scheduler.
        num_cached_tokens: Prompt tokens the prefix cache gave at first admission, None before; set by the scheduler.
        block_hashes: Chained hash of each full block of `tokens`; extended by the prefix cache.
        shortage: Why it was not admitted when last tried; set by the KV cache manager.
        grammar: What its output must match, in a session that of the present turn; set by the core when it is compiled.
        session: The parts that are still to come, None where it is no session; set by the core.
        stop_reason: What ended it beside EOS and length; set by the stop check.
        events: Since its last output; taken by the core.
        logprobs: Of the tokens of the step being committed; set by the scheduler, taken by the core.
        prompt_logprobs: Of the chunks committed so far; likewise.
    """

    __slots__ = (
        "adapter_key",
        "arrival_number",
        "block_hashes",
        "cache_salt",
        "client_key",
        "ending_token_ids",
        "events",
        "generation",
        "grammar",
        "last_step",
        "logprobs",
        "max_num_tokens",
        "media",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_overtaken",
        "num_placeholders",
        "num_preemptions",
        "num_processed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "num_tokens_before",
        "num_yields",
        "place",
        "priority",
        "prompt_logprobs",
        "reads_prefix_cache",
        "request_id",
        "sampling_params",
        "session",
        "shortage",
        "status",
        "stop_reason",
        "tokens",
    )

    def __init__(self, request: EngineCoreRequest, arrival_number: int, max_model_len: int) -> None:
        """Take over `request`, the `arrival_number`-th of its engine, whose context holds `max_model_len` tokens."""
        self.request_id = request.request_id
        self.priority = request.priority
        self.client_key = request.client_key
        self.cache_salt = request.cache_salt
        self.adapter_key: str | None = None
        self.media: tuple[MediaSpan, ...] = ()
        self.arrival_number = arrival_number
        self.place = (0, arrival_number)
        self.tokens = AppendOnlyArray(request.prompt_token_ids)
        self.num_tokens = self.num_tokens_before = 0
        self._take_params(request.sampling_params, max_model_len)
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_processed_tokens = 0
        self.num_placeholders = 0
        self.generation = 0
        self.last_step = 0
        self.num_preemptions = 0
        self.num_yields = 0
        self.num_overtaken = 0
        self.num_cached_tokens: int | None = None
        self.block_hashes: list[bytes] = []
        self.shortage: Shortage | None = None
        self.grammar: Grammar | None = None
        self.session: deque[SessionPart] | None = None
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] = []
        self.logprobs: Logprobs | None = None
        self.prompt_logprobs: list[Logprobs] = []

    def __repr__(self) -> str:
        computed = f"{self.num_computed_tokens}/{self.num_tokens}+{self.num_placeholders}"
        return f"Request({self.request_id} {self.status} computed={computed})"

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self.tokens.append(token_id)
        self.num_tokens += 1

    @property
    def num_output_tokens(self) -> int:
        """Sampled and committed tokens; those of the present turn, in a session."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status.is_finished

    @property
    def awaits_first_step(self) -> bool:
        """Whether it lives and was never admitted."""
        return self.num_cached_tokens is None and not self.is_finished

    def move_to(self, status: RequestStatus) -> None:
        """Change the status.

        Raises:
            IllegalTransition: `TRANSITIONS` has no such move; a defect of the engine.
        """
        if status not in TRANSITIONS.get(self.status, ()):
            raise IllegalTransition(f"request {self.request_id}: {self.status} cannot become {status}")
        self.status = status

    def rewind(self, num_computed_tokens: int) -> None:
        """Forget what plans in flight compute: only the first `num_computed_tokens` count, and those rows are void."""
        self.generation += 1
        self.num_placeholders = 0
        self.num_computed_tokens = num_computed_tokens

    def begin_turn(self, part: SessionPart, max_model_len: int) -> None:
        """Let a session's next part follow what was computed; rows that are still in flight are void.

        The last sampled token, which the model has not read, gives way to the part.
        """
        if self.num_output_tokens:
            self.tokens.drop_last()
        self.num_tokens_before = len(self.tokens)
        self.num_yields = self.num_overtaken = 0
        self.grammar = None
        for token_id in part.prompt_token_ids:
            self.tokens.append(token_id)
        self._take_params(part.sampling_params, max_model_len)

    def _take_params(self, params: SamplingParams, max_model_len: int) -> None:
        """Let the tokens so far be the prompt of what `params` ask for."""
        self.sampling_params = params
        self.ending_token_ids = frozenset(params.stop_token_ids + (() if params.ignore_eos else params.eos_token_ids))
        self.reads_prefix_cache = not params.skip_reading_prefix_cache and params.prompt_logprobs is None
        self.num_tokens = self.num_prompt_tokens = len(self.tokens)
        wanted = max_model_len if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        self.max_num_tokens = min(max_model_len, wanted)
