"""One dedicated thread, owned by whoever awaits `aclose`: jobs in by a queue, results out by a descriptor.

Device contexts, library handles and thread-local modes belong to one thread, which a thread pool cannot promise. The
way back is an eventfd in Trio's own epoll set: about half the latency of a call through the loop's token.

A job cannot be cancelled, only waited for: `Job.result` is shielded and a cancellation is seen at the caller's next
checkpoint. The thread is not a daemon: a program that forgets `aclose` hangs at its exit instead of dying in a job.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import trio
from trio.lowlevel import cancel_shielded_checkpoint, enable_ki_protection

from transport.descriptor import Bell

P = ParamSpec("P")
T = TypeVar("T")


class WorkerLost(RuntimeError):
    """The worker's thread has ended without having been asked to; no job will run any more."""


class Job(Generic[T]):
    """One call given to a `Worker`; made by `Worker.submit`."""

    def __init__(self, worker: Worker) -> None:
        """Belong to `worker`, which runs the call."""
        self._worker = worker
        self._value: T
        self._error: BaseException | None = None
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether `result` would give its answer at once."""
        return self._is_done

    @enable_ki_protection
    async def result(self) -> T:
        """Wait for the job's end and return what it returned; any number of tasks may wait.

        Shielded: never raises `trio.Cancelled`, a cancellation is seen at the next checkpoint.

        Raises:
            WorkerLost: The thread ended before it had run this job.
            BaseException: Whatever the job raised.
        """
        await self._worker._wait_for(self)
        if not self._is_done:
            raise WorkerLost(f"worker thread {self._worker.name!r} has ended without being asked to")
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self  # else error → traceback → this frame → self → error keeps the job's tensors alive

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._value = call()
        except BaseException as error:  # the worker's main: reported to whoever awaits the job
            self._error = error
        self._is_done = True
        del self  # the same cycle as in `result`


class Worker(trio.abc.AsyncResource):
    """One thread that runs jobs strictly in the order of their submission.

    Used from the tasks of one Trio loop. `start` it before the first `submit`; `aclose` waits for the thread's end.
    """

    def __init__(self, name: str) -> None:
        """Name the thread `name`; nothing is started or opened yet."""
        self.name = name
        self._jobs: queue.SimpleQueue[tuple[Job[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._bell: Bell | None = None
        self._is_closing = False
        self._has_ended = False
        self._is_abandoned = False

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: It was started or closed before.
        """
        if self._thread is not None or self._is_closing:
            raise RuntimeError(f"worker {self.name!r} can be started only once")
        self._bell = Bell()
        self._thread = threading.Thread(target=self._main, args=(self._bell,), name=self.name)
        self._thread.start()

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Queue `fn(*args, **kwargs)` and return at once; it runs in a copy of the caller's context variables.

        What the job raises is delivered by `Job.result` alone: await every job.

        Raises:
            trio.ClosedResourceError: `aclose` was called.
            RuntimeError: The worker was not started.
        """
        if self._is_closing:
            raise trio.ClosedResourceError(f"worker {self.name!r} is closed")
        if self._thread is None:
            raise RuntimeError(f"start worker {self.name!r} before submitting jobs")
        context = contextvars.copy_context()
        job: Job[T] = Job(self)
        self._jobs.put((job, lambda: context.run(fn, *args, **kwargs)))
        return job

    def abandon(self) -> None:
        """Count the thread as lost, whatever it does: who waits gets `WorkerLost`, `aclose` does not wait.

        For a job that hangs: no thread can be ended from outside. Nothing but the process's end ends it.
        """
        self._is_abandoned = self._has_ended = True
        if self._bell is not None:
            self._bell.ring()

    @enable_ki_protection
    async def aclose(self) -> None:
        """End the thread after the jobs submitted so far, and wait for it; shielded and idempotent.

        Never raises `trio.Cancelled`, so that it may stand in a row of clean-ups.
        """
        if not self._is_closing:
            self._is_closing = True
            self._jobs.put(None)
        if self._thread is not None and self._bell is not None:
            with trio.CancelScope(shield=True):
                while not self._has_ended:
                    await self._bell.wait()
            if not self._is_abandoned:
                self._thread.join()  # it has rung already: nothing is left but its last instructions
                self._bell.close()
        await cancel_shielded_checkpoint()

    async def _wait_for(self, job: Job[Any]) -> None:
        if job.is_done or self._has_ended:
            await cancel_shielded_checkpoint()
            return
        assert self._bell is not None
        with trio.CancelScope(shield=True):
            while not job.is_done and not self._has_ended:
                await self._bell.wait()

    def _main(self, bell: Bell) -> None:
        try:
            while (queued := self._jobs.get()) is not None:
                job, call = queued
                job._run(call)
                del queued, job, call  # an idle thread keeps neither arguments nor results alive
                bell.ring()
        finally:
            self._has_ended = True
            bell.ring()
