"""Logprobs as OpenAI's and vLLM's clients read them, made from arrays at the last moment."""

from __future__ import annotations

from typing import Any

from engine.client.output_processor import Logprobs
from engine.client.tokenizer import Tokenizer

Json = dict[str, Any]

LEAST = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


def of_chat(logprobs: Logprobs, tokenizer: Tokenizer, _offset: int) -> Json:
    """Return a chat choice's `logprobs`: one entry a token, with the likeliest ones in its place."""
    entries = []
    for ids, values in zip(logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), strict=True):
        chosen, *top = [_entry(token_id, value, tokenizer) for token_id, value in zip(ids, values, strict=True)]
        entries.append(chosen | {"top_logprobs": top})
    return {"content": entries, "refusal": None}


def of_completion(logprobs: Logprobs, tokenizer: Tokenizer, offset: int) -> Json:
    """Return a text choice's `logprobs`: parallel lists; the first token's text is at `offset`.

    The likeliest tokens are keyed by their text; of several with one text, the likeliest stands.
    """
    tokens, offsets, tops = [], [], []
    for ids, values in zip(logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), strict=True):
        texts = [_text(token_id, tokenizer) for token_id in ids]
        tokens.append(texts[0])
        offsets.append(offset)
        offset += len(texts[0])
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
