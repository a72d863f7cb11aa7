from __future__ import annotations

from engine.outputs import RequestId
from engine.protocol import EngineCoreRequest
from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.scheduler.waiting_queue import WaitingQueue


def make_request(number: int, status: RequestStatus = RequestStatus.WAITING) -> Request:
    request = EngineCoreRequest(RequestId(f"r{number}"), "r", [1], SamplingParams(), arrival_time=0.0)
    made = Request(request, number, 10)
    made.status = status
    return made


def drain(queue: WaitingQueue) -> list[int]:
    numbers = []
    while (request := queue.peek()) is not None:
        numbers.append(request.arrival_number)
        queue.remove(request)
    return numbers


def test_who_is_set_aside_is_not_shown_until_restored_and_may_leave_meanwhile() -> None:
    queue = WaitingQueue()
    requests = [make_request(number) for number in range(4)]
    for request in requests:
        queue.add(request)
    queue.set_aside()
    queue.set_aside()
    assert queue.peek() is requests[2]
    assert len(queue) == 4
    queue.remove(requests[1])
    queue.remove(requests[2])
    queue.restore()
    assert drain(queue) == [0, 3]
    assert queue.peek() is None


def test_urgency_comes_before_preemption_and_preemption_before_position() -> None:
    queue = WaitingQueue()
    for number, urgency, status in (
        (1, 5, RequestStatus.PREEMPTED),
        (2, 5, RequestStatus.WAITING),
        (3, 0, RequestStatus.WAITING),
        (4, 0, RequestStatus.PREEMPTED),
    ):
        request = make_request(number, status)
        request.place = (urgency, number)
        queue.add(request)
    assert drain(queue) == [4, 3, 1, 2]


def test_requests_come_out_in_order_of_arrival_and_preempted_ones_before_all_others() -> None:
    queue = WaitingQueue()
    for number in (3, 5, 4):
        queue.add(make_request(number))
    for number in (9, 7):
        queue.add(make_request(number, RequestStatus.PREEMPTED))
    assert [request.arrival_number for request in queue] == [7, 9, 3, 4, 5]
    assert drain(queue) == [7, 9, 3, 4, 5]


def test_who_leaves_early_never_comes_up_and_is_not_kept() -> None:
    queue = WaitingQueue()
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
    queue = WaitingQueue()
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
