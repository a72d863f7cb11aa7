"""Requests whose output must match a grammar: they wait for it, have one token in flight, and fail alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.core import WaitsFor
from engine.errors import Cause
from engine.executor.null import FIRST_SAMPLED, NUM_SAMPLED
from engine.outputs import FinishReason, GrammarMasks, RequestId, SchedulerOutput
from engine.protocol import AbortReason, EngineCoreRequest, PauseMode
from engine.request import RequestStatus
from engine.sampling_params import SamplingParams
from engine.testing import CoreDriver

ALL_DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
PRINTABLE = range(FIRST_SAMPLED, FIRST_SAMPLED + NUM_SAMPLED)


class Tokens:
    """A grammar whose mask allows `allowed`, and which remembers what it was told and how often it was asked.

    What it accepts may be less, `accepted`, as where tokens are sampled without the mask. Unless said otherwise all is
    allowed that the integer model says without one, so that a request's tokens are those of its run without a grammar.
    """

    def __init__(self, allowed: Sequence[int] = PRINTABLE, *, accepted: Sequence[int] = PRINTABLE) -> None:
        self.allowed = allowed
        self.accepted = accepted
        self.told: list[int] = []
        self.num_asked = 0
        self.length: int | None = None
        self.failure: str | None = None

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        self.told += token_ids
        return all(token_id in self.accepted for token_id in token_ids)

    @property
    def is_finished(self) -> bool:
        return len(self.told) == self.length

    def fill_bitmask(self, bitmask: GrammarMasks) -> None:
        self.num_asked += 1
        for token_id in self.allowed:
            bitmask[token_id // 32] |= np.uint32(1 << token_id % 32).astype(np.int32)


def make_driver(**settings: Any) -> CoreDriver:
    """Make a driver that runs a plan when its result is asked for: what follows a masked plan waits for its masks."""
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4}
    return CoreDriver.of(runs_late=True, **{**defaults, "num_gpu_blocks_override": 64, **settings})


def prompt(length: int, first: int = 65) -> list[int]:
    return [first] * length


def add(driver: CoreDriver, name: str, token_ids: list[int], **params: Any) -> RequestId:
    """Add a request that awaits a grammar."""
    sampling_params = SamplingParams(**{"temperature": 0.0, **params})
    request = EngineCoreRequest(RequestId(name), name, token_ids, sampling_params, arrival_time=0.0)
    driver.core.add(request, driver.now, awaits_grammar=True)
    driver.requests[request.request_id] = request
    driver.check()
    return request.request_id


def set_grammar(driver: CoreDriver, name: str, grammar: Tokens | Cause) -> None:
    driver.core.set_grammar(RequestId(name), grammar)
    driver.check()


def rows(plan: SchedulerOutput | None) -> dict[str, int]:
    assert plan is not None
    return {row.request_id: row.num_tokens for row in plan.requests}


def status_of(driver: CoreDriver, name: str) -> RequestStatus:
    return next(request.status for request in driver.live_requests if request.request_id == name)


# Waiting for it


def test_a_request_without_its_grammar_waits_and_says_so() -> None:
    driver = make_driver()
    add(driver, "a", prompt(5))
    assert driver.plan() is None
    assert driver.core.waits_for is WaitsFor.GRAMMAR
    assert status_of(driver, "a") is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert (driver.core.stats().num_waiting, driver.core.stats().num_running) == (1, 0)
    set_grammar(driver, "a", Tokens())
    assert driver.core.waits_for is None
    assert driver.run()["a"].token_ids == driver.expected("a", 16)


def test_those_who_await_a_grammar_count_as_waiting_beside_those_who_lack_budget() -> None:
    driver = make_driver(max_num_batched_tokens=100)
    for name in "abc":
        driver.add(name, prompt(50, ord(name)))
    for name in "de":
        add(driver, name, prompt(50, ord(name)))
    assert rows(driver.step()) == {"a": 50, "b": 50}
    stats = driver.core.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 3)


def test_those_who_await_a_grammar_take_no_place_and_hold_nobody_up() -> None:
    driver = make_driver(max_num_seqs=2)
    for number in range(20):
        add(driver, f"g{number}", prompt(5))
    for name in "ab":
        driver.add(name, prompt(5, ord(name)), max_tokens=3)
    assert rows(driver.step()) == {"a": 5, "b": 5}
    while driver.completions["b"].finish_reason is None:
        driver.step()
    for number in range(20):
        set_grammar(driver, f"g{number}", Tokens())
    driver.run()
    assert all(driver.completions[f"g{number}"].token_ids == driver.expected("g0", 16) for number in range(20))


def test_who_waited_for_a_grammar_has_its_place_by_arrival_when_it_comes() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add("runs", prompt(5), max_tokens=2)
    driver.step()
    add(driver, "first", prompt(5, 66), max_tokens=1)
    driver.add("second", prompt(5, 67), max_tokens=1)
    add(driver, "third", prompt(5, 68), max_tokens=1)
    driver.add("fourth", prompt(5, 69), max_tokens=1)
    for name in ("third", "first"):
        set_grammar(driver, name, Tokens())
    driver.run()
    ends = sorted(driver.completions, key=lambda name: driver.completions[name].outputs[-1].step)
    assert ends == ["runs", "first", "second", "third", "fourth"]


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone() -> None:
    driver = make_driver()
    add(driver, "bad", prompt(5))
    add(driver, "good", prompt(5, 66))
    cause = Cause("InvalidRequest", "the schema is no schema")
    set_grammar(driver, "bad", cause)
    (output,) = driver.completions["bad"].outputs
    assert (output.finish_reason, output.error, output.new_token_ids) == (FinishReason.ERROR, cause, [])
    set_grammar(driver, "good", Tokens())
    assert driver.run()["good"].token_ids == driver.expected("good", 16)
    assert not driver.core.has_work


def test_a_request_aborted_while_its_grammar_is_compiled_ends_and_what_comes_late_is_ignored() -> None:
    driver = make_driver()
    add(driver, "a", prompt(5))
    driver.abort("a")
    assert driver.completions["a"].finish_reason is FinishReason.ABORT
    for late in (Tokens(), Cause("InvalidRequest", "late")):
        set_grammar(driver, "a", late)
    assert len(driver.completions["a"].outputs) == 1
    assert driver.step().finished_request_ids == ("a",)
    assert not driver.core.has_work


def test_a_grammar_that_never_comes_ends_with_the_queue_timeout() -> None:
    driver = make_driver(queue_timeout=5.0)
    add(driver, "a", prompt(5))
    assert driver.core.waits_for is WaitsFor.GRAMMAR
    assert driver.core.next_deadline == 5.0
    driver.now = 5.0
    driver.step()
    assert driver.completions["a"].outputs[-1].error.type == "QueueTimeout"
    set_grammar(driver, "a", Tokens())
    assert not driver.core.has_work


def test_a_grammar_nobody_awaits_is_the_callers_fault() -> None:
    driver = make_driver()
    driver.add("a", prompt(5))
    with pytest.raises(ValueError, match="awaits no grammar"):
        driver.core.set_grammar(RequestId("a"), Tokens())
    assert driver.run()["a"].token_ids == driver.expected("a", 16)


def test_a_grammar_that_may_not_go_on_ends_its_running_request_alone() -> None:
    driver = make_driver()
    add(driver, "a", prompt(5))
    driver.add("plain", prompt(6))
    set_grammar(driver, "a", Tokens())
    for _ in range(4):
        driver.step()
    cause = Cause("InvalidGrammar", "takes too much time")
    set_grammar(driver, "a", cause)
    driver.core.check_invariants()
    completions = driver.run()
    assert completions["a"].outputs[-1].error == cause
    assert completions["plain"].token_ids == driver.expected("plain", 16)
    assert not driver.core.has_work


def test_a_grammar_that_comes_while_paused_lets_its_request_start_after_the_resume() -> None:
    driver = make_driver()
    add(driver, "a", prompt(5))
    driver.pause(PauseMode.KEEP)
    set_grammar(driver, "a", Tokens())
    assert driver.plan() is None
    assert driver.core.waits_for is WaitsFor.RESUME
    driver.resume()
    assert driver.run()["a"].token_ids == driver.expected("a", 16)


# Masks and tokens


@ALL_DEPTHS
def test_the_grammar_is_asked_once_a_token_and_told_each_token_in_order(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    add(driver, "a", prompt(5))
    driver.add("b", prompt(5, 66))
    grammar = Tokens()
    set_grammar(driver, "a", grammar)
    driver.run()
    for name in "ab":
        assert driver.completions[name].token_ids == driver.expected(name, 16)
    assert grammar.told == driver.completions["a"].token_ids
    assert grammar.num_asked == 16


def test_a_request_with_a_grammar_has_one_token_in_flight_and_others_have_more() -> None:
    driver = make_driver(max_concurrent_plans=3)
    add(driver, "a", prompt(5))
    driver.add("b", prompt(5, 66))
    set_grammar(driver, "a", Tokens())
    plans = [driver.plan() for _ in range(3)]
    assert [rows(plan) for plan in plans] == [{"a": 5, "b": 5}, {"b": 1}, {"b": 1}]
    assert [plan.grammar_rows for plan in plans] == [(0,), (), ()]
    driver.finish_step()
    assert rows(driver.plan()) == {"a": 1, "b": 1}
    driver.run()


def test_masks_are_those_of_the_rows_that_sample_and_of_nobody_else() -> None:
    driver = make_driver(max_num_batched_tokens=16)
    add(driver, "a", prompt(20))
    driver.add("b", prompt(2, 66))
    set_grammar(driver, "a", Tokens(allowed=(33, 64)))
    first = driver.plan()
    assert (rows(first), first.grammar_rows) == ({"a": 16}, ())
    assert driver.core.grammar_masks(first) is None
    driver.finish_step()
    second = driver.plan()
    assert (rows(second), second.grammar_rows) == ({"a": 4, "b": 2}, (0,))
    masks = driver.core.grammar_masks(second)
    assert (masks.shape, masks.dtype) == ((1, 8), np.int32)
    allowed = [token for token in range(256) if masks[0, token // 32] >> (token % 32) & 1]
    assert allowed == [33, 64]


@ALL_DEPTHS
def test_the_mask_of_a_request_that_ended_meanwhile_allows_everything(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    add(driver, "a", prompt(5))
    set_grammar(driver, "a", Tokens(allowed=()))
    plan = driver.plan()
    driver.abort("a")
    assert (driver.core.grammar_masks(plan) == -1).all()
    driver.run()
    assert driver.completions["a"].token_ids == []


def test_a_prompt_in_chunks_tells_the_grammar_nothing_and_gives_no_output_before_its_first_token() -> None:
    driver = make_driver(max_num_batched_tokens=16)
    add(driver, "a", prompt(40), max_tokens=2)
    grammar = Tokens()
    set_grammar(driver, "a", grammar)
    driver.run()
    outputs = driver.completions["a"].outputs
    assert [len(output.new_token_ids) for output in outputs] == [1, 1]
    assert [event.kind for event in outputs[0].events] == ["queued", "scheduled"]
    assert grammar.told == driver.expected("a", 2)


@ALL_DEPTHS
def test_a_sampled_token_that_the_grammar_rejects_ends_its_request_with_the_token_and_an_error(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    add(driver, "a", prompt(5))
    driver.add("b", prompt(5, 66))
    tokens = driver.expected("a", 4)
    assert tokens[3] not in tokens[:3]
    set_grammar(driver, "a", Tokens(accepted=tokens[:3]))
    driver.run()
    completion = driver.completions["a"]
    assert completion.token_ids == tokens
    assert completion.finish_reason is FinishReason.ERROR
    assert completion.outputs[-1].new_token_ids == tokens[3:]
    assert completion.outputs[-1].error == Cause(
        "GrammarRejected", f"the grammar does not allow the sampled tokens {tokens[3:]}"
    )
    assert driver.completions["b"].token_ids == driver.expected("b", 16)
    assert driver.core.stats().num_used_blocks == 0


@pytest.mark.parametrize("kind", ["stop_token_ids", "eos_token_ids"])
def test_the_token_that_ends_a_request_is_no_part_of_what_the_grammar_is_told(kind: str) -> None:
    driver = make_driver()
    add(driver, "a", prompt(5))
    tokens = driver.expected("a", 4)
    set_grammar(driver, "a", Tokens())
    driver.run()
    add(driver, "b", prompt(5), **{kind: (tokens[3],)})
    grammar = Tokens(accepted=tokens[:3])
    set_grammar(driver, "b", grammar)
    assert driver.run()["b"].token_ids == tokens
    assert driver.completions["b"].finish_reason is FinishReason.STOP
    assert grammar.told == tokens[:3]


@ALL_DEPTHS
def test_a_preempted_request_goes_on_with_its_grammar_where_it_stood(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    add(driver, "a", prompt(5))
    grammar = Tokens()
    set_grammar(driver, "a", grammar)
    for _ in range(3):
        driver.step()
    driver.plan()
    assert driver.reset_prefix_cache(reset_running=True)
    driver.run()
    assert driver.completions["a"].token_ids == driver.expected("a", 16)
    assert grammar.told == driver.expected("a", 16)


@ALL_DEPTHS
def test_a_plan_that_was_undone_told_the_grammar_nothing(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    add(driver, "a", prompt(5))
    grammar = Tokens()
    set_grammar(driver, "a", grammar)
    driver.step()
    driver.plan(fails=True)
    driver.finish_step(blamed=[])
    assert driver.run()["a"].token_ids == driver.expected("a", 16)
    assert grammar.told == driver.expected("a", 16)


def test_an_abort_wins_over_a_token_that_the_grammar_would_reject() -> None:
    driver = make_driver()
    add(driver, "a", prompt(5))
    set_grammar(driver, "a", Tokens(accepted=()))
    driver.plan()
    driver.abort("a", reason=AbortReason.DISCONNECT)
    driver.finish_step()
    assert driver.completions["a"].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(("length", "max_tokens"), [(3, 16), (3, 3), (1, 1)])
def test_a_text_that_is_complete_is_a_stop_at_once_also_at_the_length_limit(length: int, max_tokens: int) -> None:
    driver = make_driver()
    add(driver, "a", prompt(4), max_tokens=max_tokens)
    grammar = Tokens()
    grammar.length = length
    set_grammar(driver, "a", grammar)
    driver.run()
    completion = driver.completions["a"]
    assert completion.token_ids == driver.expected("a", length)
    assert (completion.finish_reason, completion.outputs[-1].stop_reason) == (FinishReason.STOP, None)
    driver.core.check_invariants()


def test_a_grammar_that_gave_up_ends_its_request_with_its_own_reason() -> None:
    driver = make_driver()
    for name in ("a", "b"):
        add(driver, name, prompt(4))
        grammar = Tokens(allowed=() if name == "a" else PRINTABLE)
        grammar.failure = "too complex" if name == "a" else None
        set_grammar(driver, name, grammar)
    driver.run()
    assert driver.completions["a"].outputs[-1].error == Cause(
        "GrammarFailed", "the grammar cannot go on: too complex; ask for a simpler form"
    )
    assert driver.completions["b"].token_ids == driver.expected("b", 16)


def test_who_awaits_a_grammar_is_known_until_it_comes_or_the_request_ends() -> None:
    driver = make_driver()
    for name in ("a", "b"):
        add(driver, name, prompt(4))
    driver.add("plain", prompt(4))
    assert [driver.core.awaits_grammar(RequestId(name)) for name in ("a", "b", "plain", "none")] == [True] * 2 + [
        False
    ] * 2
    set_grammar(driver, "a", Tokens())
    driver.core.abort([RequestId("b")])
    assert not any(driver.core.awaits_grammar(RequestId(name)) for name in ("a", "b"))
