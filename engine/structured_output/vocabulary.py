"""A model's tokens as the bytes that they add to a text: what a grammar is matched against.

Special tokens and ends add nothing to the text, so no grammar ever allows them; with which tokens a text may end is
said by each request. llguidance cannot do without an end token, so it gets one of its own, behind the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from engine.errors import UnsupportedModel
from engine.outputs import GrammarMasks
from engine.structured_output.grammar import BITS_A_WORD, new_bitmasks

if TYPE_CHECKING:
    from engine.client.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_NO_UTF8 = 0xFF
"""A byte of no text, which llguidance takes for the mark of a special token."""
_SLICES = [
    *LLTokenizer.json_slices(),
    r" [a-z]{1,14}",
    r"[a-z]{1,14}",
    r" [a-zA-Z]{1,14}",
    r"[a-zA-Z]{1,14}",
    r"[a-zA-Z ]{1,16}",
]
"""Texts by which the compiler takes tokens together where all of them may come; all others are looked at one by one.

Most of a vocabulary is words: with these, masks of text that is neither JSON's nor any take half of the time or less.
"""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Vocabulary:
    """One model's tokens, ready for matching; immutable, and may be shared between threads.

    Attributes:
        size: Token ids are below it; the model's, which may have more of them than its tokenizer.
        ordinary: Packed bits of the tokens that a grammar may allow, `[ceil(size / 32)]`.
        space_token_ids: Those of white space alone.
        matchable: What llguidance matches against; its one end token is `size`.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """Take for each token id the bytes it adds to a text, empty where it adds none."""
        usable = [b"" if _NO_UTF8 in token else token for token in tokens]
        self.size = len(usable)
        self.ordinary = pack_bits(self.size, [i for i, token in enumerate(usable) if token])
        self.space_token_ids = [i for i, token in enumerate(usable) if token and not token.strip()]
        self.matchable = LLTokenizer(TokenizerWrapper(_Tokens([*usable, b""])), slices=_SLICES)

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> Vocabulary:
        """Return the vocabulary of a model with `size` token ids; takes a second for large ones.

        Raises:
            UnsupportedModel: No token of the tokenizer says what it adds to a text.
        """
        silent = tokenizer.special_token_ids | set(tokenizer.eos_token_ids)
        spell = tokenizer.token_bytes if tokenizer.is_byte_level else _SpellingInContext(tokenizer)
        known = min(size, tokenizer.vocab_size)
        tokens = [b"" if i in silent or tokenizer.token(i) is None else spell(i) for i in range(known)]
        return cls([*tokens, *[b""] * (size - known)])


def pack_bits(size: int, token_ids: Sequence[int]) -> GrammarMasks:
    """Return packed bits, `[ceil(size / 32)]`, of which those of `token_ids` are set; ids from `size` on have none."""
    bits: GrammarMasks = new_bitmasks(1, size)[0]
    ids = np.array([token_id for token_id in token_ids if token_id < size], dtype=np.uint32)
    np.bitwise_or.at(bits.view(np.uint32), ids // BITS_A_WORD, np.uint32(1) << ids % BITS_A_WORD)
    return bits


class _SpellingInContext:
    """What a token adds to a text that another one began, by a tokenizer that puts spaces between words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        known = (i for i in range(tokenizer.vocab_size) if (tokenizer.token(i) or "").strip("▁Ġ#") in {*_LETTERS})
        self._before = [next(known, -1)]
        if self._before == [-1]:
            raise UnsupportedModel("the tokenizer has no token for a letter: nothing can be matched against its tokens")
        self._known_text = tokenizer.decode(self._before, skip_special_tokens=False)

    def __call__(self, token_id: int) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(self._tokenizer.token(token_id) or "")
        if byte is not None and self._tokenizer.falls_back_to_bytes:
            return bytes.fromhex(byte[1])
        text = self._tokenizer.decode([*self._before, token_id], skip_special_tokens=False)
        return text.removeprefix(self._known_text).encode() if text.startswith(self._known_text) else b""


class _Tokens:
    """Tokens as `TokenizerWrapper` takes them, the last one as their end."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        """Spell nothing: masks are computed without spelling texts in tokens."""
        return []
