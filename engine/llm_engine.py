"""`LLMEngine`: requests in, steps, outputs out, without an event loop.

Whoever calls it is the loop::

    engine.add_request("a", "Once upon a time", params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            ...

The engine runs in this very thread (`InprocClient`: one `step` is one step of it), or in a process of its own
(`SyncMPClient`: it runs a few steps ahead of its caller, and `step` waits for its next outputs). An interrupt may come
anywhere: what a `step` had not returned, the next one returns.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from engine.client.inproc import InprocClient
from engine.client.input_processor import InputProcessor, PromptInput, RequestOptions
from engine.client.interrupts import InterruptsHeld
from engine.client.output_processor import RequestOutput, RequestState
from engine.client.synchronous import STOP_TIMEOUT_S
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.launch import check_face, make_client
from engine.loading import open_model
from engine.metrics import SchedulerStats
from engine.models import NULL_MODEL
from engine.outputs import RequestId
from engine.progress import show_progress
from engine.protocol import AbortReason, EngineCoreOutputs, EngineCoreRequest, ResetPrefixCache
from engine.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from engine.sampling.logits_processor import LogitsProcessor

_NO_OPTIONS = RequestOptions()
Isolation = Literal["none", "process"]
"""Where the engine runs: in the caller's thread, or in a process of its own."""


class LLMEngine:
    """A model and its requests, for one thread. A context manager; with isolation "process" leaving it is due.

    Attributes:
        config: The settings, resolved.
        tokenizer: Of the model.
        model_name: What the model is called.
        client: The face of the engine, for who measures it or asks it for a verb.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        isolation: Isolation = "none",
        logits_processors: Sequence[LogitsProcessor] = (),
        **settings: Any,
    ) -> None:
        """Load `model` (the default model when None); `settings` are the fields of `EngineConfig`.

        `logits_processors` are applied in their order, in this thread.

        Raises:
            ConfigError: A setting is wrong or the model cannot be had.
            ModelError: The model cannot be served.
            EngineDeadError: The engine's process died while starting.
        """
        asked = EngineConfig.of(**settings) if model is None else EngineConfig.of(model=model, **settings)
        check_face(isolation, trio=False, data_parallel_size=asked.data_parallel_size)
        _check_logits_processors(logits_processors, isolation, asked.model)
        with show_progress() as progress:
            self.config, self.tokenizer, self.model_name = open_model(asked, progress)
            self.client = make_client(self.config, isolation=isolation, trio=False, progress=progress)
        if logits_processors:
            runner: Any = cast(InprocClient, self.client).runner
            runner.logits_processors = tuple(logits_processors)
        self._input_processor = InputProcessor(
            self.config, self.client.ready, self.tokenizer, has_logits_processors=bool(logits_processors)
        )
        self._slots: dict[RequestId, RequestState] = {}
        self._news: list[RequestOutput] = []

    def __enter__(self) -> Self:
        """Give the engine itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Shut down; what goes wrong meanwhile is raised only where the body ended well."""
        self.client.__exit__(kind, error, tb)

    def shutdown(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End all requests and free everything; idempotent. Their last outputs may still be read by `step`.

        Raises:
            EngineDeadError: The engine died meanwhile, or did not stop in time and was killed.
        """
        self.client.shutdown(timeout_s)

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client_key: str | None = None,
    ) -> None:
        """Start a request; `request_id` is the label of its outputs. They hold all so far, unless `params` say else.

        Raises:
            TypeError: `request_id` is no string.
            RequestError: The request was refused and nothing was started.
            EngineDeadError: The engine has ended.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id).__name__}")
        options = RequestOptions(request_id, priority, cache_salt, client_key)
        state, requests = self.prepare(prompt, params, OutputKind.CUMULATIVE, options)
        self.client.check_room(len(requests))
        self.start(state, requests)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End the requests with these labels; each gets a last output with reason abort. Unknown ones are ignored."""
        labels = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        ids = [request_id for request_id, state in self._slots.items() if state.request_id in labels]
        self.client.abort_requests(ids, AbortReason.CLIENT)

    def has_unfinished_requests(self) -> bool:
        """Whether a further `step` is due."""
        return bool(self._slots or self._news)

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that the engine has not said its last word of."""
        return len({id(state) for state in self._slots.values()})

    def step(self) -> list[RequestOutput]:
        """Take a step, or wait for one; return what is new, one output a request. Nothing to do: returns at once.

        Interrupted, it has lost nothing: what it would have returned comes with the next.

        Raises:
            EngineDeadError: The engine died; in the caller's thread by the second step that fails in a row.
        """
        if self._slots and not self._news:
            message = self.client.peek_output()
            if message is not None:
                with InterruptsHeld():
                    self.client.drop_output()
                    self._take_in(message)
        # From here to the caller's assignment there is no call, so no interrupt either.
        news = self._news
        self._news = []
        return news

    # -- the engine ----------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Return the scheduler's state after the last step that was read."""
        return self.client.stats

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget cached prefixes; returns False while blocks are in use, unless running requests are preempted."""
        return bool(self.client.call(ResetPrefixCache(reset_running)))

    # -- for LLM -------------------------------------------------------------------------------------------------

    def prepare(
        self,
        prompt: PromptInput,
        params: SamplingParams | None,
        kind: OutputKind,
        options: RequestOptions = _NO_OPTIONS,
    ) -> tuple[RequestState, list[EngineCoreRequest]]:
        """Return what `start` takes, one request a completion; `kind` holds where `params` do not say.

        Raises:
            RequestError: The prompt, an option or a parameter was refused.
        """
        params = params or SamplingParams(**self.tokenizer.sampling_defaults)
        tokenized = self._input_processor.tokenize(prompt, params)
        label, requests = self._input_processor.make_requests(tokenized, params, options)
        kind = params.output_kind or kind
        state = RequestState(label, tokenized.text, requests, kind, self.tokenizer, time.monotonic())
        return state, requests

    def start(self, state: RequestState, requests: Sequence[EngineCoreRequest]) -> None:
        """Start completions of a prepared request, none if interrupted; raises QueueFull or EngineDeadError."""
        adds = [self.client.prepare_request(request) for request in requests]
        with InterruptsHeld():
            for request, add in zip(requests, adds, strict=True):
                add()
                self._slots[request.request_id] = state

    def abort_all(self) -> None:
        """End every request and forget what was not read of them."""
        self.client.abort_requests(list(self._slots), AbortReason.CLIENT)
        while self._slots:
            self.step()
        self._news.clear()

    def _take_in(self, message: EngineCoreOutputs) -> None:
        """Make text of `message` and note what is to be returned."""
        now_s = time.monotonic()
        stopped: list[RequestId] = []
        touched: dict[int, RequestState] = {}
        for output in message.outputs:
            state = self._slots.get(output.request_id)
            if state is None:
                continue
            touched[id(state)] = state
            if state.receive(output, now_s):
                stopped.append(output.request_id)
            if output.finish_reason is not None:
                del self._slots[output.request_id]
        if stopped:
            self.client.abort_requests(stopped, AbortReason.STOP_STRING)
        self._news += [news for news in map(RequestState.fetch_all, touched.values()) if news is not None]


def _check_logits_processors(logits_processors: Sequence[LogitsProcessor], isolation: str, model: str) -> None:
    """Refuse processors where they could not be called; raises ConfigError."""
    if logits_processors and isolation != "none":
        raise ConfigError(f'logits_processors are called in this thread: they need isolation="none", got {isolation!r}')
    if logits_processors and model == NULL_MODEL:
        raise ConfigError("logits_processors need a model with logits, and the integer model has none")
    for processor in logits_processors:
        if not callable(processor):
            raise ConfigError(f"a logits processor is called with logits and rows, and {processor!r:.80} cannot be")
