"""The text fuzzer runs clean for a while, and finds what it is there to find."""

from __future__ import annotations

import random

import pytest

from engine.client.parsers.hermes import HermesParser
from fuzz.text import FORMS, Case, check_grammar, check_text
from fuzz.vocabularies import TOKENIZERS


def rounds(number: int) -> None:
    for seed in range(number):
        draw = random.Random(seed)
        check_text(Case.drawn(draw), draw)


def test_drawn_completions_are_told_right_in_all_parts() -> None:
    rounds(150)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kind", FORMS)
def test_masks_are_what_is_accepted_over_the_whole_vocabulary(name: str, kind: str) -> None:
    assert check_grammar(name, kind, random.Random(1), num_tokens=3) > 0 or name == "WordPiece"


def test_a_character_that_is_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.client.detokenizer._ByteLevelDecoder.flush", lambda self: "")
    with pytest.raises(AssertionError):
        rounds(400)


def test_a_call_that_is_lost_at_the_border_of_parts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = HermesParser.feed

    def forgets(self, text):
        self._search._held = ""
        return feed(self, text)

    monkeypatch.setattr(HermesParser, "feed", forgets)
    with pytest.raises(AssertionError):
        rounds(150)


def test_arguments_that_cannot_be_sent_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.client.parsers.json_calls.spelled", lambda text: text)
    with pytest.raises(UnicodeEncodeError):
        rounds(150)
