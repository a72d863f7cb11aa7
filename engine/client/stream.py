"""One request's outputs as its reader takes them: no task of its own, the receive task fills it and wakes who waits.

A slow reader gets larger deltas, bounded by the request itself.
"""

from __future__ import annotations

from typing import Self

import trio

from engine.client.output_processor import CompletionOutput, RequestOutput, RequestState, Usage
from engine.errors import EngineDeadError
from engine.outputs import Logprobs
from engine.sampling_params import OutputKind


class Stream:
    """The outputs of one request as they come: an async iterator for one reader."""

    def __init__(self, state: RequestState, kind: OutputKind) -> None:
        """Read from `state`, which the receive task fills."""
        self._state = state
        self._kind = kind
        self._news = trio.Event()
        self._death: EngineDeadError | None = None

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
        await trio.lowlevel.checkpoint()
        while True:
            news = self._state.fetch()
            if news is not None:
                return news
            if self._state.is_finished:
                raise StopAsyncIteration
            if self._death is not None:
                raise self._death
            self._news = trio.Event()
            await self._news.wait()

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

    def wake(self, death: EngineDeadError | None = None) -> None:
        """Tell the reader to look again; called by the receive task."""
        self._death = self._death or death
        self._news.set()
