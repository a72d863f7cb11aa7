"""Vocabularies, and texts that grammars allow."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.client.tokenizer import Tokenizer, load_tokenizer
from engine.sampling_params import SamplingParams, StructuredOutputsParams
from engine.structured_output.grammar import Grammar, new_bitmasks
from engine.structured_output.lark import to_lark
from engine.structured_output.llguidance_backend import LLGuidanceGrammar, match
from engine.structured_output.params import structured_outputs_params
from engine.structured_output.vocabulary import Vocabulary

Asked = StructuredOutputsParams | dict[str, Any]
BYTES = Vocabulary([bytes([byte]) for byte in range(256)])
"""As the integer model's."""


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> Tokenizer:
    return load_tokenizer(smollm2_folder)


@pytest.fixture(scope="session")
def smollm2_vocabulary(smollm2_tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary.of(smollm2_tokenizer, smollm2_tokenizer.vocab_size)


def start(asked: Asked, vocabulary: Vocabulary = BYTES, **params: Any) -> LLGuidanceGrammar:
    """Return a request's grammar, compiled here; raises InvalidGrammar."""
    checked = structured_outputs_params(asked)
    return LLGuidanceGrammar(match(checked, to_lark(checked), vocabulary), vocabulary, SamplingParams(**params))


def allowed(grammar: Grammar, vocabulary: Vocabulary = BYTES) -> list[int]:
    """Return the ids that the mask allows."""
    mask = new_bitmasks(1, vocabulary.size)[0]
    grammar.fill_bitmask(mask)
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def accepts(asked: Asked, text: str | bytes) -> bool:
    """Whether `text`, byte by byte, is allowed whole: its end is told by an end token that the byte 0 stands for."""
    grammar = start(asked, stop_token_ids=(0,))
    for byte in text if isinstance(text, bytes) else text.encode():
        if byte not in allowed(grammar) or not grammar.accept_tokens([byte]):
            return False
    return grammar.is_finished or 0 in allowed(grammar)


def write(grammar: LLGuidanceGrammar, draw: random.Random, most: int = 300) -> tuple[bytes, bool]:
    """Return a drawn text that the grammar allows, and whether it is complete; the byte 0 is its end."""
    text = bytearray()
    while len(text) < most and not grammar.is_finished:
        choices = allowed(grammar)
        assert choices, (bytes(text), grammar.failure)
        if 0 in choices and (len(choices) == 1 or draw.random() < 0.5):
            return bytes(text), True
        closing = [byte for byte in choices if byte in b'"}]']
        byte = draw.choice(closing if closing and draw.random() < 0.35 else [byte for byte in choices if byte])
        assert grammar.accept_tokens([byte])
        text.append(byte)
    return bytes(text), grammar.is_finished
