"""A token is in the mask exactly if the grammar takes it, for every kind, over whole vocabularies of three forms."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from engine.bench.forms import FORMS as FORMS_OF_BENCHES
from engine.client.tokenizer import Tokenizer
from engine.errors import InvalidGrammar
from engine.sampling_params import SamplingParams
from engine.structured_output.grammar import new_bitmasks
from engine.structured_output.lark import to_lark
from engine.structured_output.llguidance_backend import LLGuidanceGrammar, compute_mask, match
from engine.structured_output.manager import StructuredOutputManager
from engine.structured_output.params import structured_outputs_params
from engine.structured_output.vocabulary import Vocabulary, pack_bits
from fuzz.text import FORMS
from tests.structured_output.conftest import BYTES, allowed, start

EOS = (2, 7)


def fork(grammar: LLGuidanceGrammar) -> LLGuidanceGrammar:
    twin = copy.copy(grammar)
    twin._matcher = grammar._matcher.deep_copy()
    return twin


def assert_mask_is_what_is_accepted(grammar: LLGuidanceGrammar, vocabulary: Vocabulary) -> list[int]:
    """Compare the mask with each token's own acceptance: of all as far as it can be asked, of some by doing it."""
    in_mask = allowed(grammar, vocabulary)
    ends = grammar._ends if grammar._matcher.is_accepting() else frozenset()
    accepted = [i for i in range(vocabulary.size) if i in ends or grammar._matcher.validate_tokens([i])]
    assert in_mask == accepted
    draw = random.Random(len(in_mask))
    for token_id in {*draw.sample(in_mask, min(5, len(in_mask))), *draw.sample(range(vocabulary.size), 5)}:
        assert fork(grammar).accept_tokens([token_id]) == (token_id in in_mask)
    return in_mask


def sentence_pieces() -> Tokenizer:
    """SentencePiece's form: words begin with a bar, what has no piece is spelled in bytes."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += [
        "▁",
        "a",
        "▁a",
        "name",
        '"',
        '{"',
        "{",
        "}",
        "▁}",
        "é",
        "yes",
        "▁yes",
        "no",
        "0",
        "12",
        ":",
        "▁:",
        ",",
        "S",
    ]
    pieces += ["abc", "<f>", "<f", "</f>", "(", ")", "▁▁", 'e"', "😀", "ye", "s", "e", "y", "n", "M"]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, {}, [2])


def word_pieces() -> Tokenizer:
    """WordPiece's form: a piece without ## begins a word, and words are apart."""
    pieces = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "a",
        "##a",
        "yes",
        "##yes",
        "no",
        "##no",
        "##12",
        "12",
        "##é",
        "y",
        "##es",
        "n",
    ]
    backend = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece("##", cleanup=False)
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return Tokenizer(backend, {}, [2])


@pytest.mark.parametrize("kind", FORMS)
def test_masks_of_a_kind_along_drawn_texts_over_bytes_and_pieces(kind: str) -> None:
    pieces = sentence_pieces()
    for vocabulary in (BYTES, Vocabulary.of(pieces, pieces.vocab_size + 40)):
        draw = random.Random(kind)
        grammar = start(FORMS[kind], vocabulary, eos_token_ids=EOS[:1], stop_token_ids=EOS[1:])
        for _ in range(40):
            choices = [i for i in assert_mask_is_what_is_accepted(grammar, vocabulary) if i not in EOS]
            if grammar.is_finished or not choices:
                break
            assert grammar.accept_tokens([draw.choice(choices)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
def test_masks_of_a_kind_over_the_whole_vocabulary_of_the_default_model(
    kind: str, smollm2_tokenizer: Tokenizer, smollm2_vocabulary: Vocabulary
) -> None:
    draw = random.Random(kind)
    grammar = start(FORMS[kind], smollm2_vocabulary, eos_token_ids=smollm2_tokenizer.eos_token_ids)
    for _ in range(2):
        choices = assert_mask_is_what_is_accepted(grammar, smollm2_vocabulary)
        silent = smollm2_tokenizer.special_token_ids - {*smollm2_tokenizer.eos_token_ids}
        assert silent.isdisjoint(choices), "no special token inside"
        assert grammar.accept_tokens([draw.choice([i for i in choices if i not in smollm2_tokenizer.eos_token_ids])])


@pytest.mark.parametrize("name", [*FORMS_OF_BENCHES, "short words", "short line"])
def test_tokens_that_are_taken_together_are_those_that_are_allowed_one_by_one(
    name: str, smollm2_vocabulary: Vocabulary
) -> None:
    """Also where a text nears the end of what it may have: shortly before it all words fit, then none does."""
    ending = {"short words": r"[a-z]{1,20}( [A-Z]?[a-z]{0,17}){1,3}", "short line": r"[^\n]{1,60}"}
    asked = {"regex": ending[name]} if name in ending else FORMS_OF_BENCHES[name][0]
    params = structured_outputs_params(asked)
    one_by_one = copy.copy(smollm2_vocabulary)
    one_by_one.matchable = smollm2_vocabulary.matchable.with_slices([])
    matchers = [match(params, to_lark(params), vocabulary) for vocabulary in (smollm2_vocabulary, one_by_one)]
    draw, size = random.Random(name), smollm2_vocabulary.size + 1
    for _ in range(24):
        mask, expected = (compute_mask(matcher, size) for matcher in matchers)
        assert mask is not None
        assert (mask == expected).all()
        words = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: size - 1])
        if not len(words):
            break
        token_id = int(draw.choice(words))
        assert all(matcher.consume_token(token_id) for matcher in matchers)
        if matchers[0].is_stopped():
            break


def test_pieces_add_to_a_text_what_they_add_behind_another() -> None:
    tokenizer = sentence_pieces()
    vocabulary = Vocabulary.of(tokenizer, 300)
    spell = {tokenizer.token(i): vocabulary.matchable.decode_bytes([i]) for i in range(3, tokenizer.vocab_size)}
    assert [spell[piece] for piece in ("▁a", "a", "▁", "<0xE4>", "é")] == [b" a", b"a", b" ", b"\xe4", "é".encode()]
    silent = [i for i in range(300) if not vocabulary.ordinary.view(np.uint32)[i // 32] >> i % 32 & 1]
    assert silent == [0, 1, 2, 3 + 0xFF, *range(tokenizer.vocab_size, 300)], "special, no text at all, or not there"


def test_a_character_may_be_spelled_in_bytes() -> None:
    tokenizer = sentence_pieces()
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size)
    grammar = start({"choice": ["ü"]}, vocabulary)
    assert grammar.accept_tokens([3 + 0xC3])
    assert allowed(grammar, vocabulary) == [3 + 0xBC]


def test_a_word_piece_that_begins_a_word_brings_its_space() -> None:
    tokenizer = word_pieces()
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size)
    grammar = start({"regex": " ?(yes|no) 12"}, vocabulary)
    assert [tokenizer.token(i) for i in allowed(grammar, vocabulary)] == ["yes", "##yes", "no", "##no", "y", "n"]
    assert grammar.accept_tokens([12])
    assert [tokenizer.token(i) for i in assert_mask_is_what_is_accepted(grammar, vocabulary)] == ["##es"]


@pytest.mark.parametrize("ignores", [False, True])
def test_the_ends_are_allowed_where_the_text_may_end_and_only_there(ignores: bool) -> None:
    ends = [200] if ignores else [200, 254, 255]
    grammar = start({"regex": "ab*"}, eos_token_ids=(255, 254, 900), stop_token_ids=(200,), ignore_eos=ignores)
    assert allowed(grammar) == [ord("a")]
    assert not fork(grammar).accept_tokens([255])
    grammar.accept_tokens([ord("a")])
    assert allowed(grammar) == [ord("b"), *ends]
    assert fork(grammar).accept_tokens([255]) != ignores
    assert not grammar.is_finished


def test_a_complete_text_is_finished_with_its_last_token_and_allows_ends_alone() -> None:
    grammar = start({"choice": ["no"]}, eos_token_ids=(255, 254))
    assert grammar.accept_tokens(b"n")
    assert not grammar.is_finished
    assert grammar.accept_tokens(b"o")
    assert grammar.is_finished
    assert grammar.failure is None
    assert allowed(grammar) == [254, 255]
    assert fork(grammar).accept_tokens([254])


def test_what_was_refused_is_refused_for_good() -> None:
    grammar = start({"choice": ["no"]})
    assert not grammar.accept_tokens(b"x")
    assert not grammar.is_finished
    assert "doesn't satisfy the grammar" in (grammar.failure or "")
    assert allowed(grammar) == []


def test_a_mask_that_takes_too_much_work_allows_nothing_and_says_why() -> None:
    grammar = start({"regex": r"(\w{1,100}){1,100}"})
    for _ in range(200):
        choices = allowed(grammar)
        if not choices:
            break
        grammar.accept_tokens([max(choices)])
    assert grammar.failure is not None
    assert "too many" in grammar.failure


def test_rules_that_read_a_text_in_very_many_ways_end_before_their_masks_take_long(
    smollm2_vocabulary: Vocabulary,
) -> None:
    """The compiler counts the work of a mask, so that the same text ends at the same token on each machine."""
    asked, draw = {"grammar": "start: e\ne: e e | /./ | /../ | /.../"}, random.Random(0)
    grammar, num_tokens = start(asked, smollm2_vocabulary), 0
    while num_tokens < 40 and (choices := allowed(grammar, smollm2_vocabulary)):
        assert grammar.accept_tokens([draw.choice(choices)])
        num_tokens += 1
    assert "Too many items" in (grammar.failure or "")
    with pytest.raises(InvalidGrammar, match=r"Too many items.*: make it simpler"):
        start({"grammar": "start: e\ne: e e | /./"}, smollm2_vocabulary)


def test_what_one_request_generates_spends_nothing_of_anothers_limits() -> None:
    manager = StructuredOutputManager("null", 256)
    params = SamplingParams(structured_outputs={"regex": r"(\w{1,100}){1,100}"})  # type: ignore[arg-type]
    spendthrift, other = manager.compile(params), manager.compile(params)
    assert isinstance(spendthrift, LLGuidanceGrammar)
    assert isinstance(other, LLGuidanceGrammar)
    while choices := allowed(spendthrift):
        spendthrift.accept_tokens([max(choices)])
    assert spendthrift.failure is not None
    assert allowed(other)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 256])
def test_bits_are_packed_as_the_runner_unpacks_them(size: int) -> None:
    wanted = [i for i in range(size) if i % 3 == 0 or i == size - 1]
    bits = np.unpackbits(pack_bits(size, [*wanted, size, 99_999]).view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == wanted


def test_a_vocabulary_of_any_size_fits_the_runners_masks() -> None:
    for size in (255, 256, 257, 288):
        vocabulary = Vocabulary([bytes([i]) if i < 128 else b"" for i in range(size)])
        grammar = start({"regex": "[ab]"}, vocabulary, eos_token_ids=(size - 1,))
        mask = new_bitmasks(1, size)[0]
        grammar.fill_bitmask(mask)
        assert allowed(grammar, vocabulary) == [97, 98]
        grammar.accept_tokens([97])
        assert allowed(grammar, vocabulary) == [size - 1]


def test_parameters_of_a_request_that_asks_for_no_form_have_none() -> None:
    assert SamplingParams().structured_outputs is None
