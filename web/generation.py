"""Answers a generation request: opens its streams on the request's scope, writes what comes as JSON or as events.

What is the same for all forms of answers is here: refusals keep their HTTP status, because the head of a stream is sent
with its first output; each stream ends with exactly one terminal marker, after an error event where something failed;
a quiet stream gets comments. The forms themselves are the `AnswerForm`s of chat.py and completions.py.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import trio
from quart import Response

from engine.client.output_processor import CompletionOutput, Logprobs
from engine.client.stream import Stream
from engine.errors import EngineDeadError
from engine.sampling_params import SamplingParams
from web import logprobs, sse
from web.answer_form import AnswerForm, Json, MakeReader, PlainReader, Reader
from web.errors import GenerationFailed, ServerStopping, describe
from web.logprobs import TextPlace
from web.schemas import GenerationRequest
from web.scope import RequestScope
from web.state import ServerState


class Delta(NamedTuple):
    """What is new for one choice."""

    choice: int
    output: CompletionOutput


async def answer(
    state: ServerState,
    form: AnswerForm,
    request: GenerationRequest,
    prompts: Sequence[Any],
    params: SamplingParams,
    make_reader: MakeReader = lambda _stream: None,
) -> Response:
    """Generate for every prompt and return the response, for a stream once its first output is known.

    `make_reader` makes what reads each choice, or None where all its text is content.

    Raises:
        RequestError: A prompt or parameter was refused, or the engine failed the request.
        EngineDeadError: There is no engine any more.
    """
    scope = RequestScope.current()
    generation = Generation(state, form, params, make_reader, request.form_field)
    await generation.open(
        scope,
        prompts,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        client_key=request.user,
    )
    if not request.stream:
        return Response(msgspec.json.encode(await generation.collect()), content_type="application/json")
    events = await generation.start_events(scope, request.include_usage)
    return Response(events, content_type=sse.CONTENT_TYPE, headers=sse.HEADERS)


class Generation:
    """The streams of one HTTP request, one a prompt with `n` choices each, read and written as one.

    Choice `i` of prompt `p` has the index `p * n + i`.
    """

    def __init__(
        self, state: ServerState, form: AnswerForm, params: SamplingParams, make_reader: MakeReader, form_field: str
    ) -> None:
        """Prepare an answer in `form`; `open` starts it."""
        self._form_field = form_field
        self._make_reader = make_reader
        self._readers: dict[int, Reader] = {}
        self._state = state
        self._form = form
        self._params = params
        self._n = params.n
        self._streams: list[Stream] = []
        self._id = f"{form.id_prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._opened: set[int] = set()
        self._places: dict[int, TextPlace] = {}
        self._has_begun = False

    async def open(self, scope: RequestScope, prompts: Sequence[Any], **options: Any) -> None:
        """Start generating for every prompt; when `scope` ends, so does the generation.

        Raises:
            RequestError: A prompt or parameter was refused; what was started already ends with `scope`.
            ServerStopping: The server stopped meanwhile.
            EngineDeadError: There is no engine any more.
        """
        scope.stack.enter_context(self._state.answering(self._stream_labels, (self._id, scope.request_id)))
        self._state.engine.check_room(len(prompts) * self._n)
        for index, prompt in enumerate(prompts):
            request_id = self._id if len(prompts) == 1 else f"{self._id}-{index}"
            generating = self._state.engine.generate(prompt, self._params, request_id=request_id, **options)
            self._streams.append(await scope.stack.enter_async_context(generating))
            if self._state.aborting:  # since this request was accepted; nothing of it has been answered yet
                raise ServerStopping

    async def collect(self) -> Json:
        """Wait for the end and return the whole answer.

        Raises:
            GenerationFailed: The engine failed the request.
            EngineDeadError: The engine ended before the request did.
        """
        choices = []
        extra: Json = {}
        for prompt, stream in enumerate(self._streams):
            collected = await stream.collect()
            of_prompt: Json = {}
            if self._params.prompt_logprobs is not None:
                tokenizer = self._state.engine.tokenizer
                of_prompt = {"prompt_logprobs": logprobs.of_prompt(collected.prompt_logprobs, tokenizer)}
            for output in collected.outputs:
                delta = self._taken(prompt, output)
                filling = self._reader_of(delta.choice).whole(output.text)
                choice = self._choice(delta, filling, told=output.logprobs, ends=True)
                choices.append(choice | of_prompt if self._form.has_prompt_logprobs_in_choice else choice)
            extra = {} if self._form.has_prompt_logprobs_in_choice else of_prompt
        return self._envelope(self._form.kind, choices, usage=self._usage(), **extra)

    async def start_events(self, scope: RequestScope, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Wait for the first output, then return the events from it on; raises as `collect` does until then."""
        extra = {"usage": None} if include_usage else {}
        encode_next = partial(self._next_events, self._reader(scope), extra)
        first = await encode_next(float("inf"))
        return self._events(first, partial(encode_next, sse.KEEP_ALIVE_S), include_usage)

    def _stream_labels(self) -> list[str]:
        return [stream.request_id for stream in self._streams]

    async def _events(
        self, first: bytes | None, encode_next: Callable[[], Awaitable[bytes | None]], include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        events = first
        try:
            while events is not None:
                yield events
                events = await encode_next()  # always lets others run, which a send that fits the buffer does not
            if include_usage:
                yield sse.event(self._envelope(self._form.chunk_kind, [], usage=self._usage()))
        except Exception as error:
            _, body = describe(error)
            yield sse.encoded_event(body)
        yield sse.DONE

    async def _next_events(
        self, next_delta: Callable[[], Awaitable[Delta | None]], extra: Json, patience_s: float
    ) -> bytes | None:
        with trio.move_on_after(patience_s):
            delta = await next_delta()
            return None if delta is None else b"".join(map(sse.event, self._chunks(delta, extra)))
        return sse.PING

    def _reader(self, scope: RequestScope) -> Callable[[], Awaitable[Delta | None]]:
        if len(self._streams) == 1:
            return partial(self._next_of_one, self._streams[0])
        send_delta, receive_delta = trio.open_memory_channel[tuple[int, CompletionOutput] | EngineDeadError](0)
        scope.stack.enter_context(receive_delta)
        with send_delta:
            for prompt, stream in enumerate(self._streams):
                scope.nursery.start_soon(self._forward, prompt, stream, send_delta.clone())
        return partial(self._next_of_many, receive_delta)

    async def _next_of_one(self, stream: Stream) -> Delta | None:
        output = await anext(stream, None)
        return None if output is None else self._taken(0, output)

    async def _next_of_many(
        self, deltas: trio.MemoryReceiveChannel[tuple[int, CompletionOutput] | EngineDeadError]
    ) -> Delta | None:
        try:
            received = await deltas.receive()
        except trio.EndOfChannel:
            return None
        if isinstance(received, EngineDeadError):
            raise received
        return self._taken(*received)

    async def _forward(self, prompt: int, stream: Stream, send_output: Any) -> None:
        async with send_output:
            try:
                async for output in stream:
                    await send_output.send((prompt, output))
            except EngineDeadError as error:
                await send_output.send(error)

    def _taken(self, prompt: int, output: CompletionOutput) -> Delta:
        if output.finish_reason == "error":
            raise GenerationFailed(output.error, self._form_field)
        if self._state.aborting and output.finish_reason == "abort" and not (output.token_ids or self._has_begun):
            raise ServerStopping  # it never ran: another server may answer it
        self._has_begun = True
        return Delta(prompt * self._n + output.index, output)

    def _chunks(self, delta: Delta, extra: Json) -> Iterator[Json]:
        if self._form.opening is not None and delta.choice not in self._opened:
            self._opened.add(delta.choice)
            yield self._chunk(delta, self._form.opening, extra)
        reader = self._reader_of(delta.choice)
        told = delta.output.logprobs
        fillings = reader.pieces(delta.output.text, delta.output.finish_reason is not None)
        for filling in fillings or ([reader.nothing] if told else []):
            yield self._chunk(delta, filling, extra, told=told)
            told = None
        if delta.output.finish_reason is not None:
            yield self._chunk(delta, self._form.ending, extra, ends=True)

    def _reader_of(self, choice: int) -> Reader:
        if choice not in self._readers:
            reader = self._make_reader(self._streams[choice // self._n])
            self._readers[choice] = PlainReader(self._form) if reader is None else reader
        return self._readers[choice]

    def _chunk(
        self, delta: Delta, filling: Json, extra: Json, *, told: Logprobs | None = None, ends: bool = False
    ) -> Json:
        return self._envelope(self._form.chunk_kind, [self._choice(delta, filling, told=told, ends=ends)], **extra)

    def _choice(self, delta: Delta, filling: Json, *, told: Logprobs | None, ends: bool) -> Json:
        shown = self._logprobs(delta.choice, told) if told else None
        choice = {"index": delta.choice, **filling, "logprobs": shown, "finish_reason": None}
        if ends:
            reason = self._reader_of(delta.choice).reason(str(delta.output.finish_reason))
            choice |= {"finish_reason": reason, "stop_reason": delta.output.stop_reason}
        return choice

    def _logprobs(self, choice: int, told: Logprobs) -> Json:
        tokenizer = self._state.engine.tokenizer
        if choice not in self._places:
            self._places[choice] = TextPlace(tokenizer, self._params)
        return self._form.logprobs(told, tokenizer, self._places[choice])

    def _envelope(self, kind: str, choices: list[Json], **extra: Any) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._state.model_name,
            "system_fingerprint": None,
            "choices": choices,
            **extra,
        }

    def _usage(self) -> Json:
        usages = [stream.usage for stream in self._streams]
        return {
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
            "total_tokens": sum(usage.total_tokens for usage in usages),
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        }
