"""What all routes of one server share: the engine, the served name, and whether the server is stopping."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

import trio

from engine.client.async_llm import AsyncLLM
from engine.errors import Cause
from web.errors import ModelNotFound, ServerStopping


class ServerState:
    """One server's state; `serve` and the routes share it.

    Attributes:
        engine: Answers the requests; owned by whoever opened it.
        model_name: The one name under which it is served.
        created: Unix time of the start, seconds; reported as the model's.
        stopping: Set by `stop`: probes and new work get 503, what was accepted goes on.
        aborting: Set by `abort_all`: what was accepted ends too.
    """

    def __init__(self, engine: AsyncLLM, *, model_name: str | None = None) -> None:
        """Serve `engine` under `model_name`, by default the engine's own."""
        self.engine = engine
        self.model_name = engine.model_name if model_name is None else model_name
        self.created = int(time.time())
        self.stopping = False
        self.aborting = False
        self._open: dict[Callable[[], Iterable[str]], frozenset[str]] = {}
        self._idle = trio.Event()
        self._ended_by_stop: set[trio.CancelScope] = set()

    @property
    def is_healthy(self) -> bool:
        """Whether new requests have a chance: the engine lives and nobody asked the server to stop."""
        return self.engine.is_healthy and not self.stopping

    @property
    def num_open_requests(self) -> int:
        """Accepted generation requests whose answer is not yet handed to the network."""
        return len(self._open)

    def stop(self) -> None:
        """Take no new work from now on. Idempotent."""
        self.stopping = True
        for scope in self._ended_by_stop:
            scope.cancel()

    @contextlib.contextmanager
    def until_stop(self) -> Iterator[None]:
        """Give the block up, and go on after it, once the server is asked to stop; at once where it is already."""
        with trio.CancelScope() as scope:
            self._ended_by_stop.add(scope)
            if self.stopping:
                scope.cancel()
            try:
                yield
            finally:
                self._ended_by_stop.discard(scope)

    def check_alive(self) -> None:
        """Raise what ended the engine, if something did."""
        if self.engine.death is not None:
            raise self.engine.death

    def check_accepting(self, model: str | None) -> None:
        """Refuse a request for another model, and any request once the server is stopping.

        Raises:
            ModelNotFound: `model` is given and is not the served name; the caller's fault.
            ServerStopping: The server is stopping.
        """
        if self.stopping:
            raise ServerStopping
        if model is not None and model != self.model_name:
            raise ModelNotFound(f"model {model!r:.80} is not served here; use {self.model_name!r}", param="model")

    @contextlib.contextmanager
    def answering(self, stream_labels: Callable[[], Iterable[str]], labels: Iterable[str] = ()) -> Iterator[None]:
        """Count one accepted request as open during the block; `abort_all` may end its streams, by their labels.

        So may `abort_labelled` by one of the request's `labels`, which others may bear too.
        """
        self._open[stream_labels] = frozenset(labels)
        try:
            yield
        finally:
            del self._open[stream_labels]
            if not self._open:
                self._idle.set()
                self._idle = trio.Event()

    def abort_all(self) -> None:
        """Abort every accepted request; each still gets its terminal event, or 503 if it has not begun."""
        self.aborting = True
        self._abort(self._open)

    def abort_labelled(self, labels: frozenset[str]) -> int:
        """Abort the accepted requests that bear one of `labels`; return how many."""
        named = [stream_labels for stream_labels, own in self._open.items() if own & labels]
        self._abort(named)
        return len(named)

    def _abort(self, requests: Iterable[Callable[[], Iterable[str]]]) -> None:
        self.engine.abort(*(label for stream_labels in requests for label in stream_labels()))

    def give_up(self, waited_s: float) -> None:
        """Count an engine that does not answer as dead: open streams get their error event at once."""
        stuck = self.engine.busy_engines
        self.engine.give_up(Cause("EngineStuck", f"{stuck} did not end its requests within {waited_s:g} seconds"))

    async def wait_idle(self) -> None:
        """Wait until no accepted request is open."""
        while self._open:
            await self._idle.wait()
