"""A prompt that comes in parts, each answered by a turn, over one request that lives as long as its session.

A part is sent without waiting for the answers to those before it; turns are read in the order of their parts. The last
token of a turn, which the model has not read, gives way to the next part. Leaving the session ends it: where every turn
is answered it is closed, else it is aborted, without waiting in both cases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Self

import msgspec
import trio

from engine.client.input_processor import InputProcessor, Prompt, PromptInput, RequestOptions
from engine.client.output_processor import Completion, CompletionOutput, RequestState, Usage
from engine.client.stream import Reader
from engine.client.tokenizer import Tokenizer
from engine.errors import InvalidRequest, QueueFull, RequestAborted
from engine.outputs import FinishReason, Logprobs, RequestId
from engine.protocol import EngineCoreOutput, EngineCoreRequest, SessionPart
from engine.sampling_params import OutputKind, SamplingParams


class TurnCompletion(Completion):
    """The answer to one part, with what was asked of that part's own tokens.

    Attributes:
        prompt_logprobs: Of the part's tokens, but for the first one of all, where its parameters ask for them.
    """

    prompt_logprobs: Logprobs | None = None

    def add(self, output: EngineCoreOutput) -> bool:
        """Take in what the engine sent; see `Completion.add`."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        return super().add(output)


class SessionState(RequestState):
    """A session under way: its turns, and what is known of it as a whole. Filled by the receive task."""

    def __init__(self, request: EngineCoreRequest, text: str | None, tokenizer: Tokenizer, arrival_s: float) -> None:
        """Begin with the turn that answers `request`."""
        self.has_ended = False
        self._first = request
        self._tokenizer = tokenizer
        self._usage = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
        kind = request.sampling_params.output_kind or OutputKind.DELTA
        super().__init__(request.external_id, text, [request], kind, tokenizer, arrival_s)
        self._turns: deque[TurnCompletion] = deque()
        self.unread: deque[TurnCompletion] = deque()
        self._expect(request)

    def begin_turn(self, part: SessionPart) -> None:
        """Expect the turn that answers `part`, after those that are expected already."""
        self._expect(
            msgspec.structs.replace(
                self._first, prompt_token_ids=part.prompt_token_ids, sampling_params=part.sampling_params
            )
        )

    def _expect(self, request: EngineCoreRequest) -> None:
        kind = request.sampling_params.output_kind or OutputKind.DELTA
        turn = TurnCompletion(0, request, kind, self._tokenizer)
        self._turns.append(turn)
        self.unread.append(turn)
        self._count(len(request.prompt_token_ids), 0)
        self.completions[self.session_id] = self._turns[0]

    @property
    def session_id(self) -> RequestId:
        """The internal id of its one request."""
        return self._first.request_id

    @property
    def num_unanswered(self) -> int:
        """Turns that have not ended."""
        return len(self._turns)

    @property
    def is_finished(self) -> bool:
        """Whether the session has ended, and not only all its turns so far."""
        return self.has_ended

    @property
    def usage(self) -> Usage:
        """Tokens taken so far, over all parts and turns."""
        return self._usage

    def _count(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        self._usage = Usage(
            prompt_tokens=self._usage.prompt_tokens + num_prompt_tokens,
            completion_tokens=self._usage.completion_tokens + num_new_tokens,
            cached_tokens=self.num_cached_tokens,
        )

    def add(self, output: EngineCoreOutput, now_s: float) -> bool:
        """Give an output to the turn whose it is; the session's end is that of every turn."""
        if self.has_ended:
            return False
        self.has_ended = output.finish_reason is not None
        ended = output.turn_reason or output.finish_reason
        if self._turns:
            turn = self._turns[0]
            if not (turn.num_tokens or output.new_token_ids) and ended is FinishReason.STOP:
                ended = FinishReason.ABORT  # the engine closed the session before it had read the part
            super().add(msgspec.structs.replace(output, finish_reason=ended, turn_reason=None), now_s)
            self._count(0, len(output.new_token_ids))
            if turn.is_finished:
                self._end_turn()
        while self.has_ended and self._turns:
            self._turns[0].add(EngineCoreOutput(self.session_id, finish_reason=FinishReason.ABORT))
            self._end_turn()
        return False

    def _end_turn(self) -> None:
        self._turns.popleft()
        if self._turns:
            self.completions[self.session_id] = self._turns[0]

    def forget(self) -> list[RequestId]:
        """Take in nothing more; return the id of the session if it had not ended."""
        was_live, self.has_ended = not self.has_ended, True
        return [self.session_id] if was_live else []


class Door(NamedTuple):
    """What a session may ask of its engine.

    Attributes:
        input_processor: Makes requests and parts; refuses what cannot run.
        tokenize: Prompt, parameters, whether it is a session's first → token ids, in a thread where that takes time.
        begin: Sends the request of a session, whose slot it opens; raises QueueFull, EngineStopping, EngineDeadError.
        extend: Sends a part; raises EngineStopping, EngineDeadError.
        abort: Ends the session.
    """

    input_processor: InputProcessor
    tokenize: Callable[[PromptInput, SamplingParams, bool], Awaitable[Prompt]]
    begin: Callable[[Session, EngineCoreRequest], None]
    extend: Callable[[SessionPart], None]
    abort: Callable[[RequestState], None]


class Session(Reader):
    """One session, for one sender and one reader; what `AsyncLLM.session` yields."""

    def __init__(
        self, door: Door, tokenizer: Tokenizer, params: SamplingParams, options: RequestOptions, max_num_parts: int
    ) -> None:
        """Answer with `params` where a part has none of its own; nothing is sent yet.

        Raises:
            InvalidRequest: A parameter that a session cannot obey; the caller's fault.
        """
        super().__init__()
        check_params(params)
        self._door = door
        self._tokenizer = tokenizer
        self._params = params
        self._options = options
        self._max_num_parts = max_num_parts
        self._sending = trio.Lock()
        self._is_closed = False
        self.state: SessionState | None = None

    @property
    def usage(self) -> Usage:
        """Tokens taken so far, over all parts and turns."""
        return self.state.usage if self.state else Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)

    async def send(self, part: PromptInput, params: SamplingParams | None = None) -> None:
        """Send the next part: text or token ids, the first one also chat messages. Cancelled, it has sent nothing.

        Raises:
            RequestError: The part was refused; nothing was sent, and the session goes on. Not so a form of the text
                that turns out wrong when the engine compiles it: its turn ends in an error, and the session with it.
            RequestAborted: The session has ended.
            EngineDeadError: The engine died.
        """
        params = params or self._params
        check_params(params)
        async with self._sending:
            self._check_open()
            prompt = await self._door.tokenize(part, params, self.state is None)
            self._check_open()
            if self.state is None:
                self._begin(prompt, params)
            else:
                self._extend(self.state, prompt, params)

    def turn(self) -> Turn:
        """Return the answer to the oldest part whose answer was not asked for yet, to be iterated over.

        Raises:
            InvalidRequest: There is no such part: iterating would never end; the caller's fault.
        """
        if self.state is None or not self.state.unread:
            raise InvalidRequest("no part of the session awaits an answer: send one first")
        return Turn(self, self.state.unread.popleft())

    def close(self) -> None:
        """Say that no further part comes: what was sent is still answered. Does not wait; idempotent."""
        if not self._is_closed and self.state is not None and not self.state.has_ended and self.death is None:
            self._door.extend(SessionPart(self.state.session_id, []))
        self._is_closed = True

    def leave(self) -> None:
        """Close it where every turn has been answered, else abort it. Does not wait."""
        if self.state is not None and (self.state.num_unanswered or self.death is not None):
            self._door.abort(self.state)
        else:
            self.close()

    def _begin(self, prompt: Prompt, params: SamplingParams) -> None:
        request = self._door.input_processor.make_session(prompt, params, self._options)
        self.state = SessionState(request, prompt.text, self._tokenizer, trio.current_time())
        try:
            self._door.begin(self, request)
        except BaseException:
            self.state = None
            raise

    def _extend(self, state: SessionState, prompt: Prompt, params: SamplingParams) -> None:
        if state.num_unanswered > self._max_num_parts:
            raise QueueFull(
                f"{state.num_unanswered} parts of the session are not answered yet, and --max-num-waiting is "
                f"{self._max_num_parts}: read a turn before sending the next part"
            )
        part = self._door.input_processor.make_part(state.session_id, prompt, params)
        self._door.extend(part)
        state.begin_turn(part)

    def _check_open(self) -> None:
        if self.death is not None:
            raise self.death
        if self._is_closed:
            raise InvalidRequest("the session is closed and takes no further part")
        if self.state is not None and self.state.has_ended:
            raise RequestAborted("the session has ended and takes no further part")


class Turn:
    """The answer to one part as it comes: an async iterator of deltas, the last of which has a finish reason."""

    def __init__(self, session: Session, completion: TurnCompletion) -> None:
        """Read `completion`, which the receive task fills."""
        self._session = session
        self._completion = completion

    def __aiter__(self) -> Self:
        """Iterate over deltas."""
        return self

    async def __anext__(self) -> CompletionOutput:
        """Wait for news; a cancelled wait loses nothing.

        Raises:
            EngineDeadError: The engine died before the turn's end.
        """
        return await self._session.next_of(self._completion)

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Those of the part's tokens, known from the first delta on: all of them but for the session's very first."""
        return self._completion.prompt_logprobs

    async def collect(self) -> CompletionOutput:
        """Read to the end and return the whole."""
        outputs = [news async for news in self] or [CompletionOutput(index=0)]
        return CompletionOutput.join(outputs) if self._completion.is_read_by_deltas else outputs[-1]


_REFUSED = {
    "n": "each part has one answer, so leave it at 1, or open several sessions",
    "stop": "the engine ends turns, and it sees no text, so leave it out and give stop_token_ids",
}
_NEUTRAL = SamplingParams()


def check_params(params: SamplingParams) -> None:
    """Refuse what a session cannot obey.

    Raises:
        InvalidRequest: With the parameter's name; the caller's fault.
    """
    for name, reason in _REFUSED.items():
        if getattr(params, name) != getattr(_NEUTRAL, name):
            given = getattr(params, name)
            raise InvalidRequest(f"{name} {given!r:.80} cannot be had in a session: {reason}", param=name)
    if params.output_kind is OutputKind.FINAL_ONLY:
        message = "output_kind final_only cannot be had in a session: turns are read as they come, so choose another"
        raise InvalidRequest(message, param="output_kind")
