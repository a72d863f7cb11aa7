"""`LLM`: the whole engine on one page, synchronous, in this thread. No task, no socket. Read this file first.

`generate` is the served path's oracle: the same input processor, core, runner and output processor, without anything
between them. One turn of its loop is one step: plan, execute, commit (`InprocClient.get_output`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from engine.client.inproc import InprocClient
from engine.client.input_processor import InputProcessor, Messages, PromptInput, RequestOptions
from engine.client.output_processor import RequestOutput, RequestState
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.executor.runners import make_runner
from engine.loading import open_model
from engine.metrics import SchedulerStats
from engine.outputs import RequestId
from engine.progress import show_progress
from engine.protocol import AbortReason, EngineCoreRequest, EngineReady
from engine.sampling_params import OutputKind, SamplingParams


class LLM:
    """A model in this process, for one thread. Prompts in, finished texts out, order kept.

    Attributes:
        core, runner, client: The parts, for who measures them; nobody else calls them.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Load `model` (the default model when None); `settings` are the fields of `EngineConfig`.

        Raises:
            ConfigError: A setting is wrong or the model cannot be had.
            ModelError: The model cannot be served.
        """
        asked = EngineConfig.of(**settings) if model is None else EngineConfig.of(model=model, **settings)
        if asked.data_parallel_size > 1:
            raise ConfigError(
                f"LLM runs one engine, in this process, and data_parallel_size is {asked.data_parallel_size}: leave it "
                "out, or use open_engine or serve"
            )
        with show_progress() as progress:
            self.config, self.tokenizer, self.model_name = open_model(asked, progress)
            self.runner = make_runner(self.config)
            capacity = self.runner.start(progress)
        self.core = EngineCore(self.config, capacity, hash_salt=(self.config.prefix_hash_seed or "").encode())
        self.ready = EngineReady.of(capacity, engine_index=0, pid=0)
        self.client = InprocClient(self.config, self.ready, self.core, self.runner)
        self._input_processor = InputProcessor(self.config, self.ready, self.tokenizer)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt (text or token ids) or a list of them; one output a prompt, in order.

        Raises:
            RequestError: A prompt or parameter was refused; nothing was started.
        """
        many: Any = [prompts] if _is_one(prompts) else list(prompts)
        return self._run(many, params or SamplingParams(**self.tokenizer.sampling_defaults), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; one output a conversation, in order."""
        return self.generate(messages, params, use_tqdm)

    def stats(self) -> SchedulerStats:
        """Return the scheduler's state after the last step."""
        return self.client.stats

    def _run(self, prompts: list[PromptInput], params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        prepared = [self._prepare(prompt, params) for prompt in prompts]
        waiting = deque(request for _, requests in prepared for request in requests)
        owners: dict[RequestId, RequestState] = {
            request_id: state for state, _ in prepared for request_id in state.request_ids
        }
        try:
            with tqdm(total=len(prompts), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:
                for _ in self._finish(waiting, owners):
                    bar.update()
        finally:
            self.client.abort_requests(list(owners), AbortReason.CLIENT)
            while self.client.has_work:
                self.client.get_output()
        return [state.output([c.final() for c in state.completions.values()]) for state, _ in prepared]

    def _finish(
        self, waiting: deque[EngineCoreRequest], owners: dict[RequestId, RequestState]
    ) -> Iterator[RequestState]:
        """Step until every request has ended; yields each once its last completion has."""
        while waiting or self.client.num_live:
            while waiting and self.client.num_live < self.client.max_num_live:
                self.client.add_request(waiting.popleft())
            stopped = []
            for output in self.client.get_output().outputs:
                state = owners[output.request_id]
                if state.add(output, time.monotonic()):
                    stopped.append(output.request_id)
                if output.finish_reason is not None:
                    del owners[output.request_id]
                    if owners.keys().isdisjoint(state.request_ids):
                        yield state
            self.client.abort_requests(stopped, AbortReason.STOP_STRING)

    def _prepare(self, prompt: PromptInput, params: SamplingParams) -> tuple[RequestState, list[EngineCoreRequest]]:
        tokenized = self._input_processor.tokenize(prompt)
        label, requests = self._input_processor.make_requests(tokenized, params, RequestOptions())
        kind = OutputKind.FINAL_ONLY
        state = RequestState(label, tokenized.text, requests, kind, self.tokenizer, time.monotonic())
        return state, requests


def _is_one(prompts: Any) -> bool:
    """Whether `prompts` is one prompt (text, token ids, chat messages, or none at all) and not a list of them."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], int | Mapping)
