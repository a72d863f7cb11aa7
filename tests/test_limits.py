"""What can never run is said with its numbers before it costs anything."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.kv_cache.spec import max_blocks_for
from engine.limits import Limits, suited
from engine.outputs import Capacity, KVCacheGroup, RequestId
from engine.protocol import EngineCoreRequest
from engine.sampling_params import SamplingParams

BOTH_WAYS = (KVCacheGroup(layers=(0,)), KVCacheGroup(layers=(1,), is_causal=False))


def make_capacity(**settings: Any) -> Capacity:
    defaults = {"num_kv_blocks": 11, "block_size": 4, "max_model_len": 64, "vocab_size": 256, "model_digest": ""}
    return Capacity(**{**defaults, **settings})


def make_limits(capacity: Capacity) -> Limits:
    return Limits(
        EngineConfig(max_num_seqs=2, max_num_waiting=3),
        capacity,
        lambda num_tokens: max_blocks_for(capacity.kv_cache_groups, num_tokens, 4, 64),
    )


def make_request(token_ids: list[int], max_tokens: int | None = 4, **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineCoreRequest(RequestId("a"), "a", token_ids, params, arrival_time=0.0, **fields)


# Settings


def test_layers_that_see_what_comes_after_have_their_prompts_computed_at_once_and_nothing_cached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=4, long_prefill_token_threshold=8)
    with caplog.at_level(logging.INFO):
        core = EngineCore(config, make_capacity(kv_cache_groups=BOTH_WAYS))
    assert (core.config.enable_chunked_prefill, core.config.enable_prefix_caching) == (False, False)
    assert core.config.long_prefill_token_threshold == 0
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("chunked prefill and prefix caching are off: ")
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 64 must be at least the context of 65 tokens"):
        suited(config, make_capacity(kv_cache_groups=BOTH_WAYS, max_model_len=65))


def test_layers_that_see_only_what_came_before_keep_the_settings_and_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = EngineConfig(max_num_batched_tokens=32, max_num_seqs=4)
    with caplog.at_level(logging.INFO):
        assert suited(config, make_capacity()) is config
    assert not caplog.records


@pytest.mark.parametrize("num_tokens", [64, 65])
def test_without_chunks_a_step_holds_the_whole_context_or_the_start_is_refused(num_tokens: int) -> None:
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=4, enable_chunked_prefill=False)
    if num_tokens == 64:
        assert suited(config, make_capacity(max_model_len=num_tokens)) is config
    else:
        with pytest.raises(ConfigError, match=r"without chunked prefill .* 64 must be at least .* 65 tokens"):
            suited(config, make_capacity(max_model_len=num_tokens))


# Requests


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_blocks"),
    [(37, 4, None), (38, 4, 11), (1, 40, None), (1, 41, 11), (40, 1, None), (41, 1, 11), (1, None, 16)],
)
def test_a_request_is_refused_exactly_if_all_its_tokens_but_the_last_exceed_the_pool(
    num_prompt: int, max_tokens: int | None, num_blocks: int | None
) -> None:
    refusal = make_limits(make_capacity()).refusal(make_request([1] * num_prompt, max_tokens), 0)
    if num_blocks is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert (refusal.type, f"need {num_blocks} KV blocks of 4 tokens, there are 10" in refusal.message) == (
            "PromptTooLong",
            True,
        )


def test_a_window_counts_for_what_it_can_hold_at_most() -> None:
    capacity = make_capacity(kv_cache_groups=(KVCacheGroup(layers=(0,), sliding_window=4),), max_model_len=1000)
    fits = msgspec.structs.replace(capacity, num_kv_blocks=19)  # ceil((4 - 1 + 64) / 4) + 1 and the null block
    assert make_limits(fits).refusal(make_request([1] * 900), 0) is None
    short = make_limits(msgspec.structs.replace(fits, num_kv_blocks=18))
    assert "need 18 KV blocks of 4 tokens, there are 17" in short.refusal(make_request([1] * 900), 0).message


@pytest.mark.parametrize(
    ("extras", "said"),
    [
        ({"session": True}, None),
        ({}, None),
        (None, None),
        ({"adapter": "x"}, "['adapter']"),
        ({"session": True, "media": []}, "['media', 'session']"),
    ],
)
def test_parts_that_are_not_built_are_refused_by_name(extras: dict[str, Any] | None, said: str | None) -> None:
    refusal = make_limits(make_capacity()).refusal(make_request([1], extras=extras), 0)
    assert (refusal is None) == (said is None)
    assert refusal is None or f"extras {said} are not supported" in refusal.message
