"""Output that goes round in circles is ended where the request asks for it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.outputs import FinishReason, ModelRunnerOutput, SchedulerOutput
from engine.sampling_params import RepetitionDetection
from engine.stop_check import ends_in_repetition
from engine.testing import CoreDriver


def detect(max_pattern_size: int, min_pattern_size: int, min_count: int) -> RepetitionDetection:
    return RepetitionDetection(
        max_pattern_size=max_pattern_size, min_pattern_size=min_pattern_size, min_count=min_count
    )


@pytest.mark.parametrize(
    ("token_ids", "detection", "repeats"),
    [
        ([1, 2, 3] * 3, detect(3, 2, 3), True),
        ([1, 2, 3] * 2, detect(3, 2, 3), False),
        ([9, 9, *[1, 2, 3] * 3], detect(3, 2, 3), True),
        ([1, 2] * 4, detect(5, 2, 4), True),
        (list(range(1, 10)), detect(3, 2, 3), False),
        ([*[1, 2, 3] * 2, 1, 2, 4], detect(3, 2, 3), False),
        ([1, *[2, 3, 1], 2, 3], detect(3, 3, 2), True),
        ([], detect(3, 2, 3), False),
        ([7] * 20, detect(0, 0, 2), False),
        ([7] * 3, detect(4, 0, 3), True),
        ([7] * 3, detect(4, 2, 2), False),
        ([7] * 4, detect(4, 2, 2), True),
        ([7], detect(4, 1, 2), False),
    ],
)
def test_the_last_tokens_repeat_if_one_pattern_of_an_allowed_size_comes_often_enough(
    token_ids: list[int], detection: RepetitionDetection, repeats: bool
) -> None:
    assert ends_in_repetition(np.array(token_ids, dtype=np.int32), detection) is repeats


def test_every_short_output_is_judged_as_the_definition_says() -> None:
    detection = detect(3, 1, 2)
    for number in range(3**6):
        token_ids = [number // 3**place % 3 for place in range(6)]
        by_definition = any(token_ids[-2 * size :] == token_ids[-size:] * 2 for size in (1, 2, 3))
        assert ends_in_repetition(np.array(token_ids, dtype=np.int32), detection) is by_definition, token_ids


def feed(driver: CoreDriver, plan: SchedulerOutput, *token_ids: int) -> None:
    """Commit `plan`, of one row, as if these tokens had been sampled."""
    assert driver.plans.popleft().plan is plan
    driver.core.commit(plan, ModelRunnerOutput(step=plan.step, sampled_token_ids=[list(token_ids)]), driver.now)
    driver.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_repetition_ends_its_request_with_a_reason_of_its_own(depth: int) -> None:
    driver = CoreDriver.of(max_concurrent_plans=depth, max_model_len=64, num_gpu_blocks_override=16)
    driver.add("a", [40, 41, 40, 41], max_tokens=30, repetition_detection=detect(3, 1, 3))
    sampled = [40, 41, 50, 51, 52, 50, 51, 52, 50, 51, 52, 99]
    while driver.completions["a"].finish_reason is None:
        while driver.plan() is not None:
            pass
        feed(driver, driver.plans[0].plan, sampled.pop(0))
    completion = driver.completions["a"]
    assert completion.token_ids == [40, 41, *[50, 51, 52] * 3]  # the prompt, which repeats too, does not count
    assert completion.finish_reason is FinishReason.REPETITION
    assert completion.outputs[-1].stop_reason == "repetition_detected"
    driver.run()
    assert not driver.core.has_work
    assert driver.core.stats().num_used_blocks == 0


@pytest.mark.parametrize(
    ("params", "num_kept", "finish_reason", "stop_reason"),
    [
        ({}, 3, FinishReason.REPETITION, "repetition_detected"),
        ({"min_tokens": 5}, 5, FinishReason.REPETITION, "repetition_detected"),
        ({"max_tokens": 3}, 3, FinishReason.LENGTH, None),
        ({"stop_token_ids": (50,), "min_tokens": 3}, 3, FinishReason.STOP, 50),
    ],
)
def test_a_repetition_comes_after_stops_and_length_and_not_before_min_tokens(
    params: dict[str, object], num_kept: int, finish_reason: FinishReason, stop_reason: int | str | None
) -> None:
    driver = CoreDriver.of(max_model_len=64, num_gpu_blocks_override=16)
    driver.add("a", [40], **{"max_tokens": 30, "repetition_detection": detect(2, 1, 3), **params})
    while driver.completions["a"].finish_reason is None:
        feed(driver, driver.plan(), 50)
    completion = driver.completions["a"]
    assert completion.token_ids == [50] * num_kept
    assert (completion.finish_reason, completion.outputs[-1].stop_reason) == (finish_reason, stop_reason)


def test_what_comes_behind_a_repetition_in_the_same_step_is_dropped() -> None:
    driver = CoreDriver.of(max_model_len=64, num_gpu_blocks_override=16)
    driver.add("a", [40], max_tokens=30, repetition_detection=detect(2, 1, 3))
    feed(driver, driver.plan(), 50, 50, 50, 60, 61)
    assert driver.completions["a"].token_ids == [50, 50, 50]
    assert driver.completions["a"].finish_reason is FinishReason.REPETITION
