"""`LLM`: prompts in, finished texts out, synchronous. The first file to read, and the served path's oracle.

By default all of it happens in the caller's thread, in three short pages, one above the other::

    LLM.generate            feeds prompts as there is room, and steps until all have ended
    LLMEngine.step          turns a step's tokens into text               (llm_engine.py)
    InprocClient._advance   one step: plan, execute, commit               (client/inproc.py)

The served path has the same input processor, core, runner and output processor, with tasks and sockets between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec
from tqdm import tqdm

from engine.client.input_processor import Messages, PromptInput
from engine.client.output_processor import RequestOutput
from engine.client.synchronous import STOP_TIMEOUT_S
from engine.llm_engine import Isolation, LLMEngine
from engine.metrics import SchedulerStats
from engine.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from engine.sampling.logits_processor import LogitsProcessor


class LLM:
    """A model for one thread. Prompts in, finished texts out, order kept. A context manager, as `LLMEngine` is.

    Attributes:
        config: The settings, resolved.
        tokenizer: Of the model.
        model_name: What the model is called.
        ready: What the engine can hold.
        client: The face of the engine, for who measures it.
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

        `logits_processors`, see `engine.LogitsProcessor`, are applied in their order, in this thread.

        With isolation "process" the engine runs in a process of its own, until `shutdown` or this process's end.

        Raises:
            ConfigError: A setting is wrong or the model cannot be had.
            ModelError: The model cannot be served.
            EngineDeadError: The engine's process died while starting.
        """
        self._engine = LLMEngine(model, isolation=isolation, logits_processors=logits_processors, **settings)
        self.config = self._engine.config
        self.tokenizer = self._engine.tokenizer
        self.model_name = self._engine.model_name
        self.client = self._engine.client
        self.ready = self.client.ready

    def __enter__(self) -> Self:
        """Give the model itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Shut the engine down."""
        self._engine.__exit__(kind, error, tb)

    def shutdown(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Free everything; idempotent. See `LLMEngine.shutdown`."""
        self._engine.shutdown(timeout_s)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt (text or token ids) or a list of them; one output a prompt, in order.

        Raises:
            RequestError: A prompt or parameter was refused; nothing was started.
            EngineDeadError: The engine died.
        """
        many: Any = [prompts] if _is_one(prompts) else list(cast(Any, prompts))
        params = params or SamplingParams(**self.tokenizer.sampling_defaults)
        return self._run(many, msgspec.structs.replace(params, output_kind=OutputKind.FINAL_ONLY), use_tqdm)

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
        return self._engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; returns whether that was done."""
        return self._engine.reset_prefix_cache()

    def _run(self, prompts: list[PromptInput], params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        engine = self._engine
        prepared = [engine.prepare(prompt, params, OutputKind.FINAL_ONLY) for prompt in prompts]
        waiting = deque((state, request) for state, requests in prepared for request in requests)
        outputs: dict[str, RequestOutput] = {}
        try:
            with tqdm(total=len(prompts), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:
                while waiting or engine.has_unfinished_requests():
                    while waiting and self.client.num_live < self.client.max_num_live:
                        state, request = waiting.popleft()
                        engine.start(state, [request])
                    for output in engine.step():
                        outputs[output.request_id] = output
                        bar.update()
        finally:
            if self.client.death is None:
                engine.abort_all()
        return [outputs[state.request_id] for state, _ in prepared]


def _is_one(prompts: Any) -> bool:
    """Whether `prompts` is one prompt (text, token ids, chat messages, or none at all) and not a list of them."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], int | Mapping)
