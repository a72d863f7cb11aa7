"""What the verbs share: exit codes, and an engine whose start a signal cancels."""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable

import msgspec
import trio

from engine.client.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.launch import open_engine
from engine.progress import show_progress
from transport.services import open_services

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_DEAD = 1
"""The engine died, or what was measured failed."""
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""What was asked for was not brought to its end."""
EXIT_PIPE = 128 + signal.SIGPIPE
"""Whoever read our output has gone."""


def _nothing() -> None:
    """Do nothing."""


async def with_engine(
    config: EngineConfig,
    stop: trio.Event,
    body: Callable[[AsyncLLM], Awaitable[None]],
    *,
    give_up: Callable[[], None] = _nothing,
) -> None:
    """Run `body` with an engine whose start `stop` cancels; once it is ready, `stop` is the body's business.

    `give_up` is called before a start is cancelled. Of a start that was given up nobody wants to know any more how it
    would have failed: whoever stops all processes of a service at once also stops an engine that loads.
    """
    is_loading = True
    try:
        with trio.CancelScope() as loading, show_progress() as progress:

            def cancel() -> None:
                give_up()
                loading.cancel()

            async with open_services() as watchers:
                watchers.start_soon(then, stop.wait, cancel)
                async with open_engine(progress=progress, **msgspec.structs.asdict(config)) as llm:
                    watchers.cancel()
                    is_loading = False
                    await body(llm)
    except EngineDeadError as death:
        if not (is_loading and stop.is_set()):
            raise
        logger.debug("the start was given up: %s", death)


async def until_stopped(stop: trio.Event, body: Callable[[], Awaitable[object]]) -> None:
    """Run `body`, and cancel it once `stop` is set."""
    async with trio.open_nursery() as watchers:
        watchers.start_soon(then, stop.wait, watchers.cancel_scope.cancel)
        await body()
        watchers.cancel_scope.cancel()


async def then(wait: Callable[[], Awaitable[object]], act: Callable[[], object]) -> None:
    """Wait, then act."""
    await wait()
    act()
