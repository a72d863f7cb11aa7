"""Token ids to text as they come: UTF-8 safe, at a cost per new token only, with stop strings.

What is given out is never taken back: a character is held until its last byte is known, and text that may still become
a stop string until it is decided. Put together, the increments are the text of all ids.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.client.tokenizer import Tokenizer
from engine.sampling_params import SamplingParams

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Increment(NamedTuple):
    """What an update added.

    Attributes:
        text: New text, possibly empty.
        stop_string: The stop string that ended the text, if one did.
        num_tokens_used: How many of the update's tokens the text reaches into; fewer than given only at a stop string.
    """

    text: str
    stop_string: str | None
    num_tokens_used: int


def skipped_token_ids(tokenizer: Tokenizer, params: SamplingParams) -> frozenset[int]:
    """Return the special tokens that `params` leave out of the text."""
    hidden = tokenizer.special_token_ids.difference(params.shown_token_ids)
    return hidden if params.skip_special_tokens else frozenset()


class Detokenizer:
    """Makes the text of one completion. Used by one task; owns no resources."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Start after `prompt_token_ids`, whose end decides whether the first word brings its space."""
        skipped = skipped_token_ids(tokenizer, params)
        self._decoder: _Decoder = (
            _ByteLevelDecoder(tokenizer, skipped)
            if tokenizer.is_byte_level
            else _WindowDecoder(tokenizer, skipped, prompt_token_ids)
        )
        self._stops = [_StopString(text) for text in params.stop]
        self._stop_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else params.eos_token_ids)}
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""
        self._stop_string: str | None = None

    def update(self, new_token_ids: Sequence[int], finished: bool) -> Increment:
        """Take the next tokens; with `finished`, they are the last and nothing is held back any more.

        A stop string counts where it ends in the text of a token after the first `min_tokens`; of several, the one
        that ends first, then the one listed first. After one, further tokens add nothing. A stop token that ended the
        completion adds its text only if stops are included.
        """
        if self._stop_string is not None:
            return Increment("", self._stop_string, 0)
        for index, token_id in enumerate(new_token_ids, 1):
            self._num_tokens += 1
            last = finished and index == len(new_token_ids)
            if not (last and self._is_dropped(token_id)) and self._take(self._decoder.feed(token_id)):
                return Increment(self._release(), self._stop_string, index)
        if finished:
            self._take(self._decoder.flush())
        return Increment(self._release(finished), self._stop_string, len(new_token_ids))

    def _is_dropped(self, last_token_id: int) -> bool:
        """Whether the last token is a stop token that ended the completion and is not to be shown."""
        may_end = self._num_tokens >= self._min_tokens
        return may_end and not self._includes_stop and last_token_id in self._stop_token_ids

    def _take(self, text: str) -> bool:
        """Append `text` to what is held; True if a stop string ended in it, which then ends what is held."""
        if not self._stops:
            self._held += text
            return False
        for character in text:
            self._held += character
            ended = [stop for stop in self._stops if stop.advance(character)]
            if ended and (not self._min_tokens or self._num_tokens > self._min_tokens):
                self._stop_string = ended[0].text
                if not self._includes_stop:
                    self._held = self._held[: -len(self._stop_string)]
                return True
        return False

    def _release(self, finished: bool = True) -> str:
        """Give out what is held, but for the part that may become a stop string."""
        undecided = 0
        if not finished and not self._includes_stop:
            undecided = max((stop.num_matched for stop in self._stops), default=0)
        end = len(self._held) - undecided
        released, self._held = self._held[:end], self._held[end:]
        return released


class _StopString:
    """Finds one string in a text that comes a character at a time (Knuth, Morris, Pratt 1977).

    `num_matched` characters at the text's end are the beginning of the string.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = _borders(text)

    def advance(self, character: str) -> bool:
        """Take the text's next character; True if the string ends with it."""
        self.num_matched = self._next(self.num_matched, character)
        if self.num_matched < len(self.text):
            return False
        self.num_matched = self._borders[-1]
        return True

    def _next(self, matched: int, character: str) -> int:
        return _extended(self.text, self._borders, matched, character)


@functools.lru_cache(maxsize=256)
def _borders(text: str) -> list[int]:
    """Return, for each beginning of `text`, the length of its longest proper border; shared, not to be changed."""
    borders = [0]
    for character in text[1:]:
        borders.append(_extended(text, borders, borders[-1], character))
    return borders


def _extended(text: str, borders: list[int], matched: int, character: str) -> int:
    """Return how much of `text` is matched after `character`, of which `matched` characters were before it."""
    while matched and text[matched] != character:
        matched = borders[matched - 1]
    return matched + (text[matched] == character)


class _Decoder(Protocol):
    """Gives the text that a token settles."""

    def feed(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteLevelDecoder:
    """For byte-level tokenizers: a text is the sum of its tokens' bytes, read as UTF-8."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Return the characters that became whole."""
        return "" if token_id in self._skipped else self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return a replacement for the character that stayed incomplete, if one did."""
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For all others: the new tokens are decoded after the last ones given out, whose own text is then cut off.

    Byte tokens are waited out, for only the end of their run tells what they spell.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._new: list[int] = []
        visible = (i for i in reversed(prompt_token_ids) if not self._is_hidden(i) and not self._is_byte(i))
        self._before = [token_id for token_id in (next(visible, None),) if token_id is not None]

    def feed(self, token_id: int) -> str:
        """Return the text that became settled."""
        if self._is_hidden(token_id):
            return ""
        self._new.append(token_id)
        return "" if self._is_byte(token_id) else self.flush()

    def flush(self) -> str:
        """Return the text of the tokens not given out yet."""
        if not self._new:
            return ""
        num_known = len(self._decode(self._before))
        text = self._decode(self._before + self._new)[num_known:]
        self._before, self._new = self._new, []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _is_hidden(self, token_id: int) -> bool:
        return token_id in self._skipped or self._tokenizer.token(token_id) is None

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.token(token_id) or ""
        return self._tokenizer.falls_back_to_bytes and _BYTE_TOKEN.fullmatch(token) is not None
