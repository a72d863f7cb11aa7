from __future__ import annotations

from engine.outputs import RequestId
from engine.protocol import EngineCoreRequest
from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.scheduler.policy import POLICIES
from engine.scheduler.waiting_queue import WaitingQueue


def make_request(number: int, status: RequestStatus = RequestStatus.WAITING) -> Request:
    request = EngineCoreRequest(RequestId(f"r{number}"), "r", [1], SamplingParams(), arrival_time=0.0)
    made = Request(request, number, 10)
    made.status = status
    return made


def drain(queue: WaitingQueue) -> list[int]:
    numbers = []
    while queue:
        numbers.append(queue.peek().arrival_number)
        queue.remove(queue.peek())
    return numbers


def test_requests_come_out_in_order_of_arrival_and_preempted_ones_before_all_others() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    for number in (3, 5, 4):
        queue.add(make_request(number))
    for number in (9, 7):
        queue.add(make_request(number, RequestStatus.PREEMPTED))
    assert [request.arrival_number for request in queue] == [7, 9, 3, 4, 5]
    assert drain(queue) == [7, 9, 3, 4, 5]


def test_who_leaves_early_never_comes_up_and_is_not_kept() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    requests = [make_request(number) for number in range(1000)]
    for request in requests:
        queue.add(request)
    for request in requests[:990]:
        queue.remove(request)
        queue.remove(request)
    assert len(queue) == 10
    assert len(queue._heap) <= 20
    assert drain(queue) == list(range(990, 1000))


def test_a_request_may_come_back_under_another_status_or_another_under_its_id() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    first, second = make_request(1), make_request(2)
    queue.add(second)
    queue.add(first)
    queue.remove(second)
    second.status = RequestStatus.PREEMPTED
    queue.add(second)
    assert list(queue) == [second, first]
    queue.remove(first)
    again = make_request(1)
    queue.add(again)
    assert list(queue) == [second, again]
    assert drain(queue) == [2, 1]
