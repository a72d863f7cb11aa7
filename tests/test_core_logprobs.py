"""Logprobs on their way through the core: with the tokens they belong to, the prompt's once and whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import Cause
from engine.outputs import Capacity, FinishReason, Logprobs, ModelRunnerOutput, RequestId, SchedulerOutput
from engine.protocol import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from engine.sampling_params import SamplingParams
from transport.codec import Decoder, Encoder

A = RequestId("a")


def logprobs_of(token_ids: list[int]) -> Logprobs:
    ids = np.array(token_ids, dtype=np.int32)
    return Logprobs(ids[:, None], -ids[:, None].astype(np.float32), ids)


def make_core(**params: object) -> EngineCore:
    config = EngineConfig(model="null", max_num_batched_tokens=4, block_size=4, max_num_seqs=4, max_model_len=64)
    core = EngineCore(config, capacity())
    request = EngineCoreRequest(A, "a", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=9, **params), 0.0)  # type: ignore[arg-type]
    core.add(request, 0.0)
    return core


def capacity() -> Capacity:
    return Capacity(num_kv_blocks=32, block_size=4, max_model_len=64, vocab_size=256, model_digest="")


def commit(
    core: EngineCore, tokens: list[int], prompt: Sequence[int] = (), **fields: object
) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """Run a step that samples `tokens` and tells the prompt's logprobs for `prompt`."""
    plan = core.plan(0.0)
    assert plan is not None
    output = ModelRunnerOutput(
        step=plan.step,
        sampled_token_ids=[tokens],
        logprobs=[logprobs_of(tokens)] if tokens else None,
        prompt_logprobs={A: logprobs_of(list(prompt))} if prompt else None,
        **fields,  # type: ignore[arg-type]
    )
    core.commit(plan, output, 0.0)
    return plan, core.take_outputs()


def test_logprobs_are_cut_with_the_tokens_at_a_stop() -> None:
    core = make_core(logprobs=0, stop_token_ids=[8])
    commit(core, [])
    (output,) = commit(core, [7, 8, 9])[1]
    assert output.new_token_ids == [7, 8]
    assert output.logprobs is not None
    assert output.logprobs.ranks.tolist() == [7, 8]
    assert output.finish_reason is FinishReason.STOP


def test_those_of_the_prompt_come_once_with_the_first_token_whatever_the_chunks() -> None:
    core = make_core(prompt_logprobs=0)
    assert commit(core, [], prompt=[2, 3, 4, 5])[1] == []
    (first,) = commit(core, [7], prompt=[6])[1]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs.token_ids[:, 0].tolist() == [2, 3, 4, 5, 6]
    (second,) = commit(core, [7])[1]
    assert second.prompt_logprobs is None


def test_a_prompt_that_is_computed_anew_tells_each_token_once() -> None:
    core = make_core(prompt_logprobs=0)
    commit(core, [], prompt=[2, 3, 4, 5])
    assert core.reset_prefix_cache(reset_running=True)
    commit(core, [], prompt=[2, 3, 4, 5])
    plan = core.plan(0.0)
    assert plan is not None
    core.fail(plan, Cause("Lost", "try again"), request_ids=[])
    (first,) = commit(core, [7], prompt=[6])[1]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs.token_ids[:, 0].tolist() == [2, 3, 4, 5, 6]
    assert core.reset_prefix_cache(reset_running=True)
    commit(core, [], prompt=[2, 3, 4, 5])
    (second,) = commit(core, [8], prompt=[6])[1]
    assert second.prompt_logprobs is None


def test_a_failed_row_tells_none() -> None:
    core = make_core(logprobs=0)
    commit(core, [])
    (output,) = commit(core, [7], failed={A: Cause("BadLogits", "NaN")})[1]
    assert output.finish_reason is FinishReason.ERROR
    assert output.logprobs is not None
    assert len(output.logprobs) == 0


def test_they_cross_the_wire_as_arrays() -> None:
    told = logprobs_of(list(range(200)))
    message = EngineCoreOutputs(0, 1, [EngineCoreOutput(A, [1], told, logprobs_of([3]))])
    (received,) = Decoder(EngineCoreOutputs).decode(Encoder().encode(message)).outputs
    assert received.logprobs is not None
    assert received.prompt_logprobs is not None
    assert np.array_equal(received.logprobs.logprobs, told.logprobs)
    assert received.prompt_logprobs.ranks.tolist() == [3]
