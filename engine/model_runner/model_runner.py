"""Runs plans on this process's own model: weights, K/V pages, forward, sampling. Synchronous, for one thread.

The runner follows the plan. What it keeps between steps is the K/V the plans ordered, and the tokens of steps that
may be uncommitted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from engine.attention.base import AttentionPages
from engine.config import EngineConfig
from engine.errors import Cause
from engine.kv_cache.spec import NULL_BLOCK, KVCacheSpec, choose_num_kv_blocks, num_blocks_for
from engine.model_runner.input_batch import InputBatch, LateTokens, flatten
from engine.model_runner.memory import (
    available_memory_bytes,
    give_back_memory,
    held_memory_bytes,
    num_available_cores,
    step_threads,
)
from engine.models.base import BuiltModel, Model, ModelShape
from engine.models.checkpoint import model_digest, stored_tensors
from engine.models.memory_estimate import refuse_what_cannot_fit
from engine.models.registry import build_model, own_row_bytes, own_shape
from engine.models.save import save_sharded
from engine.outputs import (
    Capacity,
    GrammarMasks,
    Logprobs,
    ModelRunnerOutput,
    RequestId,
    ScheduledRequest,
    SchedulerOutput,
)
from engine.sampling import processors
from engine.sampling.logits_processor import LogitsProcessor
from engine.sampling.processors import gather_logprobs
from engine.sampling.sampler import Greatest, Samples, sample
from engine.sampling_params import SamplingParams
from engine.verbs import SleepTag

logger = logging.getLogger(__name__)

MAX_CONCURRENT_PLANS = 1
"""Plans that may be uncommitted when another is executed, itself included."""

PROMPT_ROWS_AT_ONCE = 64
"""Rows of a prompt scored together for its logprobs: with 256k tokens, 64 MiB."""


@dataclass(frozen=True, slots=True)
class _Executed:
    """A plan whose forward has run and whose sampling has not."""

    plan: SchedulerOutput
    batch: InputBatch | None
    hidden: torch.Tensor
    prompt_hidden: Sequence[torch.Tensor]
    timings: dict[str, float]


class ModelRunner:
    """One model on one device. Not thread-safe: `start`, `execute` and `sample` belong to one thread.

    Attributes:
        attention: The backend and its pages, once started; public for who measures it.
        capacity: What `start` returned.
        logits_processors: Those of the program that has the engine in its own thread; set by `LLMEngine`.
    """

    attention: AttentionPages
    capacity: Capacity

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        """Run the model of `folder`, in Hugging Face layout; nothing is read before `start`."""
        self.logits_processors: Sequence[LogitsProcessor] = ()
        self._config = config
        self._folder = folder
        self._executed: _Executed | None = None
        self._late_tokens = LateTokens(MAX_CONCURRENT_PLANS)
        self._model: Model | None = None
        self._greatest: Greatest = processors.greatest
        self._make_attention: Callable[[], AttentionPages]

    @torch.inference_mode()
    def start(self, progress: Callable[[str, int, int], None]) -> Capacity:
        """Load, allocate and warm up; sets this thread's and torch's thread count.

        Args:
            progress: Called in this thread with (phase, done, total); phases weights, kv_specs, profile, kv_pages,
                warm_up, in this order.

        Raises:
            ConfigError: The settings cannot be had with this model or machine, with the numbers.
            ModelError: The folder's model is unsupported, incomplete or corrupt.
        """
        # Engines of one front start together, on the same cores and the same memory.
        num_engines = self._config.data_parallel_size
        num_threads = self._num_threads = self._config.num_threads or step_threads(num_available_cores(), num_engines)
        torch.set_num_threads(num_threads)
        shared = f", which {num_engines} engines share" if num_engines > 1 else ""
        logger.info("threads: %d, cores: %d%s", num_threads, num_available_cores(), shared)
        progress("weights", 0, 0)
        available = available_memory_bytes() // num_engines
        own = own_shape(self._folder, self._config)
        row_bytes = 0 if own is None else own_row_bytes(self._folder, self._config, own)
        estimate = refuse_what_cannot_fit(self._folder, self._config, available, own, row_bytes)
        logger.info("%s needs %s", self._folder, estimate)
        built = build_model(self._folder, self._config, partial(progress, "weights"))
        max_model_len, self._dtype = built.max_model_len, built.dtype
        self._take(built)
        shape = built.model.config
        progress("kv_specs", 0, 1)
        spec = _kv_cache_spec(shape, built.kv_dtype)
        progress("profile", 0, 1)
        groups = spec.groups(max_model_len)
        # A step takes its memory when it first comes.
        available = max(0, available_memory_bytes() - num_engines * (estimate.logits_bytes + estimate.rows_bytes))
        num_blocks = choose_num_kv_blocks(
            spec, self._config, max_model_len, available, available // (4 * num_engines), MAX_CONCURRENT_PLANS
        )
        progress("kv_pages", 0, 1)
        block_size = self._config.block_size
        self._make_attention = partial(
            built.make_pages, spec, groups, shape.num_heads, num_blocks, block_size, built.kv_dtype
        )
        self.attention = self._make_attention()
        built.model.use_attention(self.attention)
        progress("warm_up", 0, 1)
        self._warm_up(max_model_len, len(groups))
        give_back_memory()  # what loading took, a tenth of all that a small model needs
        progress("warm_up", 1, 1)
        self.capacity = Capacity(
            num_kv_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=shape.vocab_size,
            model_digest=model_digest(self._folder),
            max_concurrent_plans=MAX_CONCURRENT_PLANS,
            kv_cache_groups=groups,
        )
        return self.capacity

    def sleep(self, level: int) -> None:
        """Give back the pages (level 1) and the weights too (2), which `wake_up` reads again. Idempotent."""
        if level:
            self.attention.release_pages()
        if level > 1:
            self._model, self._greatest = None, processors.greatest
        give_back_memory()

    @torch.inference_mode()
    def wake_up(self, tags: Iterable[SleepTag]) -> None:
        """Take back what `tags` name and sleeps; pages come back empty.

        Raises:
            ModelError: The folder's model is not what it was.
        """
        if SleepTag.WEIGHTS in tags and self._model is None:
            torch.set_num_threads(self._num_threads)  # as in `start`: once loaded, a model may need fewer of torch's
            self._take(build_model(self._folder, self._config, _ignore_progress))
            give_back_memory()
        if SleepTag.KV_CACHE in tags and not self.attention.size_bytes:
            self.attention = self._make_attention()
        if self._model is not None and self.attention.size_bytes:
            self._model.use_attention(self.attention)

    def save_sharded_state(self, path: Path, max_size_bytes: int) -> list[str]:
        """Write the model's checkpoint, in the type it runs in, into the new folder `path`; see `save_sharded`."""
        return save_sharded(self._folder, path, self._dtype, max_size_bytes)

    def memory(self) -> dict[str, int]:
        """Return the bytes held now, by what holds them; the weights by their number and type, packed or not."""
        stored = {tensor.name: math.prod(tensor.shape) for tensor in stored_tensors(self._folder)}
        weights = 0 if self._model is None else self._dtype.itemsize * sum(stored.values())
        return {"kv_cache": self.attention.size_bytes, "weights": weights, "process": held_memory_bytes()}

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> None:
        """Run the forward of `plan`: its K/V is written, its sampling is due. An empty plan is legal."""
        if not plan.requests:
            self._executed = _Executed(plan, None, torch.empty(0), (), {})
            return
        began = time.perf_counter()
        batch = flatten(plan, self._late_tokens, reads_tokens=bool(self.logits_processors))
        prepared = self.attention.prepare(batch.attention)
        flattened = time.perf_counter()
        assert self._model is not None
        hidden = self._model.forward(batch.token_ids, batch.positions, prepared)
        prompt_hidden = [hidden[rows.first_row : rows.first_row + len(rows.targets)] for rows in batch.prompts]
        operations = self._model.operation_seconds
        rest = time.perf_counter() - flattened - sum(operations.values())
        timings = {"flatten": flattened - began, **operations, "forward": rest}
        are_all_last = len(batch.last_rows) == hidden.shape[0]
        last_hidden = hidden if are_all_last else hidden[batch.last_rows]
        self._executed = _Executed(plan, batch, last_hidden, prompt_hidden, timings)

    @torch.inference_mode()
    def sample(self, grammar_masks: GrammarMasks | None = None) -> ModelRunnerOutput:
        """Sample the plan executed last, before another is: a model keeps what it gave until its next forward.

        Args:
            grammar_masks: For the plan's `grammar_rows`, in that order.

        Raises:
            LookupError: There is none, or it has been sampled.
        """
        executed, self._executed = self._executed, None
        if executed is None:
            raise LookupError("sample() without an executed plan")
        plan, batch, timings = executed.plan, executed.batch, dict(executed.timings)
        token_ids: list[list[int]] = [[] for _ in plan.requests]
        failed: dict[RequestId, Cause] = {}
        logprobs: list[Logprobs | None] | None = None
        if batch is not None and batch.sampled:
            samples = self._sample(executed, batch, grammar_masks, timings)
            for i, (row, token_id) in enumerate(zip(batch.sampled, samples.token_ids, strict=True)):
                if i in samples.failed:
                    failed[plan.requests[row].request_id] = samples.failed[i]
                else:
                    token_ids[row].append(token_id)
            if samples.logprobs:
                logprobs = [None] * len(plan.requests)
                for i, row_logprobs in samples.logprobs.items():
                    logprobs[batch.sampled[i]] = row_logprobs
            sampled_ids = [plan.requests[row].request_id for row in batch.sampled]
            self._late_tokens.record(plan.step, dict(zip(sampled_ids, samples.token_ids, strict=True)))
        return ModelRunnerOutput(
            step=plan.step,
            sampled_token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(executed),
            failed=failed,
            timings=timings,
        )

    def _take(self, built: BuiltModel) -> None:
        self._model, self._greatest = built.model, built.greatest or processors.greatest

    def _prompt_logprobs(self, executed: _Executed) -> dict[RequestId, Logprobs] | None:
        """Score the prompts' tokens, a few rows at a time: all scores of a long chunk at once would take gigabytes."""
        if not executed.prompt_hidden:
            return None
        assert executed.batch is not None
        assert self._model is not None
        found = {}
        for rows, hidden in zip(executed.batch.prompts, executed.prompt_hidden, strict=True):
            targets = torch.from_numpy(rows.targets.astype(np.int64))
            pieces = zip(
                torch.split(hidden, PROMPT_ROWS_AT_ONCE), torch.split(targets, PROMPT_ROWS_AT_ONCE), strict=True
            )
            parts = [gather_logprobs(self._model.logits(piece), ids) for piece, ids in pieces]
            found[rows.request_id] = Logprobs.join(parts).part(0, len(targets), rows.num_top)
        return found

    def _sample(
        self, executed: _Executed, batch: InputBatch, masks: GrammarMasks | None, timings: dict[str, float]
    ) -> Samples:
        assert self._model is not None
        began = time.perf_counter()
        logits = self._model.logits(executed.hidden)
        scored = time.perf_counter()
        grammar_rows = [batch.sampled.index(row) for row in executed.plan.grammar_rows]
        samples = sample(logits, batch.sampling, grammar_rows, masks, self.logits_processors, self._greatest)
        timings["logits"] = timings.get("logits", 0.0) + scored - began  # or the most of it was a part of the forward
        timings["sample"] = time.perf_counter() - scored
        return samples

    def _warm_up(self, max_model_len: int, num_groups: int) -> None:
        """Run one step on the null block, so that the first request finds thread pools and kernels ready."""
        num_tokens = min(max_model_len - 1, self._config.max_num_batched_tokens, self._config.block_size)
        blocks = num_blocks_for(num_tokens, self._config.block_size)
        request = ScheduledRequest(
            request_id=RequestId("warm-up"),
            tokens=np.zeros(num_tokens, dtype=np.int32),
            start=0,
            num_tokens=num_tokens,
            block_tables=(np.full(blocks, NULL_BLOCK, dtype=np.int32),) * num_groups,
            samples=True,
            sampling_params=SamplingParams(seed=0),
        )
        self.execute(SchedulerOutput(step=0, requests=(request,), num_tokens=num_tokens))
        self.sample()
        self.attention.clear_null_block()


def _ignore_progress(done: int, total: int) -> None:
    """Show nothing."""


def _kv_cache_spec(shape: ModelShape, dtype: torch.dtype) -> KVCacheSpec:
    return KVCacheSpec(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        item_size_bytes=dtype.itemsize,
        scale_size_bytes=4 if dtype == torch.int8 else 0,
        windows=shape.windows,
    )
