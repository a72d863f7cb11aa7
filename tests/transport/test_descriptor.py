from __future__ import annotations

import os
import threading

import pytest
import trio
import trio.testing

from transport.descriptor import Bell, Descriptor


@pytest.fixture
def pipe():
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


async def test_all_waiters_of_one_descriptor_wake_when_it_becomes_readable(pipe):
    read_fd, write_fd = pipe
    descriptor = Descriptor(read_fd)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(descriptor.wait)
            await trio.testing.wait_all_tasks_blocked()
            os.write(write_fd, b"x")


async def test_a_cancelled_leader_hands_its_place_on(pipe):
    read_fd, write_fd = pipe
    descriptor = Descriptor(read_fd)
    woken = []

    async def wait(name, scope):
        with scope:
            while not woken_by_write:
                await descriptor.wait()
            woken.append(name)

    woken_by_write = False
    scopes = {name: trio.CancelScope() for name in "abc"}
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for name, scope in scopes.items():
                nursery.start_soon(wait, name, scope)
                await trio.testing.wait_all_tasks_blocked()
            scopes["a"].cancel()
            await trio.testing.wait_all_tasks_blocked()
            woken_by_write = True
            os.write(write_fd, b"x")
    assert sorted(woken) == ["b", "c"]


async def test_wake_returns_every_waiter_without_an_event(pipe):
    descriptor = Descriptor(pipe[0])
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(descriptor.wait)
            await trio.testing.wait_all_tasks_blocked()
            descriptor.wake()


async def test_closing_ends_the_leader_with_closed_resource_error(pipe):
    descriptor = Descriptor(pipe[0])
    with trio.fail_after(5), pytest.RaisesGroup(trio.ClosedResourceError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(descriptor.wait)
            await trio.testing.wait_all_tasks_blocked()
            descriptor.close()
            descriptor.close()


@pytest.mark.parametrize("has_eventfd", [True, False])
async def test_a_bell_rung_by_a_thread_is_never_missed(has_eventfd, monkeypatch):
    if not has_eventfd:
        monkeypatch.delattr(os, "eventfd", raising=False)
    bell = Bell()
    num_rounds, num_waiters = 200, 3
    reached = 0
    asked = threading.Semaphore(0)

    def ring() -> None:
        nonlocal reached
        for _ in range(num_rounds):
            asked.acquire()
            reached += 1
            bell.ring()

    async def wait_for(target: int) -> None:
        while reached < target:
            await bell.wait()

    thread = threading.Thread(target=ring)
    thread.start()
    with trio.fail_after(20):
        for target in range(1, num_rounds + 1):
            async with trio.open_nursery() as nursery:
                for _ in range(num_waiters):
                    nursery.start_soon(wait_for, target)
                asked.release()
    thread.join()
    bell.close()
    bell.close()


async def test_a_ring_is_kept_until_somebody_waits_and_a_thousand_rings_are_one():
    bell = Bell()
    for _ in range(1000):
        bell.ring()
    with trio.fail_after(5):
        await bell.wait()
    with trio.move_on_after(0.01) as scope:
        await bell.wait()
    assert scope.cancelled_caught
    bell.close()
