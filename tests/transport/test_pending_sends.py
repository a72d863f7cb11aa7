from __future__ import annotations

import pytest
import zmq

from transport.pending_sends import MAX_KEPT_BUFFERS, MAX_KEPT_BYTES, PendingSends


@pytest.fixture
def parts():
    """Frames whose trackers are done once they are dropped from this list."""
    return [zmq.Frame(bytearray(1 << 17), track=True, copy=False) for _ in range(2 * MAX_KEPT_BUFFERS + 2)]


def finish(parts: list[zmq.Frame], number: int) -> None:
    tracker = parts[number].tracker
    parts[number] = None
    tracker.wait(5)


def gauges(pending: PendingSends) -> tuple[int, int]:
    return pending.num_pending, pending.pending_bytes


def test_a_message_is_held_until_all_its_frames_are_done(parts):
    pending = PendingSends()
    pending.hold([parts[0].tracker, parts[1].tracker], [], 1 << 18)
    finish(parts, 0)
    pending.sweep()
    assert gauges(pending) == (1, 1 << 18)
    finish(parts, 1)
    pending.reap()
    assert gauges(pending) == (0, 0)


def test_what_overtook_an_older_message_is_let_go_too(parts):
    pending = PendingSends()
    for tracker in [part.tracker for part in parts]:
        pending.hold([tracker], [], 1 << 17)
    for number in range(1, len(parts)):
        finish(parts, number)
    pending.sweep()
    assert gauges(pending) == (1, 1 << 17)
    finish(parts, 0)
    pending.reap()
    assert gauges(pending) == (0, 0)


def test_reaping_finds_what_overtook_without_being_asked_to_sweep():
    pending = PendingSends()
    first = zmq.Frame(bytearray(1 << 17), track=True, copy=False)
    pending.hold([first.tracker], [], 1)
    most = 0
    for _ in range(100):
        part = zmq.Frame(bytearray(1 << 17), track=True, copy=False)
        tracker = part.tracker
        pending.hold([tracker], [], 1)
        del part
        tracker.wait(5)
        pending.reap()
        most = max(most, pending.num_pending)
    assert most <= 5
    assert first.tracker is not None


def test_a_buffer_comes_back_when_its_message_is_done_and_not_before(parts):
    pending = PendingSends()
    buffer = pending.take_buffer()
    pending.hold([parts[0].tracker], [buffer], 1, buffer)
    assert pending.take_buffer() is not buffer
    finish(parts, 0)
    assert pending.take_buffer() is buffer


def test_two_buffers_are_kept_and_no_huge_one():
    pending = PendingSends()
    buffers = [bytearray(10) for _ in range(4)]
    for buffer in buffers:
        pending.give_back(buffer)
    taken = [pending.take_buffer() for _ in range(4)]
    assert sum(any(buffer is old for old in buffers) for buffer in taken) == MAX_KEPT_BUFFERS == 2
    huge = bytearray(MAX_KEPT_BYTES + 1)
    pending.give_back(huge)
    pending.give_back(None)
    assert pending.take_buffer() is not huge
