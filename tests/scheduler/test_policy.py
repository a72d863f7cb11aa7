"""Orders: arrival, priority with places taken, and fair turns among clients."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest

from engine.config import SchedulingPolicy
from engine.outputs import RequestId, SchedulerOutput
from engine.protocol import EngineCoreRequest
from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.scheduler.admission import MAX_YIELDS
from engine.scheduler.policy import MAX_DEBTORS, POLICIES, Fair
from engine.testing import CoreDriver


def started(plan: SchedulerOutput | None) -> list[str]:
    """Return the ids of a plan's rows."""
    assert plan is not None
    return [row.request_id for row in plan.requests]


def make_driver(policy: str, **settings: Any) -> CoreDriver:
    defaults = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 40, "block_size": 4}
    settings = {**defaults, "num_gpu_blocks_override": 40, "watermark": 0.0, **settings}
    return CoreDriver.of(scheduling_policy=policy, **settings)


def prompt(length: int, first: int = 0) -> list[int]:
    return [first, *range(100, 99 + length)]


def test_the_setting_offers_exactly_the_policies_there_are() -> None:
    assert set(get_args(SchedulingPolicy)) == set(POLICIES)


# -- priority ---------------------------------------------------------------------------------------------------------


def test_a_more_urgent_request_takes_the_place_of_the_least_urgent_one_that_runs() -> None:
    driver = make_driver("priority")
    driver.add("low", prompt(4, 1), priority=5, max_tokens=9)
    driver.add("lower", prompt(4, 2), priority=7, max_tokens=9)
    assert started(driver.step()) == ["low", "lower"]
    driver.add("urgent", prompt(4, 3), priority=1, max_tokens=3)
    assert started(driver.step()) == ["low", "urgent"]
    assert driver.core._requests["lower"].status is RequestStatus.PREEMPTED
    driver.run()
    assert driver.core.stats().num_preemptions == 1
    for name, num_tokens in (("low", 9), ("lower", 9), ("urgent", 3)):
        assert driver.completions[name].token_ids == driver.expected(name, num_tokens)


def test_equal_priority_never_takes_a_place_so_that_nobody_plays_ping_pong() -> None:
    driver = make_driver("priority", max_num_seqs=1)
    for name in ("a", "b", "c"):
        driver.add(name, prompt(4, ord(name)), priority=3, max_tokens=6)
        driver.step()
    driver.run()
    assert driver.core.stats().num_preemptions == 0


def test_an_urgent_request_that_lacks_blocks_takes_them_from_as_many_as_it_needs_and_no_more() -> None:
    driver = make_driver("priority", max_num_seqs=8, num_gpu_blocks_override=10)
    for number in range(4):
        driver.add(f"low{number}", prompt(6, number), priority=5, max_tokens=3)
    driver.step()
    driver.add("urgent", prompt(15, 9), priority=1, max_tokens=4)  # four blocks, two are free
    assert started(driver.step()) == ["low0", "low1", "low2", "low3"]  # it is tried for the first time
    assert started(driver.step()) == ["low0", "low1", "low2", "urgent"]
    driver.run()
    assert driver.core.stats().num_preemptions == 1
    assert driver.completions["low3"].token_ids == driver.expected("low3", 3)


def test_nobody_loses_its_place_in_vain() -> None:
    driver = make_driver("priority", max_num_seqs=8, num_gpu_blocks_override=10)
    driver.add("other", prompt(24, 1), priority=0, max_tokens=4)
    driver.add("low", prompt(7, 2), priority=5, max_tokens=20)
    driver.step()
    driver.add("urgent", prompt(36, 3), priority=1, max_tokens=4)  # more than low could give
    assert started(driver.step()) == ["other", "low"]
    driver.run()
    assert driver.completions["urgent"].token_ids == driver.expected("urgent", 4)


def test_a_stream_of_urgent_requests_takes_a_place_only_so_often() -> None:
    driver = make_driver("priority", max_num_seqs=1)
    driver.add("low", prompt(4, 1), priority=9, max_tokens=8)
    low = driver.core._requests["low"]
    for number in range(30):
        driver.add(f"urgent{number}", prompt(2, number), priority=1, max_tokens=1)
        driver.step()
        driver.step()
        if low.is_finished:
            break
    assert low.is_finished
    assert low.num_yields == MAX_YIELDS


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_places_are_taken_with_plans_in_flight_and_every_token_is_right(depth: int) -> None:
    driver = make_driver("priority", max_concurrent_plans=depth, num_gpu_blocks_override=12)
    for number in range(12):
        driver.add(f"r{number}", prompt(3 + number % 5, number), priority=12 - number, max_tokens=7)
        driver.plan()
        if len(driver.plans) == depth:
            driver.finish_step()
    driver.run()
    for name, completion in driver.completions.items():
        assert completion.token_ids == driver.expected(name, 7)


# -- fair -------------------------------------------------------------------------------------------------------------


def test_a_client_with_a_thousand_requests_does_not_delay_one_with_one() -> None:
    driver = make_driver("fair", max_num_seqs=4)
    for number in range(1000):
        driver.add(f"many{number}", prompt(4, number % 256), client_key="greedy", max_tokens=30)
    for _ in range(3):
        driver.step()
    driver.add("single", prompt(4, 7), client_key="modest", max_tokens=3)
    assert "single" in started(driver.step())


def test_clients_take_turns_whatever_one_of_them_has_queued() -> None:
    driver = make_driver("fair", max_num_seqs=1)
    for number in range(5):
        driver.add(f"a{number}", prompt(4, number), client_key="a", max_tokens=1)
    for number in range(3):
        driver.add(f"b{number}", prompt(4, 10 + number), client_key="b", max_tokens=1)
    order = [started(driver.step())[0] for _ in range(8)]
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4"]


def test_long_requests_count_for_more_than_short_ones() -> None:
    driver = make_driver("fair", max_num_seqs=1)
    for number in range(3):
        driver.add(f"long{number}", prompt(20, number), client_key="a", max_tokens=1)
    for number in range(6):
        driver.add(f"short{number}", prompt(6, 10 + number), client_key="b", max_tokens=1)
    order = [started(driver.step())[0] for _ in range(9)]
    assert order == ["long0", "short0", "short1", "short2", "long1", "short3", "short4", "short5", "long2"]


def test_a_newcomer_takes_a_place_only_from_a_client_of_which_several_run() -> None:
    driver = make_driver("fair", max_num_seqs=3)
    driver.add("a0", prompt(4, 1), client_key="a", max_tokens=20)
    driver.add("b0", prompt(4, 2), client_key="b", max_tokens=20)
    driver.add("a1", prompt(4, 3), client_key="a", max_tokens=20)
    driver.step()
    driver.add("c0", prompt(4, 4), client_key="c", max_tokens=20)
    assert set(started(driver.step())) == {"a0", "b0", "c0"}
    driver.add("d0", prompt(4, 5), client_key="d", max_tokens=20)
    for _ in range(3):
        assert set(started(driver.step())) == {"a0", "b0", "c0"}  # of none of them two run
    driver.run()
    assert driver.core.stats().num_preemptions == 1
    assert driver.completions["a1"].token_ids == driver.expected("a1", 20)


def test_what_a_client_owes_outlives_its_requests_until_it_is_paid_and_only_then() -> None:
    driver = make_driver("fair", max_num_seqs=4)
    policy = driver.core._scheduler._policy
    assert isinstance(policy, Fair)
    for number in range(50):
        driver.add(f"r{number}", prompt(3, number), client_key=f"client {number % 7}", max_tokens=4)
    driver.abort("r3", "r40", "r41")
    driver.run()
    assert not policy._num_live
    assert not policy._num_running
    assert {*policy._next_start} == {f"client {number}" for number in range(7)}
    for number in range(4 * MAX_DEBTORS):
        driver.core.add(request(f"s{number}", f"once {number}"), 0.0)
        driver.run()
        assert len(policy._next_start) <= MAX_DEBTORS + 3
    assert "client 0" not in policy._next_start


def request(name: str, client: str) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    return EngineCoreRequest(RequestId(name), name, [65], params, 0.0, client_key=client)


def test_who_asks_one_by_one_does_not_starve_who_queues() -> None:
    driver = make_driver("fair", max_num_seqs=2)
    for number in range(6):
        driver.add(f"queued{number}", prompt(4, number), client_key="batch", max_tokens=6)
    live = {client: f"{client}0" for client in "abc"}
    for client, name in live.items():
        driver.add(name, prompt(4, ord(client)), client_key=client, max_tokens=6)
    for number in range(1, 120):
        driver.step()
        for client, name in live.items():
            if driver.completions[name].finish_reason is not None:
                live[client] = f"{client}{number}"
                driver.add(live[client], prompt(4, ord(client)), client_key=client, max_tokens=6)
    served = [driver.completions[f"queued{number}"].finish_reason for number in range(6)]
    assert None not in served, served


def test_each_turn_of_a_session_is_charged() -> None:
    driver = make_driver("fair", max_num_seqs=1)
    driver.add("s", prompt(4, 1), client_key="a", is_session=True, max_tokens=2)
    for _ in range(4):
        driver.extend("s", prompt(3, 2), max_tokens=2)
    for number in range(4):
        driver.add(f"b{number}", prompt(4, 10 + number), client_key="b", max_tokens=2)
    order = [name for _ in range(14) for name in started(driver.step())]
    assert [name for name, _ in itertools.groupby(order)][:5] == ["s", "b0", "s", "b1", "s"]


@pytest.mark.parametrize("backwards", [False, True])
def test_who_never_ran_is_not_charged_in_whatever_order_it_leaves(backwards: bool) -> None:
    driver = make_driver("fair", max_num_seqs=1)
    driver.add("running", prompt(2, 1), client_key="other", max_tokens=30)
    driver.step()
    names = [f"a{number}" for number in range(20)]
    for number, name in enumerate(names):
        driver.add(name, prompt(4, number), client_key="a", max_tokens=4)
    for name in reversed(names) if backwards else names:
        driver.abort(name)
    for number in range(3):
        driver.add(f"b{number}", prompt(4, number), client_key="b", max_tokens=4)
    driver.add("last", prompt(4, 9), client_key="a", max_tokens=4)
    waiting = [request.request_id for request in driver.core._scheduler.waiting]
    assert waiting.index("last") < waiting.index("b1")


def test_the_virtual_time_moves_on_by_a_share_of_what_is_admitted_and_newcomers_start_then() -> None:
    fair = Fair()
    starts = []
    for number, client in enumerate(("a", "a", "b", "a", "c")):
        made = Request(request(f"r{number}", client), number, 10)
        made.place = fair.place(made)
        made.move_to(RequestStatus.RUNNING)
        fair.started(made)
        starts.append(made.place[0])
    assert starts == [0, 2, 3, 4, 5]  # each asks for two tokens, and to move by less than one is none


# -- fair, though clients come that were never here before, and never end ---------------------------------------------


class Newcomers:
    """Keeps `num_waiting` requests waiting, each of a client of its own."""

    def __init__(self, driver: CoreDriver, num_waiting: int = 4) -> None:
        self.driver = driver
        self.num_waiting = num_waiting
        self.num_added = 0

    def step(self) -> None:
        while self.driver.core.stats().num_waiting < self.num_waiting:
            self.num_added += 1
            first, client = 50 + self.num_added % 50, f"once {self.num_added}"
            self.driver.add(f"n{self.num_added}", prompt(6, first), client_key=client, max_tokens=6)
        self.driver.step()

    def steps_until_ended(self, *names: str, max_steps: int = 400) -> int:
        """Run until all `names` have ended and return in how many steps; fails after `max_steps`."""
        for number in range(max_steps):
            if all(self.driver.completions[RequestId(name)].finish_reason is not None for name in names):
                return number
            self.step()
        raise AssertionError(f"{names} starve: {self.num_added} newcomers were added")


def test_endless_newcomers_do_not_starve_who_was_preempted_for_want_of_blocks() -> None:
    driver = make_driver("fair", num_gpu_blocks_override=10)
    driver.add("elder", prompt(4, 1), client_key="a", max_tokens=32)
    driver.add("younger", prompt(8, 2), client_key="b", max_tokens=24)
    while not driver.num_preemptions:
        driver.step()
    assert Newcomers(driver).steps_until_ended("elder", "younger") < 30
    assert driver.completions[RequestId("younger")].token_ids == driver.expected("younger", 24)


def test_endless_newcomers_do_not_starve_who_a_reset_has_preempted() -> None:
    driver = make_driver("fair")
    driver.add("a1", prompt(8, 1), client_key="a", max_tokens=20)
    driver.add("a2", prompt(8, 2), client_key="a", max_tokens=20)
    driver.step()
    driver.core.reset_prefix_cache(reset_running=True)
    newcomers = Newcomers(driver)
    assert newcomers.steps_until_ended("a1") < 25
    assert newcomers.steps_until_ended("a2") < 60  # it made way once: its client had two running


@pytest.mark.parametrize("num_waiting", [1, 4, 20])
def test_endless_newcomers_do_not_starve_a_clients_second_request(num_waiting: int) -> None:
    driver = make_driver("fair")
    driver.add("first", prompt(8, 1), client_key="a", max_tokens=20)
    driver.step()
    driver.add("second", prompt(8, 2), client_key="a", max_tokens=20)
    newcomers = Newcomers(driver, num_waiting)
    while not driver.completions[RequestId("second")].token_ids:
        newcomers.step()
        assert newcomers.num_added <= 28 * (1 + num_waiting)  # it starts 28 tokens later
    newcomers.steps_until_ended("second")


def test_among_endless_newcomers_a_client_that_queues_gets_one_request_after_the_other() -> None:
    driver = make_driver("fair")
    for number in range(5):
        driver.add(f"queued{number}", prompt(4, number), client_key="batch", max_tokens=6)
    newcomers = Newcomers(driver)
    for number in range(5):
        assert newcomers.steps_until_ended(f"queued{number}") < 60


def test_who_comes_waits_for_one_request_of_a_client_at_most_however_much_was_just_admitted() -> None:
    driver = make_driver("fair", max_num_seqs=1, max_model_len=400, num_gpu_blocks_override=101)
    for number in range(9):
        driver.add(f"many{number}", prompt(2, number), client_key="many", max_tokens=1)
    driver.add("huge", prompt(2, 60), client_key="huge", max_tokens=390)
    assert started(driver.step()) == ["many0"]
    assert started(driver.step()) == ["huge"]
    driver.abort("huge")
    driver.add("single", prompt(2, 61), client_key="single", max_tokens=1)
    assert [started(driver.step())[0] for _ in range(3)] == ["many1", "single", "many2"]


def test_who_awaits_a_grammar_does_not_hold_up_the_virtual_time() -> None:
    driver = make_driver("fair")
    driver.add("first", prompt(8, 1), client_key="a", max_tokens=20)
    driver.step()
    driver.add("aside", prompt(2, 2), client_key="a", max_tokens=2, awaits_grammar=True)
    driver.add("second", prompt(8, 3), client_key="a", max_tokens=20)
    Newcomers(driver).steps_until_ended("second")


def test_what_has_gone_by_while_a_request_waited_is_not_given_back_when_it_is_aborted() -> None:
    driver = make_driver("fair", max_num_seqs=1, max_model_len=200, num_gpu_blocks_override=60)
    driver.add("bait", prompt(50, 1), client_key="a", max_tokens=50, awaits_grammar=True)
    for number in range(4):
        driver.add(f"x{number}", prompt(4, number), client_key="x", max_tokens=60)
    while driver.completions[RequestId("x3")].finish_reason is None:
        driver.step()
    for number in range(3):
        driver.add(f"a{number}", prompt(4, number), client_key="a", max_tokens=20)
    driver.abort("bait")
    driver.add("a3", prompt(4, 3), client_key="a", max_tokens=20)
    starts = {request.request_id: request.place[0] for request in driver.live_requests}
    assert [starts[f"a{number}"] - starts["a0"] for number in range(4)] == [0, 24, 48, 72]


def test_who_owes_and_is_aborted_is_not_kept() -> None:
    driver = make_driver("fair")
    policy = driver.core._scheduler._policy
    assert isinstance(policy, Fair)
    driver.add("running", prompt(2, 1), client_key="a", max_tokens=30)
    driver.step()
    for number in range(3 * MAX_DEBTORS):
        driver.core.add(request(f"r{number}", "a"), 0.0)
        driver.core.abort([RequestId(f"r{number}")])
        driver.core.take_outputs()
    assert len(policy._owing) <= MAX_DEBTORS + 1
