"""Three small tokenizers, one of each form that models have, made of one text: nothing is fetched."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from engine.client.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox, the lazy dog; naïve cafés in Zürich.",
    '{"name": "get_weather", "arguments": {"city": "Bern", "days": [1, 2.5, null, true]}}',
    "<tool_call></tool_call> <think></think> [TOOL_CALLS] yes no maybe 0123456789",
    "日本語のテキスト 한국어 😀👩‍👩‍👧 e\u0301 (a) [b] {c} <f>12</f>",
]
SPECIAL = ["<s>", "</s>", "<|end|>"]
EOS = 1


@functools.cache
def byte_level() -> Tokenizer:
    """Return byte-level BPE, as GPT-2's, Llama 3's and Qwen's."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, {}, [EOS])


@functools.cache
def sentence_pieces() -> Tokenizer:
    """Return pieces with byte fallback, as Llama 2's, Mistral's and Gemma's."""
    words = [f"▁{word}" for line in CORPUS[:3] for word in line.split()]
    letters = dict.fromkeys("".join(CORPUS[:3]).replace(" ", "▁"))
    pieces = dict.fromkeys([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words, "▁▁"])
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, {}, [EOS])


@functools.cache
def word_pieces() -> Tokenizer:
    """Return WordPiece, as BERT's."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<|end|>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece("##", cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, {}, [EOS])


TOKENIZERS = {"byte-level BPE": byte_level, "byte fallback": sentence_pieces, "WordPiece": word_pieces}
