"""One request's outputs as its reader takes them: no task of its own, the receive task fills it and wakes who waits.

A slow reader gets larger deltas, bounded by the request itself.
"""

from __future__ import annotations

from typing import Protocol, Self

import trio

from engine.client.output_processor import CompletionOutput, RequestOutput, RequestState, Usage
from engine.errors import EngineDeadError
from engine.outputs import Logprobs
from engine.sampling_params import OutputKind


class Source(Protocol):
    """What the receive task fills, and one reader takes from."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing more comes once all is fetched."""

    def fetch(self) -> CompletionOutput | None:
        """Return what came since the last call; None for nothing."""


class Reader:
    """Waits for what the receive task fills; that wakes it.

    Attributes:
        death: Why nothing more comes, once the engine has died.
    """

    def __init__(self) -> None:
        """Start with nothing to read."""
        self.death: EngineDeadError | None = None
        self._news = trio.Event()

    def wake(self, death: EngineDeadError | None = None) -> None:
        """Tell who reads to look again; called by the receive task."""
        self.death = self.death or death
        self._news.set()
        self._news = trio.Event()

    async def next_of(self, source: Source) -> CompletionOutput:
        """Wait for news of `source`; a cancelled wait loses nothing.

        Raises:
            StopAsyncIteration: It has ended.
            EngineDeadError: The engine died before its end.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        has_waited = False
        while (news := source.fetch()) is None and not source.is_finished and self.death is None:
            await self._news.wait()
            has_waited = True
        if not has_waited:
            await trio.lowlevel.cancel_shielded_checkpoint()  # nothing that is fetched may be lost
        if news is not None:
            return news
        if self.death is None or source.is_finished:
            raise StopAsyncIteration
        raise self.death


class Stream(Reader):
    """The outputs of one request as they come: an async iterator for one reader."""

    def __init__(self, state: RequestState, kind: OutputKind) -> None:
        """Read from `state`, which the receive task fills."""
        super().__init__()
        self._state = state
        self._kind = kind

    @property
    def request_id(self) -> str:
        """The caller's label, or the one that was made up for it."""
        return self._state.request_id

    @property
    def prompt(self) -> str | None:
        """The prompt's text, the rendered template for chat; None where ids were given."""
        return self._state.prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids."""
        return self._state.prompt_token_ids

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens the prefix cache gave; 0 until the first output."""
        return self._state.num_cached_tokens

    @property
    def usage(self) -> Usage:
        """Tokens taken so far."""
        return self._state.usage

    def __aiter__(self) -> Self:
        """Iterate over deltas (or whatever `output_kind` asks for)."""
        return self

    async def __anext__(self) -> CompletionOutput:
        """Wait for news; a cancelled wait loses nothing.

        Raises:
            EngineDeadError: The engine died before the request's end.
        """
        return await self.next_of(self._state)

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Of the prompt's tokens but the first, when asked for; known with the first token."""
        return self._state.prompt_logprobs

    async def collect(self) -> RequestOutput:
        """Read to the end and return the whole."""
        outputs = [CompletionOutput(index=i, token_ids=[]) for i in range(len(self._state.completions))]
        deltas: list[list[CompletionOutput]] = [[] for _ in outputs]
        async for news in self:
            outputs[news.index] = news
            if self._kind is OutputKind.DELTA:
                deltas[news.index].append(news)
        return self._state.output(
            [CompletionOutput.join(parts) if parts else last for parts, last in zip(deltas, outputs, strict=True)]
        )
