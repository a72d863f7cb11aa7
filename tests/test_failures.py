"""What a failed step costs, and what the log says of it."""

from __future__ import annotations

import logging
import re

import pytest

from engine.errors import Cause
from engine.executor.null import NullModelRunner
from engine.outputs import FinishReason, GrammarMasks, ModelRunnerOutput, SchedulerOutput
from engine.protocol import EngineDead
from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens
from tests.server_client import GREEDY, running

SECRET = [83, 69, 67, 82, 69, 84]


def lines(caplog: pytest.LogCaptureFixture, pattern: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if re.search(pattern, record.getMessage())]


async def test_a_forward_that_fails_ends_the_requests_of_its_step_with_the_cause_and_the_engine_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(lambda step, plan: RuntimeError("bad luck") if len(plan.requests) == 3 else None) as harness:
        for name in "abc":
            harness.add(name, SECRET)
        await harness.read_until(lambda: len(harness.ends) == 3)
        assert {end.finish_reason for end in harness.ends.values()} == {FinishReason.ERROR}
        assert {end.error.message for end in harness.ends.values()} == {"bad luck"}
        harness.add("next", [66])
        await harness.read_until(lambda: "next" in harness.ends)
        assert harness.tokens["next"] == expected_tokens([66], GREEDY, 10)
        assert harness.stats.num_used_blocks == 0
    (line,) = lines(caplog, "a step failed")
    row = r"\d+@\d+ in 1 blocks"
    assert re.search(rf"a step failed, step \d+: 3 requests, \d+ tokens, 1 in flight: a {row}, b {row}, c {row}", line)
    (record,) = [record for record in caplog.records if "a step failed" in record.getMessage()]
    assert "bad luck" in str(record.exc_info)
    assert "SECRET" not in caplog.text
    assert str(SECRET)[1:-1] not in caplog.text


async def test_a_plan_behind_a_failed_one_is_not_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    def fail(step: int, plan: SchedulerOutput) -> Exception | None:
        return RuntimeError("bad luck") if step in {3, 4} else None

    async with running(fail, depth=2) as harness:
        harness.add("a", [65])
        await harness.read_until(lambda: "a" in harness.ends)
        assert harness.ends["a"].finish_reason is FinishReason.ERROR
    (line,) = lines(caplog, "a step failed")
    assert "2 in flight" in line


async def test_the_second_failure_in_a_row_ends_the_engine_and_both_plans_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(lambda step, plan: RuntimeError(f"broken {step}")) as harness:
        harness.add("a", [65])
        await harness.read_until(lambda: "a" in harness.ends)
        harness.add("b", [66])
        await harness.read_until(lambda: harness.last_word is not None)
        assert isinstance(harness.last_word, EngineDead)
        assert str(harness.last_word.cause) == "RuntimeError: broken 2"
    assert [re.search(r": (\w) 1@0", line)[1] for line in lines(caplog, "a step failed")] == ["a", "b"]


async def test_a_failure_after_a_good_step_is_a_first_one_again() -> None:
    async with running(lambda step, plan: RuntimeError("bad luck") if step % 2 else None) as harness:
        for number in range(5):
            harness.add(f"r{number}", [65], SamplingParams(temperature=0, max_tokens=2))
            await harness.read_until(lambda number=number: len(harness.ends) == number + 1)
        assert {end.finish_reason for end in harness.ends.values()} == {FinishReason.ERROR}


async def test_memory_errors_cost_the_newest_alone_and_the_state_is_whole_again() -> None:
    """However often: one good step between two of them."""
    async with running(lambda step, plan: MemoryError("no room") if len(plan.requests) > 2 else None) as harness:
        for number in range(4):
            harness.add(f"r{number}", [65 + number] * 3)
            await harness.read_until(lambda number=number: harness.tokens.get(f"r{number}") or len(harness.ends) > 0)
        await harness.read_until(lambda: len(harness.ends) == 4)
        errors = {name for name, end in harness.ends.items() if end.finish_reason is FinishReason.ERROR}
        for name in harness.ends.keys() - errors:
            assert harness.tokens[name] == expected_tokens([65 + int(name[1:])] * 3, GREEDY, 10)
        harness.add("after", [66])
        await harness.read_until(lambda: "after" in harness.ends)
        assert harness.tokens["after"] == expected_tokens([66], GREEDY, 10)
        assert harness.stats.num_used_blocks == 0


async def test_a_row_of_nan_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = NullModelRunner.sample

    def poisoned(self: NullModelRunner, masks: GrammarMasks | None = None) -> ModelRunnerOutput:
        plan, _ = self._executed[0]
        output = sample(self, masks)
        failed = {}
        for row, request in enumerate(plan.requests):
            if request.request_id == "poisoned" and output.sampled_token_ids[row]:
                failed[request.request_id] = Cause("NotFinite", "the logits are not finite")
                output.sampled_token_ids[row].clear()
        return ModelRunnerOutput(step=plan.step, sampled_token_ids=output.sampled_token_ids, failed=failed)

    monkeypatch.setattr(NullModelRunner, "sample", poisoned)
    async with running() as harness:
        for name in ("a", "poisoned", "b"):
            harness.add(name, [65])
        await harness.read_until(lambda: len(harness.ends) == 3)
        assert str(harness.ends["poisoned"].error) == "NotFinite: the logits are not finite"
        assert harness.tokens["a"] == harness.tokens["b"] == expected_tokens([65], GREEDY, 10)


async def test_log_iterations_writes_a_line_for_every_step_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(log_iterations=True, max_num_batched_tokens=64) as harness:
        harness.add("a", SECRET * 20, SamplingParams(temperature=0, max_tokens=3))
        await harness.read_until(lambda: "a" in harness.ends)
        harness.add("b", [65], SamplingParams(temperature=0, max_tokens=1))
        await harness.read_until(lambda: "b" in harness.ends)
    told = lines(caplog, r"^step \d+: ")
    assert re.fullmatch(r"step 1: 1 requests, 64 tokens, 1 in flight: a 64@0 in 4 blocks; \d+\.\d\d ms", told[0])
    assert re.search(r"a 56@64 in 8 blocks", told[1])
    assert [int(re.match(r"step (\d+)", line)[1]) for line in told] == [*range(1, len(told) + 1)]
    assert any("; ended a" in line for line in told)
    assert str(SECRET)[1:-1] not in caplog.text


async def test_without_it_no_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running() as harness:
        harness.add("a", [65])
        await harness.read_until(lambda: "a" in harness.ends)
    assert not lines(caplog, r"^step \d+: ")
