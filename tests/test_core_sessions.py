"""Sessions: requests whose prompt goes on in parts, each answered by a turn.

A session that waits for its next part holds no block and no place; what it computed is found again in the prefix
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.core import WaitsFor
from engine.errors import Cause
from engine.executor.null import expected_tokens
from engine.outputs import FinishReason, RequestId, ScheduledRequest, SchedulerOutput
from engine.protocol import AbortReason, EngineCoreRequest, PauseMode, SessionPart
from engine.request import RequestStatus
from engine.sampling_params import SamplingParams
from engine.structured_output.params import StructuredOutputsParams
from engine.testing import CoreDriver
from tests.test_core_grammar import Tokens

ALL_DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
ALL_TOKENS = tuple(range(32, 127))


def make_driver(**settings: Any) -> CoreDriver:
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4}
    return CoreDriver.of(**{**defaults, "num_gpu_blocks_override": 64, **settings})


def prompt(length: int, first: int = 65) -> list[int]:
    return [first] * length


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)


def add(driver: CoreDriver, name: str, token_ids: Sequence[int], max_tokens: int = 3, **params: Any) -> RequestId:
    """Add a session that begins with `token_ids`."""
    request = EngineCoreRequest(
        *(RequestId(name), name, list(token_ids), greedy(max_tokens, **params)),
        arrival_time=0.0,
        extras={"session": True},
    )
    driver.core.add(request, driver.now)
    driver.requests[request.request_id] = request
    driver.check()
    return request.request_id


def extend(driver: CoreDriver, name: str, token_ids: Sequence[int], max_tokens: int = 3, **params: Any) -> None:
    driver.core.extend(SessionPart(RequestId(name), list(token_ids), greedy(max_tokens, **params)))
    driver.check()


def close(driver: CoreDriver, name: str) -> None:
    driver.core.extend(SessionPart(RequestId(name), []))
    driver.check()


def run(driver: CoreDriver) -> None:
    """Run as deep as may be until nothing can go on."""
    while driver.core.has_work:
        while driver.plan() is not None:
            pass
        if not driver.plans:
            return
        driver.finish_step()


def rows(plan: SchedulerOutput | None) -> dict[str, ScheduledRequest]:
    assert plan is not None
    return {row.request_id: row for row in plan.requests}


def answer(*parts: Sequence[int], max_tokens: int = 3) -> list[int]:
    """Return the tokens of all turns by definition: the last one of a turn gives way to the next part."""
    known: list[int] = []
    told: list[int] = []
    for part in parts:
        known = [*(known[:-1]), *part] if told else list(part)
        turn = expected_tokens(known, greedy(max_tokens), max_tokens)
        known += turn
        told += turn
    return told


def turn_reasons(driver: CoreDriver, name: str) -> list[FinishReason]:
    outputs = driver.completions[RequestId(name)].outputs
    return [output.turn_reason for output in outputs if output.turn_reason is not None]


def status_of(driver: CoreDriver, name: str) -> RequestStatus:
    return next(request.status for request in driver.live_requests if request.request_id == name)


@ALL_DEPTHS
def test_each_part_is_answered_behind_all_that_came_before(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    parts = [prompt(9), prompt(7, 66), prompt(1, 67)]
    add(driver, "s", parts[0])
    for number, part in enumerate(parts[1:], start=1):
        run(driver)
        assert driver.core.waits_for is WaitsFor.INPUT
        assert driver.completions["s"].token_ids == answer(*parts[:number])
        extend(driver, "s", part)
    close(driver, "s")
    run(driver)
    completion = driver.completions["s"]
    assert completion.token_ids == answer(*parts)
    assert turn_reasons(driver, "s") == [FinishReason.LENGTH] * 2
    assert completion.finish_reason is FinishReason.LENGTH
    assert not driver.core.has_work
    assert driver.core.stats().num_used_blocks == 0


@ALL_DEPTHS
def test_parts_that_come_early_wait_for_their_turn(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    parts = [prompt(5), prompt(3, 66), prompt(6, 67)]
    add(driver, "s", parts[0])
    for part in parts[1:]:
        extend(driver, "s", part)
    (request,) = driver.live_requests
    assert (len(request.session), request.num_tokens, request.status) == (2, 5, RequestStatus.WAITING)
    close(driver, "s")
    run(driver)
    assert driver.completions["s"].token_ids == answer(*parts)
    assert driver.completions["s"].finish_reason is FinishReason.LENGTH


def test_the_last_token_of_a_turn_gives_way_to_the_next_part_and_what_was_computed_is_found_again() -> None:
    driver = make_driver(block_size=1)
    add(driver, "s", [1, 2, 3], max_tokens=2)
    run(driver)
    first, second = driver.completions["s"].token_ids
    (request,) = driver.live_requests
    assert (request.num_computed_tokens, request.tokens.view().tolist()) == (0, [1, 2, 3, first, second])
    extend(driver, "s", [4, 5], max_tokens=2)
    row = rows(driver.plan())["s"]
    assert row.tokens.tolist() == [1, 2, 3, first, 4, 5]
    assert (row.start, row.num_tokens, row.num_prompt_tokens) == (4, 2, 6)


def test_what_a_plan_of_the_turn_before_refers_to_does_not_change() -> None:
    driver = make_driver(max_concurrent_plans=3)
    add(driver, "s", prompt(5), max_tokens=20, stop_token_ids=ALL_TOKENS)
    plans = [driver.plan() for _ in range(3)]
    seen = [(row.tokens, row.tokens.tolist()) for plan in plans for row in plan.requests]
    extend(driver, "s", prompt(5, 66), stop_token_ids=ALL_TOKENS)
    assert driver.finish_step() is plans[0]
    assert all(view.tolist() == values for view, values in seen)
    assert len(seen) == 3
    assert driver.plan() is None  # the session begins its turn when no plan in flight names it
    run(driver)
    assert driver.completions["s"].token_ids == answer(prompt(5), prompt(5, 66), max_tokens=1)


@ALL_DEPTHS
def test_a_waiting_session_holds_no_block_and_no_place(depth: int) -> None:
    driver = make_driver(max_num_seqs=1, max_concurrent_plans=depth)
    add(driver, "s", prompt(9))
    run(driver)
    stats = driver.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 1, 0)
    assert status_of(driver, "s") is RequestStatus.WAITING_FOR_STREAMING_REQ
    driver.add("a", prompt(5, 66))
    run(driver)
    assert driver.completions["a"].token_ids == driver.expected("a", 16)
    extend(driver, "s", prompt(2, 67))
    run(driver)
    assert driver.completions["s"].token_ids == answer(prompt(9), prompt(2, 67))


def test_a_turn_obeys_its_own_parameters() -> None:
    driver = make_driver()
    add(driver, "s", prompt(5), max_tokens=2)
    run(driver)
    extend(driver, "s", prompt(5, 66), max_tokens=7)
    run(driver)
    assert len(driver.completions["s"].token_ids) == 9
    extend(driver, "s", prompt(5, 67), max_tokens=7, stop_token_ids=ALL_TOKENS)
    run(driver)
    assert len(driver.completions["s"].token_ids) == 10
    assert turn_reasons(driver, "s") == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.STOP]


def test_a_waiting_session_that_is_closed_ends_with_reason_stop_at_once() -> None:
    driver = make_driver()
    add(driver, "s", prompt(5), stop_token_ids=ALL_TOKENS)
    run(driver)
    close(driver, "s")
    turn, end = driver.completions["s"].outputs
    assert (turn.turn_reason, turn.finish_reason, turn.stop_reason) == (FinishReason.STOP, None, turn.new_token_ids[0])
    assert (end.turn_reason, end.finish_reason, end.stop_reason) == (None, FinishReason.STOP, None)
    assert end.new_token_ids == []
    assert driver.step().finished_request_ids == ("s",)
    assert not driver.core.has_work


def test_what_ended_a_turn_is_not_told_as_what_ended_the_session() -> None:
    driver = make_driver()
    add(driver, "s", prompt(5), stop_token_ids=ALL_TOKENS)
    run(driver)
    driver.abort("s")
    end = driver.completions["s"].outputs[-1]
    assert (end.finish_reason, end.stop_reason) == (FinishReason.ABORT, None)


@ALL_DEPTHS
@pytest.mark.parametrize("reason", [AbortReason.CLIENT, AbortReason.STOP_STRING])
def test_a_session_can_be_aborted_in_any_state(depth: int, reason: AbortReason) -> None:
    driver = make_driver(max_concurrent_plans=depth, max_num_seqs=3)
    for name in ("input", "turn", "decode", "wait"):
        add(driver, name, prompt(5, ord(name[0])), max_tokens=1 if name in ("input", "turn") else 30)
    driver.plan()
    driver.finish_step()
    extend(driver, "turn", prompt(5, 70), max_tokens=30)
    extend(driver, "decode", prompt(5, 71))
    driver.plan()
    driver.abort("input", "turn", "decode", "wait", reason=reason)
    expected = FinishReason.STOP if reason is AbortReason.STOP_STRING else FinishReason.ABORT
    assert {completion.finish_reason for completion in driver.completions.values()} == {expected}
    extend(driver, "decode", prompt(1))
    run(driver)
    assert driver.core.stats().num_used_blocks == 0
    assert not driver.core.has_work


@ALL_DEPTHS
def test_a_session_that_is_preempted_as_its_turn_ends_goes_on_with_its_next_part(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    add(driver, "s", prompt(5), max_tokens=1)
    driver.plan()
    assert driver.reset_prefix_cache(reset_running=True)
    assert status_of(driver, "s") is RequestStatus.PREEMPTED
    driver.finish_step()
    assert status_of(driver, "s") is RequestStatus.WAITING_FOR_STREAMING_REQ
    extend(driver, "s", prompt(4, 66), max_tokens=1)
    run(driver)
    assert driver.completions["s"].token_ids == answer(prompt(5), prompt(4, 66), max_tokens=1)


@ALL_DEPTHS
def test_a_failed_step_of_one_turn_is_computed_anew(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    add(driver, "s", prompt(5))
    run(driver)
    extend(driver, "s", prompt(4, 66))
    driver.plan(fails=True)
    driver.finish_step(blamed=[])
    run(driver)
    assert driver.completions["s"].token_ids == answer(prompt(5), prompt(4, 66))


@pytest.mark.parametrize(
    ("part", "max_tokens", "said"),
    [
        (prompt(56), 3, "the prompt has 64 tokens and the context holds 64"),
        ([1, 300], 3, "from 1 to 300, allowed are 0 to 255"),
    ],
)
def test_a_part_that_can_never_run_ends_the_session_with_the_numbers(
    part: list[int], max_tokens: int, said: str
) -> None:
    driver = make_driver()
    add(driver, "s", prompt(6))
    run(driver)
    extend(driver, "s", part, max_tokens)
    end = driver.completions["s"].outputs[-1]
    assert end.finish_reason is FinishReason.ERROR
    assert said in end.error.message
    assert driver.step().finished_request_ids == ("s",)
    assert not driver.core.has_work


def test_a_part_nobody_awaits_is_the_callers_fault() -> None:
    driver = make_driver()
    driver.add("plain", prompt(5))
    add(driver, "s", prompt(5))
    close(driver, "s")
    for name in ("plain", "s"):
        with pytest.raises(ValueError, match="takes no further part"):
            extend(driver, name, prompt(1))
    extend(driver, "unknown", prompt(1))
    run(driver)
    assert driver.completions["plain"].token_ids == driver.expected("plain", 16)
    assert driver.completions["s"].token_ids == answer(prompt(5))


def test_a_request_that_says_it_is_no_session_is_none() -> None:
    driver = make_driver()
    request = EngineCoreRequest(
        *(RequestId("a"), "a", prompt(5), greedy(3)), arrival_time=0.0, extras={"session": False}
    )
    driver.core.add(request, 0.0)
    run(driver)
    assert driver.completions["a"].finish_reason is FinishReason.LENGTH


def test_pausing_with_abort_ends_waiting_sessions_and_with_wait_lets_a_turn_finish() -> None:
    driver = make_driver()
    for name in "ab":
        add(driver, name, prompt(5))
    run(driver)
    extend(driver, "b", prompt(2, 66))
    driver.plan()
    driver.pause(PauseMode.WAIT)
    run(driver)
    assert driver.core.is_paused
    assert driver.completions["b"].token_ids == answer(prompt(5), prompt(2, 66))
    extend(driver, "a", prompt(2, 66))
    assert driver.plan() is None
    assert driver.core.waits_for is WaitsFor.RESUME
    driver.pause(PauseMode.ABORT)
    assert {completion.finish_reason for completion in driver.completions.values()} == {FinishReason.ABORT}


def test_a_later_turn_counts_as_a_lookup_of_its_own_and_not_as_a_preemption() -> None:
    driver = make_driver()
    add(driver, "s", prompt(5))
    run(driver)
    extend(driver, "s", prompt(5, 66))
    run(driver)
    stats = driver.core.stats()
    assert (stats.prefix_cache_requests, stats.prefix_cache_queries, stats.prefix_cache_hits) == (2, 5 + 12, 4)
    assert stats.preempted_prefix_cache_requests == stats.preempted_prefix_cache_queries == 0
    outputs = driver.completions["s"].outputs
    assert [output.num_cached_tokens for output in outputs] == [0, *[None] * 5]


def test_a_part_beyond_those_that_may_wait_ends_the_session_with_the_numbers() -> None:
    driver = make_driver(max_num_waiting=2)
    add(driver, "a", [65] * 5)
    for _ in range(2):
        extend(driver, "a", [66])
    assert "a" not in driver.completions
    extend(driver, "a", [66])
    cause = driver.completions["a"].outputs[-1].error
    assert cause is not None
    assert cause.type == "QueueFull"
    assert "2 parts of the session wait, as many as --max-num-waiting 2 allows" in cause.message


def test_a_session_may_be_closed_and_answered_at_once_however_few_may_wait() -> None:
    driver = make_driver(max_num_waiting=0)
    add(driver, "a", [65] * 5)
    run(driver)
    extend(driver, "a", [66])
    close(driver, "a")
    run(driver)
    assert driver.completions["a"].finish_reason is FinishReason.LENGTH
    assert len(driver.completions["a"].token_ids) == 6


# Forms of the text


def form() -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(json_object=True)}


@ALL_DEPTHS
def test_a_turn_that_asks_for_a_form_awaits_its_own_grammar_and_is_told_the_tokens_of_that_turn_alone(
    depth: int,
) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    add(driver, "s", prompt(5))
    extend(driver, "s", prompt(4, 66), **form())
    run(driver)
    assert driver.core.waits_for is WaitsFor.GRAMMAR
    assert status_of(driver, "s") is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert driver.core.stats().num_used_blocks == 0
    assert [turn.request_id for turn in driver.core.take_turns_awaiting_grammar()] == ["s"]
    assert driver.core.take_turns_awaiting_grammar() == []
    grammar = Tokens()
    driver.core.set_grammar(RequestId("s"), grammar)
    extend(driver, "s", prompt(2, 67))
    run(driver)
    told = driver.completions["s"].token_ids
    assert told == answer(prompt(5), prompt(4, 66), prompt(2, 67))
    assert grammar.told == told[3:6]


def test_a_turn_ends_where_its_text_is_complete_and_the_session_goes_on() -> None:
    driver = make_driver()
    add(driver, "s", prompt(5))
    run(driver)
    extend(driver, "s", prompt(4, 66), max_tokens=9, **form())
    driver.core.take_turns_awaiting_grammar()
    grammar = Tokens()
    grammar.length = 2
    driver.core.set_grammar(RequestId("s"), grammar)
    run(driver)
    assert turn_reasons(driver, "s") == [FinishReason.LENGTH, FinishReason.STOP]
    assert status_of(driver, "s") is RequestStatus.WAITING_FOR_STREAMING_REQ


def test_a_form_that_is_refused_ends_the_session_and_one_that_has_ended_awaits_none() -> None:
    driver = make_driver()
    for name in "st":
        add(driver, name, prompt(5))
        run(driver)
        extend(driver, name, prompt(4, 66), **form())
    driver.core.abort([RequestId("t")], AbortReason.CLIENT)
    assert [turn.request_id for turn in driver.core.take_turns_awaiting_grammar()] == ["s"]
    driver.core.set_grammar(RequestId("s"), Cause("InvalidGrammar", "no"))
    driver.check()
    assert driver.completions["s"].finish_reason is FinishReason.ERROR
