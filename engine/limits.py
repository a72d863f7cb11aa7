"""What can never run on a given executor, said with the numbers before it costs anything."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from engine.config import EngineConfig
from engine.errors import Cause, ConfigError
from engine.outputs import Capacity
from engine.protocol import EngineCoreRequest
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


def suited(config: EngineConfig, capacity: Capacity) -> EngineConfig:
    """Return `config` with what the model's layers cannot do switched off.

    Raises:
        ConfigError: Prompts must be computed at once, and one of full length would never fit a step.
    """
    reason = "without chunked prefill"
    if not all(group.is_causal for group in capacity.kv_cache_groups):
        reason = "with layers in which a token sees what comes after it"
        logger.info("chunked prefill and prefix caching are off: %s prompts are computed at once", reason)
        config = msgspec.structs.replace(
            config, enable_chunked_prefill=False, enable_prefix_caching=False, long_prefill_token_threshold=0
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < capacity.max_model_len:
        raise ConfigError(
            f"{reason} --max-num-batched-tokens {config.max_num_batched_tokens} must be at least "
            f"the context of {capacity.max_model_len} tokens: raise it or lower --max-model-len"
        )
    return config


class Limits:
    """Refuses requests that could wait for ever."""

    def __init__(self, config: EngineConfig, capacity: Capacity, max_blocks: Callable[[int], int]) -> None:
        """Hold requests against these; `max_blocks` gives the most KV blocks that so many tokens ever take."""
        self._config = config
        self._capacity = capacity
        self._max_blocks = max_blocks

    def refusal(self, request: EngineCoreRequest, num_live: int) -> Cause | None:
        """Say why `request` cannot be taken beside `num_live` others, with the numbers, or None if it can.

        A client counts its live requests and never comes that far; the bound holds whoever asks.
        """
        config = self._config
        if num_live >= config.max_num_seqs + config.max_num_waiting:
            message = f"{num_live} requests run or wait, as many as --max-num-seqs {config.max_num_seqs} and "
            return Cause("QueueFull", f"{message}--max-num-waiting {config.max_num_waiting} allow: try later")
        if request.extras and request.extras.keys() != {"session"}:
            return Cause("InvalidRequest", f"extras {sorted(request.extras)} are not supported by this version")
        return self.prompt_refusal(request.prompt_token_ids, 0, request.sampling_params)

    def part_refusal(self, num_parts: int) -> Cause | None:
        """Say why a session with `num_parts` parts still to come takes no further one for now, or None if it does."""
        if num_parts < self._config.max_num_waiting:
            return None
        message = f"{num_parts} parts of the session wait, as many as --max-num-waiting {self._config.max_num_waiting}"
        return Cause("QueueFull", f"{message} allows: send the next one when a turn has ended")

    def prompt_refusal(self, token_ids: list[int], num_before: int, params: SamplingParams) -> Cause | None:
        """Say why these prompt tokens, behind `num_before` known ones, can never be computed here, or None."""
        capacity, num_prompt, max_tokens = self._capacity, num_before + len(token_ids), params.max_tokens
        if params.n != 1:
            return Cause("InvalidRequest", f"n is {params.n}: a request in the engine is one completion")
        if not token_ids:
            return Cause("InvalidRequest", "the prompt has no tokens; it needs at least one")
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= capacity.vocab_size:
            message = f"prompt token ids are from {lowest} to {highest}, allowed are 0 to {capacity.vocab_size - 1}"
            return Cause("InvalidRequest", message)
        if num_prompt >= capacity.max_model_len:
            message = f"the prompt has {num_prompt} tokens and the context holds {capacity.max_model_len}, one of them "
            return Cause("PromptTooLong", f"{message}to generate: shorten the prompt or raise --max-model-len")
        most = capacity.max_model_len
        num_total = most if max_tokens is None else min(most, num_prompt + max_tokens)
        num_blocks = self._max_blocks(num_total - 1)  # the last token's K/V is never needed
        if num_blocks > capacity.num_kv_blocks - 1:
            message = f"prompt of {num_prompt} and max_tokens {max_tokens} need {num_blocks} KV blocks of "
            message += f"{capacity.block_size} tokens, there are {capacity.num_kv_blocks - 1}"
            return Cause("PromptTooLong", f"{message}: lower max_tokens or raise --kv-cache-memory-bytes")
        return None
