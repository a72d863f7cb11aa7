from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.null import VOCAB_SIZE, NullModelRunner, _factor, _mix, expected_tokens
from engine.kv_cache.spec import NULL_BLOCK, num_skipped_blocks
from engine.outputs import Capacity, KVCacheGroup, RequestId, ScheduledRequest, SchedulerOutput
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)
PROMPT = [72, 101, 108, 108, 111, 33, 10]


def start(**settings: object) -> tuple[NullModelRunner, Capacity]:
    runner = NullModelRunner(EngineConfig.of(model="null", **settings))
    return runner, runner.start(lambda phase, done, total: None)


def row(tokens: list[int], start: int, num_tokens: int, table: list[int], **fields: object) -> ScheduledRequest:
    defaults = {"request_id": RequestId("r"), "samples": True, "sampling_params": GREEDY}
    return ScheduledRequest(
        **{**defaults, **fields},
        tokens=np.array(tokens, dtype=np.int32),
        start=start,
        num_tokens=num_tokens,
        block_tables=(np.array(table, dtype=np.int32),),
    )


def run(runner: NullModelRunner, step: int, *rows: ScheduledRequest, **fields: object) -> list[list[int]]:
    runner.execute(SchedulerOutput(step=step, requests=rows, **fields))
    return runner.sample().sampled_token_ids


def test_starting_names_every_phase_in_order_and_gives_the_capacity() -> None:
    phases: list[str] = []
    runner = NullModelRunner(EngineConfig.of(model="null"), max_concurrent_plans=3)
    capacity = runner.start(lambda phase, done, total: phases.append(phase))
    assert phases == ["weights", "kv_specs", "profile", "kv_pages", "warm_up"]
    assert capacity == Capacity(
        num_kv_blocks=65536 // 16 + 1,
        block_size=16,
        max_model_len=8192,
        vocab_size=VOCAB_SIZE,
        model_digest="null",
        max_concurrent_plans=3,
        kv_cache_groups=(KVCacheGroup(layers=(0, 1)),),
    )


def test_the_context_is_what_the_pages_hold_unless_it_is_set() -> None:
    assert start(num_gpu_blocks_override=10)[1].max_model_len == 160
    assert start(kv_cache_memory_bytes=16 * 64 + 15)[1].max_model_len == 64
    assert start(num_gpu_blocks_override=10, max_model_len=50)[1].max_model_len == 50
    assert start(max_model_len=200_000)[1].num_kv_blocks > 200_000 // 16
    with pytest.raises(ConfigError, match="needs 11"):
        start(num_gpu_blocks_override=10, max_model_len=161)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_next_token_is_what_the_definition_gives_whatever_the_chunks_and_blocks(
    chunk: int, block_size: int
) -> None:
    runner, _ = start(block_size=block_size, max_model_len=100)
    table = [9, 3, 7, 1, 8, 2, 6, 4, 5]
    tokens, step = list(PROMPT), 0
    while len(tokens) < len(PROMPT) + 2:
        computed = 0 if len(tokens) == len(PROMPT) else len(tokens) - 1
        while computed < len(tokens):
            num_tokens, step = min(chunk, len(tokens) - computed), step + 1
            is_last = computed + num_tokens == len(tokens)
            (sampled,) = run(runner, step, row(tokens, computed, num_tokens, table, samples=is_last))
            computed += num_tokens
        tokens += sampled
    assert tokens[len(PROMPT) :] == expected_tokens(PROMPT, GREEDY, 2)


@pytest.mark.parametrize("windows", [(None, 3), (3, None), (2, 5), (4, 4), (1, 1), (None, 100)])
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_a_layer_with_a_window_sums_over_its_last_positions_and_never_reads_what_lies_before(
    windows: tuple[int | None, int | None], chunk: int
) -> None:
    config = EngineConfig.of(model="null", block_size=2, max_model_len=40)
    runner = NullModelRunner(config, windows=windows)
    groups = runner.start(lambda phase, done, total: None).kv_cache_groups
    tokens = list(PROMPT)
    (expected,) = expected_tokens(PROMPT, GREEDY, 1, windows)
    tables = [np.arange(1, 6, dtype=np.int32) + 10 * index for index in range(len(groups))]
    for start in range(0, len(tokens), chunk):
        num_tokens = min(chunk, len(tokens) - start)
        for group, table in zip(groups, tables, strict=True):
            table[: num_skipped_blocks(group, start, 2)] = NULL_BLOCK
        planned = msgspec.structs.replace(row(tokens, start, num_tokens, []), block_tables=tuple(tables))
        (sampled,) = run(runner, start + 1, planned)
    assert sampled == [expected]
    naive = [token + 1 for token in tokens]
    for window in windows:
        first = [0 if window is None else max(0, end - window + 1) for end in range(len(naive))]
        naive = [sum(naive[q] * _factor(q) for q in range(first[end], end + 1)) % 2**64 for end in range(len(naive))]
    assert expected == 32 + _mix(naive[-1]) % 95


def test_tokens_are_printable_and_depend_on_every_token_and_its_place() -> None:
    seen = set()
    for position in range(len(PROMPT)):
        for change in (1, 2, 5):
            changed = list(PROMPT)
            changed[position] += change
            answer = expected_tokens(changed, GREEDY, 8)
            assert all(32 <= token_id <= 126 for token_id in answer)
            seen.add(tuple(answer))
    seen |= {tuple(expected_tokens(prompt, GREEDY, 8)) for prompt in (PROMPT, PROMPT[::-1], PROMPT[1:], [0, *PROMPT])}
    assert len(seen) == 3 * len(PROMPT) + 4


def test_draws_depend_on_the_seed_only_above_temperature_zero() -> None:
    answers = {
        (temperature, seed): tuple(expected_tokens(PROMPT, SamplingParams(temperature=temperature, seed=seed), 8))
        for temperature in (0.0, 1.0)
        for seed in (None, 1, 2, 2**64 - 1, -5)
    }
    assert len({answers[0.0, seed] for seed in (None, 1, 2, 2**64 - 1, -5)}) == 1
    assert len({answers[1.0, seed] for seed in (None, 1, 2, 2**64 - 1, -5)}) == 5


@pytest.mark.parametrize("fault", ["swapped blocks", "lost page", "page of another beginning"])
def test_a_wrong_page_gives_another_token(fault: str) -> None:
    runner, _ = start(block_size=4, max_model_len=100)
    prompt = list(range(65, 77))
    other = [1, 2, 3, 4, *prompt[4:]]
    run(runner, 1, row(prompt, 0, 11, [1, 2, 3], samples=False), row(other, 0, 11, [4, 5, 6], samples=False))
    table = {"swapped blocks": [2, 1, 3], "lost page": [1, 9, 3], "page of another beginning": [1, 5, 3]}[fault]
    right = run(runner, 2, row(prompt, 11, 1, [1, 2, 3]))
    wrong = run(runner, 3, row(prompt, 11, 1, table))
    assert right == [expected_tokens(prompt, GREEDY, 1)]
    assert wrong != right


def test_rows_of_one_step_may_share_a_block_that_one_of_them_writes() -> None:
    runner, _ = start(block_size=4, max_model_len=100)
    prompt = list(range(65, 75))
    sampled = run(
        runner,
        1,
        row(prompt, 8, 2, [1, 2, 4], request_id=RequestId("second")),
        row(prompt, 0, 10, [1, 2, 3], request_id=RequestId("first")),
    )
    assert sampled == [expected_tokens(prompt, GREEDY, 1)] * 2


def test_late_tokens_come_from_the_results_of_uncommitted_steps_until_the_request_ends() -> None:
    runner, _ = start(block_size=4, max_model_len=100)
    table = [1, 2, 3]
    runner.execute(SchedulerOutput(step=1, requests=(row(PROMPT, 0, 7, table),)))
    runner.execute(SchedulerOutput(step=2, requests=(row(PROMPT, 7, 1, table, num_late=1),)))
    runner.execute(SchedulerOutput(step=3, requests=(row(PROMPT, 8, 1, table, num_late=1),)))
    outputs = [runner.sample() for _ in range(3)]
    assert [output.step for output in outputs] == [1, 2, 3]
    assert [output.sampled_token_ids[0][0] for output in outputs] == expected_tokens(PROMPT, GREEDY, 3)
    runner.execute(SchedulerOutput(step=4, requests=(), finished_request_ids=(RequestId("r"), RequestId("unknown"))))
    assert runner.sample().sampled_token_ids == []
    assert runner._sampled == {}


def test_a_step_takes_as_long_as_asked_and_an_empty_one_no_time() -> None:
    runner, _ = start(max_model_len=100, null_step_ms=30)
    begin = time.perf_counter()
    runner.execute(SchedulerOutput(step=1, requests=()))
    between = time.perf_counter()
    runner.execute(SchedulerOutput(step=2, requests=(row(PROMPT, 0, 7, [1]),)))
    end = time.perf_counter()
    assert end - between >= 0.03
    assert between - begin < end - begin
