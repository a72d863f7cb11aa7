"""Background tasks that outlive a cancellation of the body they serve, until the body has cleaned up.

In a plain nursery a cancellation from outside reaches the body and its background tasks at once, so the body's last
words find nobody to send them. Services are shielded: they end when the body has been left, never before, unless one
of them fails; then the body is cancelled. Whatever single exception comes out comes out bare, not in a group.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVarTuple

import trio

Args = TypeVarTuple("Args")


class Services:
    """Starts tasks in a nursery, each shielded until `cancel`."""

    def __init__(self, nursery: trio.Nursery) -> None:
        """Start tasks in `nursery`, which whoever opened it owns."""
        self._nursery = nursery
        self._scopes: list[trio.CancelScope] = []

    def start_soon(self, function: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
        """Start `function(*args)` in the background."""
        scope = trio.CancelScope(shield=True)
        self._scopes.append(scope)
        self._nursery.start_soon(self._run, scope, function, args)

    def cancel(self) -> None:
        """Cancel all services started so far."""
        for scope in self._scopes:
            scope.cancel()

    @staticmethod
    async def _run(
        scope: trio.CancelScope, function: Callable[..., Awaitable[object]], args: tuple[object, ...]
    ) -> None:
        with scope:
            await function(*args)


@asynccontextmanager
async def open_services() -> AsyncIterator[Services]:
    """Open a scope for services; leaving it cancels them and waits for their ends."""
    try:
        async with trio.open_nursery() as nursery:
            services = Services(nursery)
            try:
                yield services
            finally:
                services.cancel()
    except BaseExceptionGroup as group:
        error = _only(group)
        if error is None:
            raise
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context  # raising here would hide the true one behind the group
            del error, group


def _only(error: BaseException) -> BaseException | None:
    """Return the one exception inside nested groups, or None where there are several."""
    while isinstance(error, BaseExceptionGroup):
        if len(error.exceptions) != 1:
            return None
        error = error.exceptions[0]
    return error
