"""What `open_engine` yields: text in, streams of text out, over one engine client.

A stream is one slot with no task of its own. Leaving it early queues the abort without waiting; the slot stays, owned
by the receive task, until the engine's terminal output for it. A slow reader gets larger deltas.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from engine.client.async_verbs import AsyncVerbs
from engine.client.asynchronous import AsyncMPClient
from engine.client.input_processor import Conversation, InputProcessor, Messages, Prompt, PromptInput, RequestOptions
from engine.client.output_processor import RequestOutput, RequestState
from engine.client.session import Door, Session
from engine.client.stream import Stream
from engine.client.tokenizer import Tokenizer
from engine.config import EngineConfig
from engine.errors import Cause, EngineDeadError, EngineStopping
from engine.metrics import SchedulerStats
from engine.outputs import RequestId
from engine.protocol import (
    AbortReason,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    SessionPart,
)
from engine.sampling_params import OutputKind, SamplingParams
from engine.task_tree import telling
from engine.verbs import Verb

logger = logging.getLogger(__name__)
teardown = logging.getLogger("teardown")

MAX_TOKENIZER_THREADS = 2
"""Prompts that may be rendered and tokenized at once."""


class AsyncLLM(AsyncVerbs):
    """One engine, asynchronously. Owned by `open_engine`; its receive task is `run`."""

    def __init__(
        self, client: AsyncMPClient, tokenizer: Tokenizer, config: EngineConfig, ready: EngineReady, model_name: str
    ) -> None:
        """Serve `client`'s engine under `model_name`."""
        self.config = config
        self.ready = ready
        self.tokenizer = tokenizer
        self.model_name = model_name
        self._client = client
        self._input_processor = InputProcessor(config, ready, tokenizer)
        self._slots: dict[RequestId, tuple[RequestState, Stream | Session]] = {}
        self._tokenizer_limiter = trio.CapacityLimiter(MAX_TOKENIZER_THREADS)
        self._ended = trio.Event()
        self._stats_changed = trio.Event()
        self._is_stopping = False
        self._last_message: EngineCoreOutputs | None = None
        self._last_message_s = 0.0

    # -- requests ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(
        self,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client_key: str | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[Stream]:
        """Open a stream of outputs for `prompt`: text, token ids or chat messages. Leaving it early aborts.

        Of several engines the one of `data_parallel_rank` answers, or the one with the fewest requests in flight.

        Raises:
            RequestError: On entering: the request was refused and nothing was started.
            EngineDeadError: On entering or while iterating: the engine died.
        """
        params = params or SamplingParams(**self.tokenizer.sampling_defaults)
        kind = params.output_kind or OutputKind.DELTA
        arrival_s = trio.current_time()
        self._check_accepts()
        tokenized = await self._tokenize(prompt, params)
        self._check_accepts()
        options = RequestOptions(request_id, priority, cache_salt, client_key, data_parallel_rank)
        label, requests = self._input_processor.make_requests(tokenized, params, options)
        self._client.check_room(len(requests), data_parallel_rank)
        state = RequestState(label, tokenized.text, requests, kind, self.tokenizer, arrival_s)
        stream = Stream(state, kind)
        try:
            for request in requests:
                self._client.add_request(request)
                self._slots[request.request_id] = (state, stream)
            yield stream
        finally:
            # Synchronous, so that it happens in a cancelled scope too; ended ids are ignored.
            self._abort_state(state, AbortReason.CLIENT)

    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestOutput:
        """Answer chat `messages` and return the whole; cancelling it aborts."""
        async with self.generate(messages, params, request_id=request_id) as stream:
            return await stream.collect()

    @asynccontextmanager
    async def session(
        self,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client_key: str | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[Session]:
        """Open a session, whose prompt comes in parts; leaving it closes it, or aborts what is not answered yet.

        Raises:
            RequestError: On entering: a parameter that no session obeys; else as `Session.send` says.
        """
        params = params or SamplingParams(**self.tokenizer.sampling_defaults)
        options = RequestOptions(request_id, priority, cache_salt, client_key, data_parallel_rank)
        door = Door(self._input_processor, self._tokenize, self._begin_session, self._extend_session, self._abort_state)
        session = Session(door, self.tokenizer, params, options, self.config.max_num_waiting)
        await trio.lowlevel.checkpoint()
        try:
            yield session
        finally:
            session.leave()

    def _begin_session(self, session: Session, request: EngineCoreRequest) -> None:
        self._check_accepts()
        self._client.add_request(request)
        assert session.state is not None
        self._slots[request.request_id] = (session.state, session)

    def _extend_session(self, part: SessionPart) -> None:
        if not part.is_last:
            self._check_accepts()
        self._client.extend(part)

    def abort(self, *request_ids: str) -> int:
        """End every request with one of these labels; its reader gets a last output, reason abort. Returns how many."""
        labels = set(request_ids)
        states = {id(state): state for state, _ in self._slots.values() if state.request_id in labels}
        for state in states.values():
            self._abort_state(state, AbortReason.CLIENT, told=True)
        return len(states)

    async def _tokenize(self, prompt: PromptInput, params: SamplingParams, is_first: bool = True) -> Prompt:
        """Tokenize text and messages in a thread; ids are only checked, here."""
        is_messages = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if not (isinstance(prompt, str | Conversation) or is_messages):
            await trio.lowlevel.checkpoint()
            return self._input_processor.tokenize(prompt, params, is_first)
        tokenize = self._input_processor.tokenize
        return await trio.to_thread.run_sync(tokenize, prompt, params, is_first, limiter=self._tokenizer_limiter)

    def _abort_state(
        self, state: RequestState, reason: AbortReason = AbortReason.CLIENT, *, told: bool = False
    ) -> None:
        self._client.abort_requests(state.request_ids if told else state.forget(), reason)

    def check_room(self, num_completions: int) -> None:
        """Refuse at once what could not be started whole; nothing is reserved.

        Raises:
            InvalidRequest: So many completions may never run or wait at once.
            QueueFull: So many are too many now.
        """
        self._client.check_room(num_completions)

    def give_up(self, cause: Cause) -> None:
        """Count the engine as dead for `cause`: every stream and waiter learns of it at once.

        Those of the engines that have requests in flight are killed.
        """
        self._client.kill_engines(lambda engine: engine.num_live > 0)
        self._client.declare_dead(EngineDeadError(cause))
        self._tell_end()

    def _check_accepts(self) -> None:
        if self._client.death is not None:
            raise self._client.death
        if self._is_stopping:
            raise EngineStopping("the engine is stopping and takes no new requests")

    # -- the engine ----------------------------------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """Whether the engine lives."""
        return self._client.death is None

    @property
    def death(self) -> EngineDeadError | None:
        """What ended the engine, if something did."""
        return self._client.death

    async def wait_ended(self) -> None:
        """Wait until the engine has stopped or died; `death` says how."""
        await self._ended.wait()

    def stats(self) -> SchedulerStats:
        """Return the scheduler's state as of the last message, that of several engines as if they were one."""
        return self._client.stats

    def stats_by_engine(self) -> list[SchedulerStats]:
        """Return each engine's scheduler's state as of its last message, by rank."""
        return [engine.stats for engine in self._client.engines]

    @property
    def readies(self) -> list[EngineReady]:
        """What each engine said when it was ready, by rank."""
        return [engine.ready for engine in self._client.engines]

    @property
    def busy_engines(self) -> str:
        """Which engines have requests in flight, for a message."""
        return self._client.name_engines(lambda engine: engine.num_live > 0)

    async def wait_for_stats(self, reached: Callable[[SchedulerStats], bool]) -> SchedulerStats:
        """Wait until `reached(stats)` holds of the scheduler's state and return it.

        Raises:
            EngineDeadError: The engine ended before.
        """
        await trio.lowlevel.checkpoint()
        while not reached(self._client.stats):
            if self._client.death is not None:
                raise self._client.death
            await self._stats_changed.wait()
        return self._client.stats

    @property
    def num_live(self) -> int:
        """Requests in flight: sent, and not yet answered by a terminal output."""
        return self._client.num_live

    async def call(self, verb: Verb, timeout_s: float | None = None) -> Any:
        """Run `verb` in the engine and return its answer, see `AsyncMPClient.call`."""
        return await self._client.call(verb, timeout_s)

    # -- owned by open_engine ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Receive until the engine stops or dies; every stream learns of it at once."""
        try:
            with telling("client", self._describe):
                while (message := await self._client.get_output()) is not None:
                    self._dispatch(message)
        except EngineDeadError as death:
            logger.debug("the engine died: %s\n%s", death, death.cause.traceback)
        finally:
            self._tell_end()

    def _describe(self) -> Iterator[str]:
        """Yield what one asks first when streams hang."""
        if self._last_message is None:
            last = "no message yet"
        else:
            age_s = trio.current_time() - self._last_message_s
            last = f"last message, of step {self._last_message.step}, {age_s:.3f} s ago"
        yield f"engine {'alive' if self.is_healthy else f'dead: {self.death}'}; {last}"
        streams = {id(stream) for _, stream in self._slots.values()}
        yield f"{len(streams)} live streams, {self.num_live} requests in flight"
        yield f"waiting calls: {', '.join(self._client.waiting_calls) or 'none'}"

    def _tell_end(self) -> None:
        if self._client.death is None:  # nobody receives any more, so nothing else would tell those who still wait
            self._client.declare_dead(EngineDeadError(Cause("EngineLeft", "the engine was left before it had stopped")))
        for _, stream in self._slots.values():
            stream.wake(self._client.death)
        self._slots.clear()
        self._ended.set()
        self._stats_changed.set()

    def drain(self) -> None:
        """Refuse new requests and verbs from now on; what was accepted goes on, also where it is paused or asleep."""
        self._is_stopping = True
        self._client.drain()

    async def aclose(self, timeout_s: float) -> EngineDeadError | None:
        """Abort what still runs, stop the engine and wait for its last word, at most `timeout_s`.

        Returns what went wrong meanwhile: the engine died, or it did not stop. A death known before is not told again.
        """
        if self._ended.is_set():
            return None
        self._is_stopping = True
        teardown.debug("engine asked to stop")
        self._client.abort_requests(list(self._slots), AbortReason.SHUTDOWN)
        self._client.shutdown()
        with trio.move_on_after(timeout_s):
            await self._ended.wait()
        if not self._ended.is_set():
            stuck = self._client.name_engines(lambda engine: not engine.has_stopped)
            self._client.kill_engines(lambda engine: not engine.has_stopped)
            return EngineDeadError(Cause("EngineStuck", f"{stuck} did not stop within {timeout_s:g} seconds"))
        return None if self._client.has_stopped else self.death

    def _dispatch(self, message: EngineCoreOutputs) -> None:
        stopped: list[RequestId] = []
        self._last_message, self._last_message_s = message, (now_s := trio.current_time())
        for output in message.outputs:
            slot = self._slots.get(output.request_id)
            if slot is None:
                continue
            state, stream = slot
            if state.receive(output, now_s):
                stopped.append(output.request_id)
            if output.finish_reason is not None:
                del self._slots[output.request_id]
                self._log_end(output, state, now_s)
            stream.wake()
        self._client.abort_requests(stopped, AbortReason.STOP_STRING)
        self._stats_changed.set()
        self._stats_changed = trio.Event()

    def _log_end(self, output: EngineCoreOutput, state: RequestState, now_s: float) -> None:
        if not logger.isEnabledFor(logging.DEBUG):
            return
        metrics = state.metrics
        first = "no token" if metrics.first_token_s is None else f"{metrics.first_token_s - metrics.arrival_s:.3f} s"
        logger.debug(
            "request %s ended: %s, %d prompt tokens (%d cached), %d generated, first token %s, in all %.3f s",
            output.request_id,
            output.finish_reason,
            len(state.prompt_token_ids),
            state.num_cached_tokens,
            state.usage.completion_tokens,
            first,
            now_s - metrics.arrival_s,
        )
