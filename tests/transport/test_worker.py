from __future__ import annotations

import contextvars
import ctypes
import gc
import os
import threading
import weakref

import pytest
import trio
import trio.testing

from transport.worker import Worker, WorkerLost

colour = contextvars.ContextVar("colour", default="none")


@pytest.fixture
async def worker():
    worker = Worker("worker-under-test")
    worker.start()
    yield worker
    with trio.fail_after(5):
        await worker.aclose()


async def test_jobs_run_on_one_thread_in_the_order_of_submission(worker):
    ran = []

    def job(index):
        ran.append((index, threading.current_thread()))
        return index * index

    jobs = [worker.submit(job, index) for index in range(50)]
    assert [await job.result() for job in jobs] == [index * index for index in range(50)]
    assert [index for index, _ in ran] == list(range(50))
    (thread,) = {thread for _, thread in ran}
    assert thread is not threading.main_thread()
    assert thread.name == "worker-under-test"
    assert not thread.daemon


async def test_submit_returns_while_the_thread_is_busy(worker):
    gate = threading.Event()
    first = worker.submit(gate.wait)
    second = worker.submit(lambda: "after")
    assert not first.is_done
    gate.set()
    assert await second.result() == "after"
    assert first.is_done
    assert await first.result() is True


async def test_many_tasks_wait_for_many_jobs_at_once(worker):
    gates = [threading.Event() for _ in range(8)]
    got = {}

    async def wait(index, job):
        got[index] = await job.result()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for index, gate in enumerate(gates):
                job = worker.submit(lambda gate=gate, index=index: gate.wait() and index)
                nursery.start_soon(wait, index, job)
                nursery.start_soon(wait, index + 100, job)
            for gate in gates:
                await trio.testing.wait_all_tasks_blocked()
                gate.set()
    assert got == {index + offset: index for index in range(8) for offset in (0, 100)}


async def test_waiting_is_not_cancelled_and_the_cancellation_is_seen_at_the_next_checkpoint(worker):
    gate = threading.Event()
    with trio.fail_after(5):
        with trio.CancelScope() as scope:
            job = worker.submit(gate.wait)
            scope.cancel()
            gate.set()
            assert await job.result() is True
            assert await job.result() is True
            await trio.lowlevel.checkpoint()
            pytest.fail("the cancellation was lost")
    assert scope.cancelled_caught


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
async def test_what_a_job_raises_is_raised_to_each_waiter_and_the_thread_goes_on(worker, kind):
    def fail():
        raise kind("as asked")

    job = worker.submit(fail)
    for _ in range(2):
        with pytest.raises(kind, match="as asked"):
            await job.result()
    assert await worker.submit(lambda: 7).result() == 7


async def test_jobs_see_a_copy_of_the_submitters_context_variables(worker):
    colour.set("red")
    job = worker.submit(colour.get)
    colour.set("blue")
    assert await job.result() == "red"
    await worker.submit(colour.set, "green").result()
    assert colour.get() == "blue"


async def test_an_idle_worker_keeps_no_argument_result_or_failed_frame_alive(worker):
    class Large:
        pass

    def fail(argument):
        local = Large()
        seen.append(weakref.ref(local))
        raise ValueError("as asked")

    seen = []
    argument = Large()
    seen.append(weakref.ref(argument))
    job = worker.submit(fail, argument)
    del argument
    gc.disable()
    try:
        with pytest.raises(ValueError, match="as asked") as caught:
            await job.result()
        del caught, job
        await worker.submit(lambda: None).result()
        assert [reference() for reference in seen] == [None, None]
    finally:
        gc.enable()


def lose(worker: Worker) -> None:
    """End the worker's thread as a debugger would: by an exception between two jobs."""
    thread = worker._thread
    assert thread is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_lost_thread_is_told_to_present_and_future_waiters_at_once(worker):
    told = []

    async def wait(job):
        with pytest.raises(WorkerLost, match="worker-under-test"):
            await job.result()
        told.append(job)

    await worker.submit(lambda: None).result()
    lose(worker)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait, worker.submit(lambda: None))
        await wait(worker.submit(lambda: None))
        assert len(told) == 4
        await worker.aclose()


async def test_aclose_runs_what_was_submitted_then_ends_the_thread_even_when_cancelled():
    worker = Worker("closing")
    worker.start()
    ran = []
    gate = threading.Event()
    job = worker.submit(gate.wait)
    worker.submit(ran.append, 1)
    with trio.fail_after(5), trio.CancelScope() as scope:
        scope.cancel()
        gate.set()
        await worker.aclose()
        await worker.aclose()
        assert ran == [1]
        assert await job.result() is True
    with pytest.raises(trio.ClosedResourceError):
        worker.submit(ran.append, 2)


async def test_two_tasks_may_close_at_once():
    worker = Worker("closing twice")
    worker.start()
    gate = threading.Event()
    worker.submit(gate.wait)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.aclose)
            nursery.start_soon(worker.aclose)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()


async def test_a_worker_that_never_started_closes_and_refuses_jobs():
    worker = Worker("idle")
    with pytest.raises(RuntimeError, match="start worker 'idle'"):
        worker.submit(print)
    await worker.aclose()
    with pytest.raises(RuntimeError, match="only once"):
        worker.start()


async def test_works_over_a_pipe_where_there_is_no_eventfd(monkeypatch):
    monkeypatch.delattr(os, "eventfd", raising=False)
    async with Worker("piped") as worker:
        worker.start()
        for index in range(100):
            assert await worker.submit(lambda index=index: index).result() == index
