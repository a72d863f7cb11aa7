"""What follows the reasoning has its form; the grammar is told of nothing before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.outputs import GrammarMasks
from engine.sampling_params import SamplingParams
from engine.structured_output.after_reasoning import GrammarAfterReasoning
from engine.structured_output.compilation import with_reasoning
from engine.structured_output.grammar import new_bitmasks
from engine.structured_output.lark import to_lark
from engine.structured_output.params import structured_outputs_params
from engine.structured_output.vocabulary import Vocabulary
from tests.structured_output.conftest import allowed as bytes_allowed

START, MARK, EOS, SIZE = 3, 77, 5, 6000
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b""])
MARKERS = START, MARK


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
    grammar = GrammarAfterReasoning(inner, MARKERS, [EOS], SIZE, is_begun=True)
    token_ids = [9, 198, MARK, 271, 5005]
    for size in sizes:
        assert grammar.accept_tokens(token_ids[:size])
        del token_ids[:size]
    assert inner.token_ids == [271, 5005]
    assert allowed(grammar) == {42}


def test_inside_of_reasoning_everything_is_allowed_but_an_end() -> None:
    grammar = GrammarAfterReasoning(Told(), MARKERS, [EOS, 6], SIZE, is_begun=True)
    assert {*range(SIZE)} - allowed(grammar) == {EOS, 6}
    assert not grammar.is_finished
    grammar.accept_tokens([MARK])
    assert allowed(grammar) == {42}


def test_a_text_may_begin_with_reasoning_or_with_its_form() -> None:
    inner = Told()
    grammar = GrammarAfterReasoning(inner, MARKERS, [EOS], SIZE, is_begun=False)
    assert allowed(grammar) == {START, 42}
    grammar.accept_tokens([START])
    assert EOS not in allowed(grammar)
    assert {START, 42, 13} <= allowed(grammar)
    grammar.accept_tokens([13, START, MARK, 42])
    assert inner.token_ids == [42]
    other = GrammarAfterReasoning(Told(), MARKERS, [EOS], SIZE, is_begun=False)
    assert other.accept_tokens([42])
    assert allowed(other) == {42}
    assert not other.accept_tokens([13])


def test_white_space_behind_reasoning_is_of_the_grammar_only_where_that_allows_it() -> None:
    inner = Told()
    grammar = GrammarAfterReasoning(inner, MARKERS, [EOS], SIZE, is_begun=True, space_token_ids=[8, 42])
    assert grammar.accept_tokens([8, MARK])
    assert allowed(grammar) == {8, 42}
    assert grammar.accept_tokens([8, 8])
    assert inner.token_ids == []
    assert grammar.accept_tokens([42])
    assert inner.token_ids == [42]
    assert allowed(grammar) == {42}
    endless = GrammarAfterReasoning(Told(), MARKERS, [EOS], SIZE, is_begun=True, space_token_ids=[8])
    assert endless.accept_tokens([MARK, *[8] * 16])
    assert allowed(endless) == {42}


def with_reasoning_takes(asked: dict[str, Any], text: str, *, is_begun: bool) -> bool:
    """Whether the markers being text, `text` is allowed whole, byte by byte."""
    checked = structured_outputs_params(asked)
    params = SamplingParams(structured_outputs=checked, stop_token_ids=(256,))
    grammar = with_reasoning(to_lark(checked), BYTES, params, is_begun=is_begun)
    for byte in text.encode():
        if byte not in bytes_allowed(grammar, BYTES) or not grammar.accept_tokens([byte]):
            return False
    return grammar.is_finished or 256 in bytes_allowed(grammar, BYTES)


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "[0-9]{2}"}, "12", "1x"),
    ({"json": {"type": "object", "required": ["a"]}}, '{"a": 1}', "{}"),
    ({"grammar": 'start: "<th" /a+/'}, "<tha", "<think>"),
    ({"choice": ["<think>", "no"]}, "no", "yes"),
]


@pytest.mark.parametrize(("asked", "good", "bad"), FORMS, ids=[next(iter(asked)) for asked, _, _ in FORMS])
def test_markers_may_be_spelled_in_any_tokens(asked: dict[str, Any], good: str, bad: str) -> None:

    def takes(text: str, *, is_begun: bool) -> bool:
        return with_reasoning_takes(asked, text, is_begun=is_begun)

    for thought in ("", "hm\n{}", "a<b</thin</think", "<think>é"):
        for text, is_right in ((good, True), (bad, False), ("", False)):
            assert takes(f"{thought}</think>{text}", is_begun=True) is is_right
            assert takes(f"<think>{thought}</think>{text}", is_begun=False) is is_right
    assert takes(good, is_begun=False)
    assert not takes(bad, is_begun=False)
    assert not takes(good, is_begun=True)
    assert takes(f"\n<think>\n</think>\n\n{good}", is_begun=False)
    assert takes(f"</think> {good}", is_begun=True)
    assert not takes(f"</think>{' ' * 17}{good}", is_begun=True)


TAG = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
FREE = 'start: TEXT ("!" NUMBER)?\nTEXT: /[^!]*/\nNUMBER: /[0-9]+/'


@pytest.mark.parametrize(
    ("asked", "trigger", "whole"),
    [({"structural_tag": TAG}, "<f", "<f>5</f>"), ({"grammar": FREE}, "!", "!5")],
    ids=["structural_tag", "grammar"],
)
def test_inside_of_reasoning_free_text_has_no_form(asked: dict[str, Any], trigger: str, whole: str) -> None:
    for thought in ("", f"a {trigger} b", whole):
        for text, is_right in ((f"hi {whole}", True), (f"hi {trigger}x", False), ("", True), ("\n\nhi", True)):
            assert with_reasoning_takes(asked, f"{thought}</think>{text}", is_begun=True) is is_right
            assert with_reasoning_takes(asked, f"<think>{thought}</think>{text}", is_begun=False) is is_right
            assert with_reasoning_takes(asked, f"<thin {text}", is_begun=False) is is_right
    assert not with_reasoning_takes(asked, f"<think>{whole}", is_begun=False)
