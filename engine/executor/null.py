"""The integer model: no weights, no torch, and yet its next token depends on all K/V it reads.

It has two layers, like the smallest transformer in which the K/V of a token depend on all tokens before it. Each keeps
one number a slot, read and written *through the block tables*, all modulo 2^64::

    layer 0, position p     id at p + 1
    layer 1, position p     sum over q <= p of layer 0 at q · factor(q)
    next token              32 + mix(sum over p of layer 1 at p · factor(p)  [, seed]) mod 95      printable ASCII

where a layer with a window sums over its last positions only. So a wrong table, a lost page or a hit on another
beginning's block gives another token. That makes it the oracle of the scheduler's tests, and a stand-in where no model
is wanted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.executor.base import Progress
from engine.kv_cache.spec import KVCacheSpec, choose_num_kv_blocks, num_blocks_for, num_page_tensors
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

Windows = tuple[int | None, int | None]
"""How many positions each layer sees, None for all."""

_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_Numbers = npt.NDArray[np.uint64]
_Slots = npt.NDArray[np.int64]


class NullModelRunner:
    """Runs plans on the integer model; the same seam as `engine.model_runner.ModelRunner`."""

    def __init__(self, config: EngineConfig, max_concurrent_plans: int = 1, *, windows: Windows = (None, None)) -> None:
        """Keep the settings; `start` allocates. `max_concurrent_plans` is what the capacity will state."""
        self._config = config
        self.windows = windows
        self._spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=1, item_size_bytes=4, windows=windows)
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
        groups = self._spec.groups(max_model_len)
        num_blocks = choose_num_kv_blocks(
            self._spec,
            config,
            max_model_len,
            available_memory_bytes(),
            num_tokens * self._spec.token_size_bytes,
            self._max_concurrent_plans,
        )
        self._pages = np.zeros((num_page_tensors(groups), num_blocks * config.block_size), dtype=np.uint64)
        self._groups = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._page_tensors = {layer: index for group in groups for index, layer in enumerate(group.layers)}
        progress("kv_pages", 1, 1)
        self._factors = _position_factors(max_model_len)
        self._offsets = np.arange(config.block_size)
        progress("warm_up", 1, 1)
        return Capacity(
            num_kv_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            model_digest="null",
            max_concurrent_plans=self._max_concurrent_plans,
            kv_cache_groups=groups,
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
        slots = [self._slots(row) for row in plan.requests]
        for row, (slots_0, _) in zip(plan.requests, slots, strict=True):
            self._write(0, row, slots_0, self._inputs(row).astype(np.uint64) + np.uint64(1))
        for row, (slots_0, slots_1) in zip(plan.requests, slots, strict=True):
            self._write(1, row, slots_1, self._attend(0, row.start, slots_0))
        sampled = [
            [self._sample(row, slots_1)] if row.samples else []
            for row, (_, slots_1) in zip(plan.requests, slots, strict=True)
        ]
        self._results.append(ModelRunnerOutput(step=plan.step, sampled_token_ids=sampled))

    def sample(self, grammar_masks: GrammarMasks | None = None) -> ModelRunnerOutput:
        """Return the result of the oldest executed plan not yet sampled; no plan has grammar rows, so no masks."""
        return self._results.popleft()

    def _default_max_model_len(self) -> int:
        """Return the context that the pages asked for can hold, for this model's own is boundless."""
        config = self._config
        num_blocks = config.num_gpu_blocks_override
        if num_blocks is None and config.kv_cache_memory_bytes is not None:
            num_blocks = config.kv_cache_memory_bytes // (self._spec.token_size_bytes * config.block_size)
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

    def _slots(self, row: ScheduledRequest) -> list[_Slots]:
        """Return for each layer where its block table puts the K/V of every position so far, `[end]` each."""
        end = row.start + row.num_tokens
        num_blocks = num_blocks_for(end, self._config.block_size)
        tables = [
            (table[:num_blocks, None] * self._config.block_size + self._offsets).reshape(-1)[:end]
            for table in row.block_tables
        ]
        return [tables[self._groups[layer]] for layer in range(len(self.windows))]

    def _write(self, layer: int, row: ScheduledRequest, slots: _Slots, numbers: _Numbers) -> None:
        """Put this step's K/V, `[num_tokens]`, into their slots."""
        self._pages[self._page_tensors[layer], slots[row.start :]] = numbers

    def _attend(self, layer: int, start: int, slots: _Slots) -> _Numbers:
        """Read all K/V in `slots`; return the weighted sum over the window of each position from `start` on."""
        window = self.windows[layer]
        sums = np.cumsum(self._pages[self._page_tensors[layer], slots] * self._factors[: len(slots)])
        seen = sums[start:].copy()
        if window is not None and window < len(slots):
            first = max(start, window)  # what lies before the window, whatever it is, is in both sums
            seen[first - start :] -= sums[first - window : len(slots) - window]
        return seen

    def _sample(self, row: ScheduledRequest, slots: _Slots) -> int:
        """Draw the token at position `start + num_tokens`, and remember it, for a later plan may need it late."""
        token_id = _draw(int(self._attend(1, len(slots) - 1, slots)[0]), row.sampling_params)
        self._sampled.setdefault(row.request_id, {})[len(slots)] = token_id
        return token_id


def expected_tokens(
    prompt_token_ids: Sequence[int], params: SamplingParams, num_tokens: int, windows: Windows = (None, None)
) -> list[int]:
    """Return the first `num_tokens` tokens the integer model gives `prompt_token_ids`, by definition, without pages.

    Ends (EOS, stop tokens) are not applied.
    """
    return list(islice(continuation(prompt_token_ids, params, windows), num_tokens))


def continuation(
    prompt_token_ids: Sequence[int], params: SamplingParams, windows: Windows = (None, None)
) -> Iterator[int]:
    """Yield the tokens the integer model gives `prompt_token_ids`, without end; O(1) each, after O(prompt)."""
    terms: tuple[list[int], list[int]] = ([], [])  # for each layer its numbers times their factors
    states = [0, 0]  # for each layer their sum over the window of the last position

    def read(token_id: int) -> None:
        number = token_id + 1
        for layer, window in enumerate(windows):
            terms[layer].append(number * _factor(len(terms[layer])) & _MASK)
            states[layer] += terms[layer][-1]
            if window is not None and window < len(terms[layer]):
                states[layer] -= terms[layer][-1 - window]
            number = states[layer] = states[layer] & _MASK

    for token_id in prompt_token_ids:
        read(token_id)
    while True:
        token_id = _draw(states[1], params)
        yield token_id
        read(token_id)


def _draw(state: int, params: SamplingParams) -> int:
    """Return the token of a state that stands for the logits: a function of (logits, params, seed, position)."""
    if not params.is_greedy:
        state ^= _mix((params.seed or 0) & _MASK)
    return FIRST_SAMPLED + _mix(state) % NUM_SAMPLED


def _mix(value: int) -> int:
    """Return the splitmix64 hash of a 64-bit number."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=DEFAULT_MAX_MODEL_LEN)
def _factor(position: int) -> int:
    """Return an odd 64-bit factor, so that every id at every position counts."""
    return _mix(position * _GAMMA) | 1


def _position_factors(num_positions: int) -> _Numbers:
    """Return `_factor` of each position, `[num_positions]`."""
    numbers = np.arange(1, num_positions + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (numbers ^ (numbers >> np.uint64(31))) | np.uint64(1)
