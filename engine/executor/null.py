"""The integer model: no weights, no torch, and yet its next token depends on all K/V it reads.

It has two layers, like the smallest transformer in which the K/V of a token depend on all tokens before it. Each keeps
one number a slot, read and written *through the block tables*, all modulo 2^64::

    layer 0, position p     id at p + 1
    layer 1, position p     sum over q <= p of layer 0 at q · factor(q)
    next token              32 + mix(sum over p of layer 1 at p · factor(p)  [, seed]) mod 95      printable ASCII

So a wrong table, a lost page or a hit on another beginning's block gives another token. That makes it the oracle of
the scheduler's tests, and a stand-in where no model is wanted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.executor.base import Progress
from engine.kv_cache.spec import KVCacheSpec, choose_num_kv_blocks, num_blocks_for
from engine.model_runner.memory import available_memory_bytes
from engine.outputs import (
    Capacity,
    GrammarMasks,
    ModelRunnerOutput,
    RequestId,
    ScheduledRequest,
    SchedulerOutput,
    TokenArray,
)
from engine.sampling_params import SamplingParams

VOCAB_SIZE = 256
"""A token is a byte."""
FIRST_SAMPLED, NUM_SAMPLED = 32, 95
"""The model answers in printable ASCII."""
DEFAULT_MAX_MODEL_LEN = 8192
DEFAULT_KV_TOKENS = 65536
"""Tokens the pages hold where no setting says otherwise."""

_SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=1, item_size_bytes=4)  # 8 bytes a layer: key and value
_MASK = 2**64 - 1
_Numbers = npt.NDArray[np.uint64]


class NullModelRunner:
    """Runs plans on the integer model; the same seam as `engine.model_runner.ModelRunner`."""

    def __init__(self, config: EngineConfig, max_concurrent_plans: int = 1) -> None:
        """Keep the settings; `start` allocates. `max_concurrent_plans` is what the capacity will state."""
        self._config = config
        self._max_concurrent_plans = max_concurrent_plans
        self._results: deque[ModelRunnerOutput] = deque()
        self._sampled: dict[RequestId, dict[int, int]] = {}

    def start(self, progress: Progress) -> Capacity:
        """Allocate the pages and say what fits; the phases are those of every executor.

        Raises:
            ConfigError: The pages asked for are not available, or too few for one request of --max-model-len.
        """
        config = self._config
        for phase in ("weights", "kv_specs", "profile"):
            progress(phase, 1, 1)
        max_model_len = config.max_model_len or self._default_max_model_len()
        num_tokens = max(DEFAULT_KV_TOKENS, max_model_len + config.block_size)
        default = num_tokens * _SPEC.token_size_bytes
        num_blocks = choose_num_kv_blocks(_SPEC, config, max_model_len, available_memory_bytes(), default)
        self._pages = np.zeros((_SPEC.num_layers, num_blocks, config.block_size), dtype=np.uint64)
        progress("kv_pages", 1, 1)
        self._factors = _position_factors(max_model_len)
        progress("warm_up", 1, 1)
        return Capacity(
            num_kv_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            model_digest="null",
            max_concurrent_plans=self._max_concurrent_plans,
        )

    def execute(self, plan: SchedulerOutput) -> None:
        """Run one step: drop what ended, then layer by layer write all rows' K/V before any is read.

        Plans come in order. Without grammar rows sampling follows at once, so that a later plan's late tokens are
        known when its turn comes.
        """
        if plan.requests and self._config.null_step_ms:
            time.sleep(self._config.null_step_ms / 1000)  # the simulated device, on the executor's own thread
        for request_id in plan.finished_request_ids:
            self._sampled.pop(request_id, None)
        for row in plan.requests:
            self._write(0, row, self._inputs(row).astype(np.uint64) + np.uint64(1))
        for row in plan.requests:
            self._write(1, row, self._attend(0, row)[row.start :])
        sampled = [[self._sample(row)] if row.samples else [] for row in plan.requests]
        self._results.append(ModelRunnerOutput(step=plan.step, sampled_token_ids=sampled))

    def sample(self, grammar_masks: GrammarMasks | None = None) -> ModelRunnerOutput:
        """Return the result of the oldest executed plan not yet sampled; no plan has grammar rows, so no masks."""
        return self._results.popleft()

    def _default_max_model_len(self) -> int:
        """Return the context that the pages asked for can hold, for this model's own is boundless."""
        config = self._config
        num_blocks = config.num_gpu_blocks_override
        if num_blocks is None and config.kv_cache_memory_bytes is not None:
            num_blocks = config.kv_cache_memory_bytes // (_SPEC.token_size_bytes * config.block_size)
        if num_blocks is None:
            return DEFAULT_MAX_MODEL_LEN
        return max(2, min(DEFAULT_MAX_MODEL_LEN, num_blocks * config.block_size))

    def _inputs(self, row: ScheduledRequest) -> TokenArray:
        """Return this step's token ids, `[num_tokens]`, the late ones as sampled by uncommitted steps."""
        end = row.start + row.num_tokens
        sampled = self._sampled.get(row.request_id, {})
        for position in [position for position in sampled if position < len(row.tokens)]:
            del sampled[position]
        late = [sampled[position] for position in range(end - row.num_late, end)]
        return np.concatenate([row.tokens[row.start : end - row.num_late], np.array(late, dtype=np.int32)])

    def _write(self, layer: int, row: ScheduledRequest, numbers: _Numbers) -> None:
        """Put this step's K/V, `[num_tokens]`, into the slots that the block table gives them."""
        positions = np.arange(row.start, row.start + row.num_tokens)
        blocks = row.block_tables[0][positions // self._config.block_size]
        self._pages[layer, blocks, positions % self._config.block_size] = numbers

    def _attend(self, layer: int, row: ScheduledRequest) -> _Numbers:
        """Read all K/V of `row` up to this step's end; return the weighted sum at each position, `[end]`."""
        end = row.start + row.num_tokens
        num_blocks = num_blocks_for(end, self._config.block_size)
        pages = self._pages[layer, row.block_tables[0][:num_blocks]]
        return np.cumsum(pages.reshape(-1)[:end] * self._factors[:end])

    def _sample(self, row: ScheduledRequest) -> int:
        """Draw the token at position `start + num_tokens`, and remember it, for a later plan may need it late."""
        token_id = _draw(int(self._attend(1, row)[-1]), row.sampling_params)
        self._sampled.setdefault(row.request_id, {})[row.start + row.num_tokens] = token_id
        return token_id


def expected_tokens(prompt_token_ids: Sequence[int], params: SamplingParams, num_tokens: int) -> list[int]:
    """Return the first `num_tokens` tokens the integer model gives `prompt_token_ids`, by definition, without pages.

    Ends (EOS, stop tokens) are not applied.
    """
    token_ids = list(prompt_token_ids)
    factors = _position_factors(len(token_ids) + num_tokens)
    for _ in range(num_tokens):
        weights = factors[: len(token_ids)]
        layer_1 = np.cumsum((np.array(token_ids, dtype=np.uint64) + np.uint64(1)) * weights)
        token_ids.append(_draw(int(np.sum(layer_1 * weights)), params))
    return token_ids[len(prompt_token_ids) :]


def _draw(state: int, params: SamplingParams) -> int:
    """Return the token of a state that stands for the logits: a function of (logits, params, seed, position)."""
    if not params.is_greedy:
        state ^= _mix((params.seed or 0) & _MASK)
    return FIRST_SAMPLED + _mix(state) % NUM_SAMPLED


def _mix(value: int) -> int:
    """Return the splitmix64 hash of a 64-bit number."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _position_factors(num_positions: int) -> _Numbers:
    """Return an odd 64-bit factor for each position, so that every id at every position counts, `[num_positions]`."""
    numbers = np.arange(1, num_positions + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (numbers ^ (numbers >> np.uint64(31))) | np.uint64(1)
