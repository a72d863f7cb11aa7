"""Logprobs as OpenAI's and vLLM's clients read them, made from arrays at the last moment."""

from __future__ import annotations

import codecs
import re
from typing import Any

from engine.client.detokenizer import skipped_token_ids
from engine.client.output_processor import Logprobs
from engine.client.tokenizer import Tokenizer
from engine.sampling_params import SamplingParams

Json = dict[str, Any]

LEAST = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TextPlace:
    """Where in the text of a choice its next token begins, in characters; told each token once, in order."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        """Begin with a text of which `params` say what is left out."""
        self._tokenizer = tokenizer
        self._skipped = skipped_token_ids(tokenizer, params)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def take(self, token_id: int) -> int:
        """Return where this token begins: one that goes on with a character, where that one does."""
        begin = self._num_chars
        self._num_chars += len(self._decoder.decode(self._bytes(token_id)))
        return begin

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        if self._tokenizer.is_byte_level:
            return self._tokenizer.token_bytes(token_id)
        byte = _BYTE_TOKEN.fullmatch(self._tokenizer.token(token_id) or "")
        if byte is not None and self._tokenizer.falls_back_to_bytes:
            return bytes.fromhex(byte[1])
        return _text(token_id, self._tokenizer).encode()


def of_chat(logprobs: Logprobs, tokenizer: Tokenizer, _place: TextPlace) -> Json:
    """Return a chat choice's `logprobs`: one entry a token, with the likeliest ones in its place."""
    entries = []
    for ids, values in zip(logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), strict=True):
        chosen, *top = [_entry(token_id, value, tokenizer) for token_id, value in zip(ids, values, strict=True)]
        entries.append(chosen | {"top_logprobs": top})
    return {"content": entries, "refusal": None}


def of_completion(logprobs: Logprobs, tokenizer: Tokenizer, place: TextPlace) -> Json:
    """Return a text choice's `logprobs`: parallel lists; the first token's text is at `place`, which moves on.

    The likeliest tokens are keyed by their text; of several with one text, the likeliest stands.
    """
    tokens, offsets, tops = [], [], []
    for ids, values in zip(logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), strict=True):
        texts = [_text(token_id, tokenizer) for token_id in ids]
        tokens.append(texts[0])
        offsets.append(place.take(ids[0]))
        shown = zip(texts[1:] + texts[:1], values[1:] + values[:1], strict=True)
        top: dict[str, float] = {}
        for text, value in shown:
            top.setdefault(text, max(value, LEAST))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [max(value, LEAST) for value in logprobs.logprobs[:, 0].tolist()],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def of_prompt(logprobs: Logprobs | None, tokenizer: Tokenizer) -> list[Json | None]:
    """Return vLLM's `prompt_logprobs`: null for the first token, then token id → logprob, rank and text."""
    entries: list[Json | None] = [None]
    if logprobs is None:
        return entries
    rows = zip(logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.ranks.tolist(), strict=True)
    for ids, values, rank in rows:
        ranks = [rank, *range(1, len(ids))]
        entry: Json = {}
        for token_id, value, place in zip(ids, values, ranks, strict=True):
            told = {"logprob": max(value, LEAST), "rank": place, "decoded_token": _text(token_id, tokenizer)}
            entry.setdefault(str(token_id), told)
        entries.append(entry)
    return entries


def _entry(token_id: int, value: float, tokenizer: Tokenizer) -> Json:
    text = _text(token_id, tokenizer)
    content = tokenizer.token_bytes(token_id) if tokenizer.is_byte_level else text.encode()
    return {"token": text, "logprob": max(value, LEAST), "bytes": list(content)}


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)
