"""The seam between the core and whatever compiles schemas, expressions and grammars.

A grammar is the state of one request's output. The core asks for a mask before a token is sampled and tells each token
once it is committed, so that a grammar never has to be rolled back: plans that were undone told it nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.outputs import GrammarMasks

BITS_A_WORD = 32


class Grammar(Protocol):
    """One request's grammar, advanced by the tokens it got."""

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can follow it: the request ends then, whatever else it may do."""
        ...

    @property
    def failure(self) -> str | None:
        """Why it allows nothing more although it is not finished; None while it works."""
        ...

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance over `token_ids`; False where the grammar cannot, and the request ends in an error."""
        ...

    def fill_bitmask(self, bitmask: GrammarMasks) -> None:
        """Set in `bitmask`, zeros `[ceil(vocab_size / 32)]`, the bit of each token that may come next."""
        ...


def new_bitmasks(num_rows: int, vocab_size: int) -> GrammarMasks:
    """Return masks that allow nothing, `[num_rows, ceil(vocab_size / 32)]`; token i is bit i % 32 of word i // 32."""
    return np.zeros((num_rows, -(-vocab_size // BITS_A_WORD)), dtype=np.int32)
