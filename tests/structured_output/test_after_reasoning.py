"""What follows the reasoning has its form; the grammar is told of nothing before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engine.outputs import GrammarMasks
from engine.sampling_params import ReasoningTokens
from engine.structured_output.after_reasoning import GrammarAfterReasoning
from engine.structured_output.grammar import new_bitmasks

START, MARK, EOS, SIZE = 3, 77, 5, 6000
OPENING, INSIDE = ReasoningTokens(START, MARK), ReasoningTokens(None, MARK)


class Told:
    """A grammar that allows token 42 and keeps what it is told."""

    is_finished = False
    failure = None

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        self.token_ids += token_ids
        return 13 not in token_ids

    def fill_bitmask(self, bitmask: GrammarMasks) -> None:
        bitmask[42 // 32] |= 1 << 42 % 32


def allowed(grammar: GrammarAfterReasoning) -> set[int]:
    mask = new_bitmasks(1, SIZE)[0]
    grammar.fill_bitmask(mask)
    return {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()}


@pytest.mark.parametrize("sizes", [(5,), (1, 1, 1, 1, 1), (2, 1, 2), (3, 2), (4, 1)])
def test_only_what_follows_the_reasonings_end_is_told_however_it_comes(sizes: tuple[int, ...]) -> None:
    inner = Told()
    grammar = GrammarAfterReasoning(inner, INSIDE, [EOS], SIZE)
    token_ids = [9, 198, MARK, 271, 5005]
    for size in sizes:
        assert grammar.accept_tokens(token_ids[:size])
        del token_ids[:size]
    assert inner.token_ids == [271, 5005]
    assert allowed(grammar) == {42}


def test_inside_of_reasoning_everything_is_allowed_but_an_end() -> None:
    grammar = GrammarAfterReasoning(Told(), INSIDE, [EOS, 6], SIZE)
    assert {*range(SIZE)} - allowed(grammar) == {EOS, 6}
    assert not grammar.is_finished
    grammar.accept_tokens([MARK])
    assert allowed(grammar) == {42}


def test_a_text_may_begin_with_reasoning_or_with_its_form() -> None:
    inner = Told()
    grammar = GrammarAfterReasoning(inner, OPENING, [EOS], SIZE)
    assert allowed(grammar) == {START, 42}
    grammar.accept_tokens([START])
    assert EOS not in allowed(grammar)
    assert {START, 42, 13} <= allowed(grammar)
    grammar.accept_tokens([13, START, MARK, 42])
    assert inner.token_ids == [42]
    other = GrammarAfterReasoning(Told(), OPENING, [EOS], SIZE)
    assert other.accept_tokens([42])
    assert allowed(other) == {42}
    assert not other.accept_tokens([13])
