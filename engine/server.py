"""The core under Trio: receive, step, send, in one nursery.

::

    client ──receive task──▶ inbox ──▶ step task ──▶ outbox ──send task──▶ client
                                         │  ▲
                                   plan  ▼  │  result
                                       executor's thread

What the step task does is in step_loop.py. The last word is said once, after all else: whatever breaks later is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable

import trio

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import Cause, ConfigError, ModelError
from engine.executor.base import Executor
from engine.inbox import Inbox
from engine.protocol import (
    Acknowledge,
    ClientMessage,
    EngineDead,
    EngineMessage,
    EngineReady,
    EngineStopped,
    StartProgress,
)
from engine.step_loop import StepLoop
from engine.task_tree import telling, write_report, write_stacks
from engine.watchdog import Watchdog
from transport.services import Services, open_services

logger = logging.getLogger(__name__)
teardown = logging.getLogger("teardown")

LAST_WORD_TIMEOUT_S = 5.0
"""How long an engine that ends waits for its last word to be acknowledged."""

Receive = Callable[[], Awaitable[list[ClientMessage]]]
Send = Callable[[EngineMessage], None]


class EngineCoreServer:
    """One engine: executor, core and the tasks that join them to a client. `run` is its whole life."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        receive: Receive,
        send: Send,
        *,
        engine_index: int = 0,
        alarm: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """Own `executor` from `run` on. `receive` waits for messages, `send` never waits; `alarm`: see `Watchdog`."""
        self._config = config
        self._executor = executor
        self._receive = receive
        self._send = send
        self._engine_index = engine_index
        self._phase = ""
        self._inbox = Inbox()
        self._last_word: EngineStopped | EngineDead | None = None
        self._acknowledged = trio.Event()
        self._watchdog = Watchdog(config.step_timeout, alarm)
        self._outbox_send, self._outbox_receive = trio.open_memory_channel[EngineMessage](float("inf"))

    async def run(self) -> Cause | None:
        """Start, serve until told to stop, say the last word, free everything. Returns what ended it, None if asked.

        Cancelling it ends the engine at the next step boundary without a last word.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive_task)
                try:
                    async with open_services() as services:
                        await self._say_last_word(await self._serve(services))
                except Exception as error:  # a service's door
                    await self._say_last_word(self._cause_of(error))
                teardown.debug("grammar back end closed")
                nursery.cancel_scope.cancel()
        except Exception as error:  # the door of the task that receives: nobody can acknowledge a last word any more
            self._send_last_word(self._cause_of(error))
        finally:
            await self._executor.aclose()
            teardown.debug("executor closed")
        return self._last_word.cause if isinstance(self._last_word, EngineDead) else None

    async def _serve(self, services: Services) -> Cause | None:
        """Start and serve until told to stop or something breaks; `services` outlive this."""
        try:
            core = await self._start()
            tell = self._outbox_send.send_nowait
            steps = StepLoop(core, self._config, self._executor, self._inbox, tell, self._watchdog, self._engine_index)
            services.start_soon(steps.grammars.run)
            services.start_soon(steps.utilities.run)  # it may be at the runner, whose answer no last word waits for
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_task)
                with telling(f"engine {self._engine_index}", lambda: steps.describe(self._num_unsent)):
                    await self._watched(steps)
        except Exception as error:  # the step's door: whatever broke is the engine's end, with its cause
            return self._cause_of(error)
        finally:
            teardown.debug("step task ended")
        return None

    def _cause_of(self, error: Exception) -> Cause:
        cause = Cause.of(error, self._phase)
        # What the operator can mend is told by the front, in one line.
        level = logging.DEBUG if isinstance(error, ConfigError | ModelError) else logging.ERROR
        logger.log(level, "%s\n%s", cause, cause.traceback)
        return cause

    async def _say_last_word(self, cause: Cause | None) -> None:
        """Send the last word, and wait until that is acknowledged."""
        self._send_last_word(cause)
        with trio.move_on_after(LAST_WORD_TIMEOUT_S):
            await self._acknowledged.wait()
            teardown.debug("last word acknowledged")

    def _send_last_word(self, cause: Cause | None) -> None:
        """Send what the send task had not come to, then the last word, unless that was said before."""
        if self._last_word is not None:
            return
        while self._num_unsent:
            self._send(self._outbox_receive.receive_nowait())
        stopped = EngineStopped(self._engine_index)
        self._last_word = stopped if cause is None else EngineDead(cause, self._engine_index)
        self._send(self._last_word)

    # -- start ---------------------------------------------------------------------------------------------------

    async def _start(self) -> EngineCore:
        capacity = await self._executor.start(self._config, self._enter_phase)
        self._enter_phase("scheduler", 0, 1)
        salt = (self._config.prefix_hash_seed or "").encode()
        core = EngineCore(self._config, capacity, hash_salt=salt)
        self._phase = ""
        self._send(EngineReady.of(capacity, engine_index=self._engine_index, pid=os.getpid()))
        return core

    def _enter_phase(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            logger.info("starting: %s", phase)
        self._phase = phase
        self._send(StartProgress(phase, done, total, self._engine_index))

    # -- the tasks -----------------------------------------------------------------------------------------------

    async def _receive_task(self) -> None:
        while True:
            for message in await self._receive():
                if isinstance(message, Acknowledge):
                    self._acknowledged.set()
                else:
                    self._inbox.put(message)

    async def _send_task(self) -> None:
        """Send apart from the step task, so that the next step is launched before the last one's tokens are encoded."""
        async for message in self._outbox_receive:
            self._send(message)

    @property
    def _num_unsent(self) -> int:
        return self._outbox_receive.statistics().current_buffer_used

    async def _watched(self, steps: StepLoop) -> None:
        """Run the step task to its end, or until the watchdog has enough of it."""
        with self._outbox_send:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watchdog.run, self._give_up)
                async with trio.open_nursery() as inner:
                    inner.start_soon(steps.run)
                nursery.cancel_scope.cancel()

    def _give_up(self) -> None:
        """Show what hangs, and do not wait for it any more."""
        write_report()
        write_stacks()
        self._executor.abandon()
