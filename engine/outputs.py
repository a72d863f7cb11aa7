"""What crosses scheduler and model runner, both ways: the plan of a step and its result.

A plan is complete: given the results of the earlier plans still in flight, a fresh runner could execute it. In one
process it refers to the requests' own buffers and copies nothing; a buffer it refers to is only appended to beyond
the view while the plan is in flight, and the blocks it names are released after its commit.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NewType

import msgspec
import numpy as np
import numpy.typing as npt

from engine.errors import Cause
from engine.sampling_params import SamplingParams

RequestId = NewType("RequestId", str)
"""Internal id, unique for the engine's life; what users call a request id is only a label."""
BlockId = NewType("BlockId", int)
"""Index of a KV block; 0 is the null block, which is never handed out."""
TokenArray = npt.NDArray[np.int32]
"""Token ids or a block table, `[n]`."""
GrammarMasks = npt.NDArray[np.int32]
"""Packed allowed-token bits, `[num_grammar_rows, ceil(vocab_size / 32)]`."""


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of a plan. All fields are set by the scheduler.

    Attributes:
        request_id: Whose row it is.
        tokens: Read-only view of all its tokens known when planned, `[num_known]`; this step's inputs are
            `tokens[start : start + num_tokens - num_late]` followed by `num_late` tokens still being sampled.
        start: Position of this step's first token; everything before it is in the KV cache.
        num_tokens: How many tokens this step computes.
        block_tables: One read-only view of block ids a group, `[num_blocks]`, covering `start + num_tokens` tokens.
        samples: Whether the last position yields a token; its position is `start + num_tokens`.
        sampling_params: The request's resolved parameters.
        num_late: How many of this step's last inputs are still unsampled because their plan is uncommitted.
        num_prompt_tokens: Length of the prompt; what comes after counts for `min_tokens`.
        extras: Optional parts (adapter, media); none is built yet.
    """

    request_id: RequestId
    tokens: TokenArray
    start: int
    num_tokens: int
    block_tables: tuple[TokenArray, ...]
    samples: bool
    sampling_params: SamplingParams
    num_late: int = 0
    num_prompt_tokens: int = 0
    extras: Any = None


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one step. All fields are set by the scheduler.

    Attributes:
        step: Sequence number, from 1; commits come in this order.
        requests: Rows in batch order.
        finished_request_ids: Requests ended since the last plan, told exactly once, also by an empty plan.
        preempted_request_ids: Requests whose blocks were taken back by this plan.
        num_tokens: Sum over the rows.
        grammar_rows: Indexes of rows for which a mask will come.
        num_common_prefix_blocks: Leading blocks shared by all running requests, one count a group.
    """

    step: int
    requests: tuple[ScheduledRequest, ...]
    finished_request_ids: tuple[RequestId, ...] = ()
    preempted_request_ids: tuple[RequestId, ...] = ()
    num_tokens: int = 0
    grammar_rows: tuple[int, ...] = ()
    num_common_prefix_blocks: tuple[int, ...] = ()


class Logprobs(msgspec.Struct, frozen=True, array_like=True, eq=False, gc=False):
    """How likely the model found some tokens and those it found likeliest, before any parameter; arrays all the way.

    Attributes:
        token_ids: A token a row, and after it the k likeliest in that place, `[n, 1 + k]`.
        logprobs: Natural logarithms of their probabilities, `[n, 1 + k]`.
        ranks: Of each row's token, 1 for the likeliest, `[n]`.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ranks)

    def part(self, start: int, stop: int, num_top: int | None = None) -> Logprobs:
        """Return rows `start` to `stop` without a copy, with `num_top` likeliest tokens instead of all."""
        width = None if num_top is None else 1 + num_top
        return Logprobs(self.token_ids[start:stop, :width], self.logprobs[start:stop, :width], self.ranks[start:stop])

    @classmethod
    def join(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Return the rows of `parts`, at least one and of equal width, one after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one plan. All fields are set by the model runner.

    Attributes:
        step: The plan's step.
        sampled_token_ids: For each row 0, 1 or more token ids, in row order.
        logprobs: For each row its tokens' logprobs, None where it did not ask; None when nobody did.
        prompt_logprobs: Request id to the logprobs of the prompt tokens that follow this chunk's positions.
        failed: Request id to cause, for rows that failed alone (NaN logits).
        timings: Name of a part of the step to seconds.
    """

    step: int
    sampled_token_ids: list[list[int]]
    logprobs: list[Logprobs | None] | None = None
    prompt_logprobs: dict[RequestId, Logprobs] | None = None
    failed: dict[RequestId, Cause] = {}
    timings: dict[str, float] = {}


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table; set by the model runner. All groups take their blocks from one pool.

    Attributes:
        layers: Their indexes; layer `layers[i]` keeps the K/V of a block in the i-th page tensor.
        sliding_window: Positions they see, a token's own included; None for all. What lies further back is freed.
        is_causal: Whether a token sees only what stands before it.
    """

    layers: tuple[int, ...]
    sliding_window: int | None = None
    is_causal: bool = True


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a started executor can hold; set by the executor.

    Attributes:
        num_kv_blocks: Blocks that exist, the null block included; smallest over the ranks.
        block_size: Tokens a block.
        max_model_len: Longest prompt plus output, in tokens.
        vocab_size: Token ids are below it.
        model_digest: Identifies weights and configuration.
        max_concurrent_plans: Plans that may be uncommitted.
        kv_cache_groups: One for each block table of a row, in that order.
    """

    num_kv_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    model_digest: str
    max_concurrent_plans: int = 1
    kv_cache_groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(layers=(0,)),)
