"""What crosses client and engine: tagged, array-like msgspec structs, the same over ZMQ and over memory channels.

::

    client → engine   Configure, EngineCoreRequest, SessionPart, AbortRequest, UtilityCall, StepsRead, Drain, Shutdown,
                      Acknowledge
    engine → client   EngineHello, StartProgress, EngineReady, EngineCoreOutputs, EngineDead, EngineStopped

Exactly one `EngineCoreOutput` with a finish reason comes back for each accepted request, and it is the last one for
its id. `EngineStopped` or `EngineDead` is the engine's last word; it waits for `Acknowledge` before it exits.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.errors import Cause
from engine.metrics import SchedulerStats
from engine.outputs import Capacity, FinishReason, Logprobs, RequestId
from engine.sampling_params import SamplingParams
from engine.verbs import Pause as Pause
from engine.verbs import PauseMode as PauseMode
from engine.verbs import ResetPrefixCache as ResetPrefixCache
from engine.verbs import Resume as Resume
from engine.verbs import Verb as Verb

PROTOCOL_VERSION = 2

MAX_STEPS_AHEAD = 8
"""An engine launches no step once so many have ended since the last of which it knows that its outputs were read.

The client says so at the latest when half of them are unsaid, so that one which reads holds nobody up.
"""


class Message(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True, tag=True):
    """Base of all messages: positional, tagged with the class name, trailing defaults dropped."""


class AbortReason(enum.StrEnum):
    """Who ended the request; a stop string gives finish reason `stop`, the others `abort`."""

    CLIENT = "client"
    DISCONNECT = "disconnect"
    TIMEOUT = "timeout"
    SHUTDOWN = "shutdown"
    STOP_STRING = "stop_string"


class EngineCoreRequest(Message, frozen=True):
    """One completion to compute; made by the input processor, complete and validated.

    Attributes:
        request_id: Internal id: external id, client number and a counter; unique for the engine's life.
        external_id: The caller's label, for logs.
        prompt_token_ids: At least one id, all inside the vocabulary.
        sampling_params: With EOS ids, defaults and a 64-bit seed resolved in; `n` is 1.
        arrival_time: Wall clock, seconds; for reports only, never for order.
        priority: Lower is more urgent; obeyed by the priority policy.
        client_key: Who asks, for the fair policy.
        cache_salt: Separates this request's prefix cache entries from those of other salts.
        data_parallel_rank: Forces an engine; None lets the client balance.
        current_wave: The client's idea of the data-parallel wave.
        trace_headers: W3C trace context.
        extras: Optional parts (adapter, media, session); refused by name until built.
    """

    request_id: RequestId
    external_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    priority: int = 0
    client_key: str | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    current_wave: int = 0
    trace_headers: dict[str, str] | None = None
    extras: dict[str, Any] | None = None


class SessionPart(Message, frozen=True):
    """The next part of a session's prompt, which follows what was generated so far; set by the client.

    Attributes:
        request_id: Of the session.
        prompt_token_ids: What comes next; empty to end the session.
        sampling_params: For the turn that answers it.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()

    @property
    def is_last(self) -> bool:
        """Whether it ends the session."""
        return not self.prompt_token_ids


class AbortRequest(Message, frozen=True):
    """End these requests; unknown or ended ids are ignored. Set by the client."""

    request_ids: list[RequestId]
    reason: AbortReason = AbortReason.CLIENT


class UtilityCall(Message, frozen=True):
    """A verb with its correlation id; set by the client.

    The verb is read where it is run (`engine.verbs.read_verb`): one that is wrong is answered under its id.
    """

    call_id: int
    verb: Any


class Configure(Message, frozen=True):
    """The engine's settings, answered to its hello; set by launch.py."""

    config: EngineConfig


class Drain(Message, frozen=True):
    """Take nothing new, neither requests nor verbs; what was accepted runs on, also where it was paused or asleep."""


class Shutdown(Message, frozen=True):
    """Abort whatever still runs and stop; a drain, if any, is over. Set by the client."""


class StepsRead(Message, frozen=True):
    """The client has read the outputs of all steps up to this one, see MAX_STEPS_AHEAD. Set by the client."""

    step: int


class Acknowledge(Message, frozen=True):
    """The client has read the engine's last word; the engine may exit."""


ClientMessage = (
    Configure
    | EngineCoreRequest
    | SessionPart
    | AbortRequest
    | UtilityCall
    | StepsRead
    | Drain
    | Shutdown
    | Acknowledge
)


class EngineCoreEvent(Message, frozen=True):
    """Something that happened to a request, at the engine's monotonic time in seconds. Set by the core.

    `kind` is queued, scheduled or preempted.
    """

    kind: str
    timestamp: float


class EngineCoreOutput(Message, frozen=True):
    """What one request got in one step; set by the core.

    Attributes:
        request_id: Whose output it is.
        new_token_ids: Tokens appended in this step, the stopping one included.
        logprobs: Of the new tokens, when asked for.
        prompt_logprobs: Of the prompt's tokens but the first, when asked for; with the first new token.
        finish_reason: Set on the last output of a request, and only there.
        stop_reason: The stop token's id, or repetition_detected; None for EOS, length and abort.
        num_cached_tokens: Prompt tokens the prefix cache gave at first admission; on the first output.
        events: Since the last output of this request.
        error: Why, when the finish reason is error.
        step: Index of the step that gave it.
        turn_reason: Why a turn of a session ended; the session goes on with its next part.
    """

    request_id: RequestId
    new_token_ids: list[int] = []
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    events: list[EngineCoreEvent] = []
    error: Cause | None = None
    step: int = 0
    turn_reason: FinishReason | None = None


class UtilityResult(Message, frozen=True):
    """The answer to a `UtilityCall`: a value, or the failure. Set by the server."""

    call_id: int
    value: Any = None
    failure: Cause | None = None


class EngineCoreOutputs(Message, frozen=True):
    """All a step produced for the client; set by the server.

    Attributes:
        engine_index: Data-parallel rank.
        step: Index of the step.
        outputs: In batch order; terminal outputs of aborts after them.
        utility_results: Answers that became known.
        scheduler_stats: State after the step; in exactly one message a step.
        wave: Data-parallel wave.
        timestamp: The engine's monotonic clock, seconds.
    """

    engine_index: int
    step: int
    outputs: list[EngineCoreOutput] = []
    utility_results: list[UtilityResult] = []
    scheduler_stats: SchedulerStats | None = None
    wave: int = 0
    timestamp: float = 0.0


class EngineHello(Message, frozen=True):
    """First word of an engine process; set by its main."""

    engine_index: int
    pid: int
    version: int = PROTOCOL_VERSION


class StartProgress(Message, frozen=True):
    """Where the start of the engine of that data-parallel rank is; set by the executor. `total` 0 means unknown."""

    phase: str
    done: int = 0
    total: int = 0
    engine_index: int = 0


class EngineReady(Message, frozen=True):
    """The engine takes requests; set by the server once all phases are done.

    Attributes:
        engine_index: Data-parallel rank.
        num_kv_blocks: Smallest over its ranks.
        block_size: Tokens a block.
        max_model_len: Longest prompt plus output, tokens.
        max_concurrent_plans: Plans that may be uncommitted.
        vocab_size: Token ids are below it.
        model_digest: Identifies weights and configuration.
        pid: Of the engine's process.
        version: Of this protocol.
    """

    engine_index: int
    num_kv_blocks: int
    block_size: int
    max_model_len: int
    max_concurrent_plans: int
    vocab_size: int
    model_digest: str
    pid: int
    version: int = PROTOCOL_VERSION

    @classmethod
    def of(cls, capacity: Capacity, *, engine_index: int, pid: int) -> EngineReady:
        """Say what an engine of this capacity holds; the null block is not counted."""
        return cls(
            engine_index=engine_index,
            num_kv_blocks=capacity.num_kv_blocks - 1,
            block_size=capacity.block_size,
            max_model_len=capacity.max_model_len,
            max_concurrent_plans=capacity.max_concurrent_plans,
            vocab_size=capacity.vocab_size,
            model_digest=capacity.model_digest,
            pid=pid,
        )


class EngineDead(Message, frozen=True):
    """The engine ended by a failure; its last word. Set by the server."""

    cause: Cause
    engine_index: int = 0


class EngineStopped(Message, frozen=True):
    """The engine ended as asked, after the last terminal output; its last word. Set by the server."""

    engine_index: int = 0


EngineMessage = EngineHello | StartProgress | EngineReady | EngineCoreOutputs | EngineDead | EngineStopped
