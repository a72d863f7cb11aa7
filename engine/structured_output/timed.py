"""A grammar whose processor time is told to somebody, who may find that it is too much."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine.outputs import GrammarMasks
from engine.structured_output.grammar import Grammar

TellMask = Callable[[float], None]
TellAccepted = Callable[[float, int], None]


class TimedGrammar:
    """Does as another one does; see `Grammar`. What is told changes nothing of it."""

    def __init__(self, grammar: Grammar, tell_mask: TellMask, tell_accepted: TellAccepted) -> None:
        """Own `grammar`; tell the seconds of this thread that each mask took, and those of so many tokens accepted."""
        self._grammar = grammar
        self._tell_mask = tell_mask
        self._tell_accepted = tell_accepted

    @property
    def is_finished(self) -> bool:
        """See `Grammar`."""
        return self._grammar.is_finished

    @property
    def failure(self) -> str | None:
        """See `Grammar`."""
        return self._grammar.failure

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """See `Grammar`."""
        began_s = time.thread_time()
        is_accepted = self._grammar.accept_tokens(token_ids)
        self._tell_accepted(time.thread_time() - began_s, len(token_ids))
        return is_accepted

    def fill_bitmask(self, bitmask: GrammarMasks) -> None:
        """See `Grammar`."""
        began_s = time.thread_time()
        self._grammar.fill_bitmask(bitmask)
        self._tell_mask(time.thread_time() - began_s)
