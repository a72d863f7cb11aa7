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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.errors import Cause
from engine.executor.base import Progress
from engine.kv_cache.spec import KVCacheSpec, choose_num_kv_blocks, num_blocks_for, num_page_tensors
from engine.model_runner.memory import available_memory_bytes, held_memory_bytes
from engine.outputs import (
    Capacity,
    GrammarMasks,
    ModelRunnerOutput,
    RequestId,
    ScheduledRequest,
    SchedulerOutput,
)
from engine.sampling_params import SamplingParams
from engine.structured_output.grammar import Grammar, new_bitmasks
from engine.verbs import SleepTag

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
_ONE = np.uint64(1)
_Numbers = npt.NDArray[np.uint64]


class NullModelRunner:
    """Runs plans on the integer model; the same seam as `engine.model_runner.ModelRunner`.

    Attributes:
        capacity: What `start` returned.
    """

    capacity: Capacity

    def __init__(
        self,
        config: EngineConfig,
        max_concurrent_plans: int = 1,
        *,
        windows: Windows = (None, None),
        available_memory: Callable[[], int] = available_memory_bytes,
    ) -> None:
        """Keep the settings; `start` allocates.

        `max_concurrent_plans` is what the capacity will state, `available_memory` gives the bytes that pages may take.
        """
        self._config = config
        self.windows = windows
        self._spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=1, item_size_bytes=4, windows=windows)
        self._max_concurrent_plans = max_concurrent_plans
        self._available_memory = available_memory
        self._executed: deque[tuple[SchedulerOutput, list[int]]] = deque()
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
            self._available_memory(),
            num_tokens * self._spec.token_size_bytes,
            self._max_concurrent_plans,
        )
        self._factors = _position_factors(max_model_len)
        self.capacity = Capacity(
            num_kv_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            model_digest="null",
            max_concurrent_plans=self._max_concurrent_plans,
            kv_cache_groups=groups,
        )
        self._allocate_pages()
        progress("kv_pages", 1, 1)
        progress("warm_up", 1, 1)
        return self.capacity

    def _allocate_pages(self) -> None:
        groups = self.capacity.kv_cache_groups
        shape = (self.capacity.num_kv_blocks, self.capacity.block_size)
        tensors = [np.zeros(shape, dtype=np.uint64) for _ in range(num_page_tensors(groups))]
        places = {
            layer: (index, tensors[tensor])
            for index, group in enumerate(groups)
            for tensor, layer in enumerate(group.layers)
        }
        self._groups = [places[layer][0] for layer in sorted(places)]
        self._pages = [places[layer][1] for layer in sorted(places)]

    def sleep(self, level: int) -> None:
        """Give back the pages; there are no weights. Idempotent."""
        if level:
            self._pages = []

    def wake_up(self, tags: Iterable[SleepTag]) -> None:
        """Take back the pages, empty, if they sleep and `tags` name them."""
        if SleepTag.KV_CACHE in tags and not self._pages:
            self._allocate_pages()

    def save_sharded_state(self, path: Path, max_size_bytes: int) -> list[str]:
        """Refuse: there is nothing to save.

        Raises:
            ValueError: Always; the caller's fault.
        """
        raise ValueError("the null model has no weights to save")

    def memory(self) -> dict[str, int]:
        """Return the bytes held now, by what holds them."""
        pages = {id(page): page.nbytes for page in self._pages}
        return {"kv_cache": sum(pages.values()), "weights": 0, "process": held_memory_bytes()}

    def execute(self, plan: SchedulerOutput) -> None:
        """Run one step: drop what ended, then layer by layer write all rows' K/V before any is read.

        Plans come in order, each sampled before the next is executed that needs its tokens late.
        """
        if plan.requests and self._config.null_step_ms:
            time.sleep(self._config.null_step_ms / 1000)  # the simulated device, on the executor's own thread
        for request_id in plan.finished_request_ids:
            self._sampled.pop(request_id, None)
        for row in plan.requests:
            self._write(0, row, self._inputs(row))
        for row in plan.requests:
            self._write(1, row, self._attend(0, row) if row.num_tokens > 1 else self._attend_last(0, row))
        states = [self._attend_last(1, row) if row.samples else 0 for row in plan.requests]
        self._executed.append((plan, states))

    def sample(self, grammar_masks: GrammarMasks | None = None) -> ModelRunnerOutput:
        """Return the result of the oldest executed plan not yet sampled.

        Args:
            grammar_masks: For the plan's `grammar_rows`, in that order; a row whose mask allows nothing fails alone.
        """
        plan, states = self._executed.popleft()
        if not plan.grammar_rows:
            return self._draw(plan, states, {})
        masks = () if grammar_masks is None else grammar_masks
        return self._draw(plan, states, dict(zip(plan.grammar_rows, map(allowed_tokens, masks), strict=True)))

    def _draw(self, plan: SchedulerOutput, states: list[int], allowed: dict[int, list[int]]) -> ModelRunnerOutput:
        """Draw each sampling row's token, one of those `allowed` where that says so, and remember it.

        A later plan may need it late.
        """
        failed: dict[RequestId, Cause] = {}
        token_ids: list[list[int]] = [[] for _ in plan.requests]
        for index, (row, state) in enumerate(zip(plan.requests, states, strict=True)):
            if not row.samples:
                continue
            if allowed.get(index) == []:
                failed[row.request_id] = Cause("NothingAllowed", "the grammar's mask allows no token")
                continue
            token_id = _draw(state, row.sampling_params, allowed.get(index))
            token_ids[index].append(token_id)
            sampled = self._sampled.setdefault(row.request_id, {})
            for position in [position for position in sampled if position < len(row.tokens)]:
                del sampled[position]  # committed since, and so among the tokens of any later plan
            sampled[row.start + row.num_tokens] = token_id
        return ModelRunnerOutput(step=plan.step, sampled_token_ids=token_ids, failed=failed)

    def _default_max_model_len(self) -> int:
        """Return the context that the pages asked for can hold, for this model's own is boundless."""
        config = self._config
        num_blocks = config.num_gpu_blocks_override
        if num_blocks is None and config.kv_cache_memory_bytes is not None:
            num_blocks = config.kv_cache_memory_bytes // (self._spec.token_size_bytes * config.block_size)
        if num_blocks is None:
            return DEFAULT_MAX_MODEL_LEN
        return max(2, min(DEFAULT_MAX_MODEL_LEN, num_blocks * config.block_size))

    def _inputs(self, row: ScheduledRequest) -> _Numbers | int:
        """Return this step's token ids + 1, `[num_tokens]`, the late ones as sampled by uncommitted steps."""
        if row.num_tokens == 1:
            position = row.start
            return 1 + (self._sampled[row.request_id][position] if row.num_late else int(row.tokens[position]))
        end = row.start + row.num_tokens
        known = row.tokens[row.start : end - row.num_late]
        if row.num_late:
            sampled = self._sampled[row.request_id]
            late = [sampled[position] for position in range(end - row.num_late, end)]
            known = np.concatenate([known, np.array(late, dtype=np.int32)])
        return known.astype(np.uint64) + _ONE

    def _write(self, layer: int, row: ScheduledRequest, numbers: _Numbers | int) -> None:
        """Put the K/V of this step's tokens, `[num_tokens]`, where the layer's block table has their places."""
        table, block_size = row.block_tables[self._groups[layer]], self._config.block_size
        first, offset = divmod(row.start, block_size)
        if row.num_tokens == 1:
            self._pages[layer][table.item(first), offset] = numbers
        else:
            end = offset + row.num_tokens
            blocks = table[first : first + num_blocks_for(end, block_size)]
            slots = self._pages[layer].take(blocks, 0)
            slots.reshape(-1)[offset:end] = numbers
            self._pages[layer][blocks] = slots

    def _read(self, layer: int, row: ScheduledRequest) -> _Numbers:
        """Return the K/V of all tokens so far, `[start + num_tokens]`, from where the block table has them."""
        end = row.start + row.num_tokens
        blocks = row.block_tables[self._groups[layer]][: num_blocks_for(end, self._config.block_size)]
        return self._pages[layer].take(blocks, 0).ravel()[:end]

    def _attend_last(self, layer: int, row: ScheduledRequest) -> int:
        """Return the weighted sum over the window of the last position."""
        numbers, window = self._read(layer, row), self.windows[layer]
        factors = self._factors[: len(numbers)]
        if window is not None:
            numbers, factors = numbers[-window:], factors[-window:]
        return int(numbers.dot(factors))

    def _attend(self, layer: int, row: ScheduledRequest) -> _Numbers:
        """Return the weighted sum over the window of each of this step's positions, `[num_tokens]`."""
        numbers, start, window = self._read(layer, row), row.start, self.windows[layer]
        sums: _Numbers = (numbers * self._factors[: len(numbers)]).cumsum()
        if window is None or window >= len(numbers):
            return sums[start:]
        seen = sums[start:].copy()
        first = max(start, window)  # what lies before the window, whatever it is, is in both sums
        seen[first - start :] -= sums[first - window : len(numbers) - window]
        return seen


def expected_tokens(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    num_tokens: int,
    windows: Windows = (None, None),
    grammar: Grammar | None = None,
) -> list[int]:
    """Return the first `num_tokens` tokens the integer model gives `prompt_token_ids`, by definition, without pages.

    Ends (EOS, stop tokens) are not applied.
    """
    return list(islice(continuation(prompt_token_ids, params, windows, grammar), num_tokens))


def continuation(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    windows: Windows = (None, None),
    grammar: Grammar | None = None,
) -> Iterator[int]:
    """Yield the tokens the integer model gives `prompt_token_ids`, until `grammar`, which is advanced, allows none.

    O(1) each, after O(prompt).
    """
    terms: tuple[list[int], list[int]] = ([], [])  # for each layer its numbers times their factors
    states = [0, 0]  # for each layer their sum over the window of the last position

    def read(token_id: int) -> None:
        number, factor = token_id + 1, _factor(len(terms[0]))
        for layer, window in enumerate(windows):
            of_layer = terms[layer]
            of_layer.append(number * factor & _MASK)
            state = states[layer] + of_layer[-1]
            if window is not None and window < len(of_layer):
                state -= of_layer[-1 - window]
            number = states[layer] = state & _MASK

    for token_id in prompt_token_ids:
        read(token_id)
    while True:
        allowed = None
        if grammar is not None:
            mask = new_bitmasks(1, VOCAB_SIZE)[0]
            grammar.fill_bitmask(mask)
            allowed = allowed_tokens(mask)
        if allowed == []:
            return
        token_id = _draw(states[1], params, allowed)
        if grammar is not None:
            grammar.accept_tokens([token_id])
        yield token_id
        read(token_id)


def _draw(state: int, params: SamplingParams, allowed: Sequence[int] | None = None) -> int:
    """Return the token of a state that stands for the logits: a function of (logits, params, seed, position, mask)."""
    if not params.is_greedy:
        state ^= _mix((params.seed or 0) & _MASK)
    if allowed is not None:
        return allowed[_mix(state) % len(allowed)]
    return FIRST_SAMPLED + _mix(state) % NUM_SAMPLED


def allowed_tokens(mask: GrammarMasks) -> list[int]:
    """Return the token ids that `mask`, packed bits `[ceil(vocab_size / 32)]`, allows."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    token_ids: list[int] = np.flatnonzero(bits).tolist()
    return token_ids


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


@lru_cache(maxsize=64)
def _position_factors(num_positions: int) -> _Numbers:
    """Return `_factor` of each position, `[num_positions]`."""
    numbers = np.arange(1, num_positions + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (numbers ^ (numbers >> np.uint64(31))) | np.uint64(1)
