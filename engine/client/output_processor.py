"""`EngineCoreOutput` → text. Pure: no clock, no tasks; what a reader has not fetched yet is merged into one delta."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from engine.client.detokenizer import Detokenizer, Increment
from engine.client.tokenizer import Tokenizer
from engine.errors import Cause
from engine.outputs import FinishReason, RequestId
from engine.outputs import Logprobs as Logprobs  # part of what readers get, and so of this interface
from engine.protocol import EngineCoreOutput, EngineCoreRequest
from engine.sampling_params import OutputKind

logger = logging.getLogger(__name__)


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One completion, or what is new of it.

    Attributes:
        index: Which of the request's n completions.
        text: New text (all so far, or the whole at the end, by `output_kind`).
        token_ids: New token ids, likewise; the stopping one included.
        logprobs: Of these tokens, when asked for.
        finish_reason: Set on the last output of a completion.
        stop_reason: The stop string or stop token that ended it.
        error: Why, when the finish reason is error.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Cause | None = None

    @classmethod
    def join(cls, deltas: Sequence[CompletionOutput]) -> CompletionOutput:
        """Return all deltas of one completion, at least one, as the whole."""
        logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        return msgspec.structs.replace(
            deltas[-1],
            text="".join(delta.text for delta in deltas),
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            logprobs=Logprobs.join(logprobs) if logprobs else None,
        )


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a request took.

    Attributes:
        prompt_tokens: In the prompt, counted once.
        completion_tokens: Generated so far, over all completions.
        cached_tokens: Of the prompt, those the prefix cache gave.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class RequestMetrics(msgspec.Struct, kw_only=True):
    """When things happened to a request, in seconds of this process's monotonic clock.

    Attributes:
        arrival_s: When it was made.
        first_token_s: When its first token arrived here.
        finished_s: When its last completion ended.
        num_preemptions: How often its blocks were taken back.
    """

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request with its completions, in index order.

    Attributes:
        request_id: The caller's label.
        prompt: The prompt's text (the rendered template for chat), None where ids were given.
        prompt_token_ids: The prompt's ids.
        outputs: One completion an index.
        finished: Whether all have ended.
        metrics: When things happened.
        num_cached_tokens: Prompt tokens the prefix cache gave.
        prompt_logprobs: Of the prompt's tokens but the first, when asked for and the prompt was computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: Logprobs | None = None


class _NoText:
    """Stands in for a detokenizer where no text is wanted."""

    def update(self, new_token_ids: Sequence[int], finished: bool) -> Increment:
        """Count the tokens."""
        return Increment("", None, len(new_token_ids))


class Completion:
    """One of a request's completions: turns its tokens into text and keeps what nobody has fetched yet."""

    def __init__(self, index: int, request: EngineCoreRequest, kind: OutputKind, tokenizer: Tokenizer) -> None:
        """Start empty; `kind` says what `fetch` returns."""
        self.index = index
        self.request_id = request.request_id
        self.num_tokens = 0
        self.is_finished = False
        self._kind = kind
        params = request.sampling_params
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params) if params.detokenize else _NoText()
        self._interval = params.stream_interval or 1
        self._num_told = 0
        self._pending = CompletionOutput(index=index, token_ids=[])
        self._texts: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._has_news = False

    def add(self, output: EngineCoreOutput) -> bool:
        """Take in what the engine sent; return whether a stop string ended the text, so that it must be aborted."""
        if self.is_finished:
            return False
        increment = self._detokenizer.update(output.new_token_ids, output.finish_reason is not None)
        new_token_ids = output.new_token_ids[: increment.num_tokens_used]
        pending = self._pending
        if increment.text:
            self._texts.append(increment.text)
        pending.token_ids.extend(new_token_ids)
        self.num_tokens += len(new_token_ids)
        if output.logprobs is not None:
            self._logprobs.append(output.logprobs.part(0, len(new_token_ids)))
        if increment.stop_string is not None:
            pending.finish_reason, pending.stop_reason = FinishReason.STOP, increment.stop_string
        else:
            pending.finish_reason, pending.stop_reason = output.finish_reason, output.stop_reason
            pending.error = output.error
        self.is_finished = pending.finish_reason is not None
        self._has_news = self._has_news or bool(increment.text or new_token_ids or self.is_finished)
        return increment.stop_string is not None and output.finish_reason is None

    def fail(self, error: Cause) -> None:
        """End this completion alone, with reason error."""
        if not self.is_finished:
            self._pending.finish_reason, self._pending.error = FinishReason.ERROR, error
            self.is_finished = self._has_news = True

    def fetch(self) -> CompletionOutput | None:
        """Return what is new, of the asked kind, or None when there is nothing to tell yet."""
        if not self._has_news or not (self.is_finished or self._is_due):
            return None
        self._has_news = False
        self._num_told = self.num_tokens
        if self._kind is OutputKind.DELTA:
            told = self._pending
            told.text, told.logprobs = "".join(self._texts), self._told_logprobs()
            self._pending = CompletionOutput(index=self.index, token_ids=[])
            self._texts, self._logprobs = [], []
            return told
        return self.final()

    @property
    def is_read_by_deltas(self) -> bool:
        """Whether `fetch` returns what is new, and not all so far."""
        return self._kind is OutputKind.DELTA

    @property
    def _is_due(self) -> bool:
        """Whether what is new of a completion that goes on is to be told: its first token is, then intervals."""
        if self._kind is OutputKind.FINAL_ONLY:
            return False
        return not self._num_told or self.num_tokens - self._num_told >= self._interval

    def final(self) -> CompletionOutput:
        """Return all so far of a completion that is not read by deltas."""
        token_ids = list(self._pending.token_ids)
        self._pending.text = "".join((self._pending.text, *self._texts))
        self._texts.clear()
        return msgspec.structs.replace(self._pending, token_ids=token_ids, logprobs=self._told_logprobs())

    def _told_logprobs(self) -> Logprobs | None:
        return Logprobs.join(self._logprobs) if self._logprobs else None


class RequestState:
    """A request under way: its completions by internal id, and what is known of it as a whole."""

    def __init__(
        self,
        label: str,
        prompt: str | None,
        requests: list[EngineCoreRequest],
        kind: OutputKind,
        tokenizer: Tokenizer,
        arrival_s: float,
    ) -> None:
        """Track `requests`, the completions of one prompt in index order."""
        self.request_id = label
        self.prompt = prompt
        self.prompt_token_ids = requests[0].prompt_token_ids
        self.num_cached_tokens = 0
        self.prompt_logprobs: Logprobs | None = None
        self.metrics = RequestMetrics(arrival_s=arrival_s)
        self._kind = kind
        self.completions = {
            request.request_id: Completion(index, request, kind, tokenizer) for index, request in enumerate(requests)
        }

    @property
    def request_ids(self) -> list[RequestId]:
        """Internal ids, in index order."""
        return list(self.completions)

    @property
    def is_finished(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.is_finished for completion in self.completions.values())

    @property
    def usage(self) -> Usage:
        """Tokens taken so far."""
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=sum(completion.num_tokens for completion in self.completions.values()),
            cached_tokens=self.num_cached_tokens,
        )

    def forget(self) -> list[RequestId]:
        """Take in nothing more; return the ids of the completions that had not ended."""
        unfinished = [i for i, completion in self.completions.items() if not completion.is_finished]
        for request_id in unfinished:
            self.completions[request_id].is_finished = True
        return unfinished

    def add(self, output: EngineCoreOutput, now_s: float) -> bool:
        """Take in an output of one of the completions; return whether that one must be aborted (stop string)."""
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.metrics.num_preemptions += sum(event.kind == "preempted" for event in output.events)
        if output.new_token_ids and self.metrics.first_token_s is None:
            self.metrics.first_token_s = now_s
        must_abort = self.completions[output.request_id].add(output)
        if self.metrics.finished_s is None and self.is_finished:
            self.metrics.finished_s = now_s
        return must_abort

    def receive(self, output: EngineCoreOutput, now_s: float) -> bool:
        """Take in an output as `add` does; a completion that cannot be turned into text fails alone, and is aborted."""
        try:
            return self.add(output, now_s)
        except Exception as error:
            logger.exception("request %s failed in output processing", self.request_id)
            self.completions[output.request_id].fail(Cause.of(error))
            return output.finish_reason is None

    def fetch_all(self) -> RequestOutput | None:
        """Return the request with the completions of which there is news; all at once, at the end, if asked so."""
        if self._kind is OutputKind.FINAL_ONLY and not self.is_finished:
            return None
        news = [output for output in map(Completion.fetch, self.completions.values()) if output is not None]
        return self.output(news) if news else None

    def fetch(self) -> CompletionOutput | None:
        """Return news of the first completion that has any."""
        for completion in self.completions.values():
            news = completion.fetch()
            if news is not None:
                return news
        return None

    def output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        """Describe the request with these completions."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.is_finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
        )
