"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library: byte-level BPE or SentencePiece.

For byte-level BPE the file names its pre-tokenizer instead of storing it; a wrong one gives wrong ids without any
error. Only names whose splitting is known are in the table, all others are refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.errors import CheckpointError, UnsupportedModel
from engine.models import sentence_pieces
from engine.models.gguf import GgufFile
from engine.models.sentence_pieces import CONTROL, UNKNOWN, USER_DEFINED, PieceModel

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_TURN_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>"}
)
"""Tokens that end a text wherever they are markers, as in llama.cpp: files often name one end of several."""


class _Pre(NamedTuple):
    """What `tokenizer.ggml.pre` stands for; without a pattern, GPT-2's own splitting.

    `ignore_merges`: a piece that is a token stays whole. `adds_bos`: what llama.cpp does when the file does not say.
    """

    pattern: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False


_LLAMA_BPE = _Pre(_LLAMA3, ignore_merges=True, adds_bos=True)
_PRE = {
    "gpt-2": _Pre(),
    "smollm": _Pre(single_digits=True),
    "starcoder": _Pre(single_digits=True),
    "refact": _Pre(single_digits=True),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "dbrx": _Pre(_LLAMA3),
    "smaug-bpe": _Pre(_LLAMA3),
    "qwen2": _Pre(_QWEN2, composes=True),
    "deepseek-r1-qwen": _Pre(_QWEN2, composes=True),
    "gpt-4o": _Pre(_O200K),
    "tekken": _Pre(_TEKKEN, ignore_merges=True, adds_bos=True),
}


class GgufTokenizer(NamedTuple):
    """What a GGUF file says about text.

    Attributes:
        backend: The tokenizer itself; its JSON is tokenizer.json.
        tokens: By id, as the file spells them.
        ids: `bos_token_id`, `eos_token_id`, `unk_token_id`, `pad_token_id`, those that exist.
        eos_token_ids: All that end a text: end of sequence, of turn, of message.
        config: Content of tokenizer_config.json.
        chat_templates: Jinja sources by name; empty if the file has none.
    """

    backend: Tokenizer
    tokens: list[str]
    ids: dict[str, int]
    eos_token_ids: list[int]
    config: dict[str, Any]
    chat_templates: dict[str, str]


class _Vocabulary(NamedTuple):
    """The file's tokens and their kinds, by id, and the ids that have a part."""

    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]


def read_tokenizer(gguf: GgufFile) -> GgufTokenizer:
    """Rebuild the tokenizer of `gguf`.

    Raises:
        UnsupportedModel: The tokenizer model or pre-tokenizer is not in the table.
        CheckpointError: Metadata is missing or does not fit together.
    """
    model = gguf.value("tokenizer.ggml.model", str)
    if model not in {"gpt2", "llama", "t5"}:
        raise UnsupportedModel(
            f"{gguf.path}: tokenizer model {model!r} is not converted; only gpt2 (byte-level BPE), llama and t5 "
            f"(SentencePiece) are"
        )
    vocabulary = _read_vocabulary(gguf, model)
    tokens, _, ids = vocabulary
    if model == "gpt2":
        pre = _known_pre(gguf)
        backend = _byte_level_bpe(gguf, tokens, pre)
        _mark_added_tokens(backend, vocabulary)
        _add_bos_and_eos(gguf, backend, tokens, ids, {"bos": pre.adds_bos, "eos": False})
    else:
        backend = _sentence_pieces(gguf, vocabulary, is_unigram=model == "t5")
        _add_bos_and_eos(gguf, backend, tokens, ids, {"bos": model == "llama", "eos": model == "t5"})
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.value(f"{gguf.value('general.architecture', str)}.context_length", int),
    }
    config |= {key.removesuffix("_id"): tokens[value] for key, value in ids.items()}
    return GgufTokenizer(backend, tokens, ids, _ends(gguf, vocabulary), config, _chat_templates(gguf))


def _read_vocabulary(gguf: GgufFile, model: str) -> _Vocabulary:
    tokens = gguf.values("tokenizer.ggml.tokens", str) or []
    kinds = gguf.values("tokenizer.ggml.token_type", int)
    if kinds is None or len(kinds) != len(tokens):
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.token_type must tell the type of each of {len(tokens)} tokens"
        )
    implied = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0} if model == "llama" else {}
    implied = {name: token_id for name, token_id in implied.items() if token_id < len(tokens)}
    return _Vocabulary(tokens, kinds, implied | _special_ids(gguf, len(tokens)))


def _ends(gguf: GgufFile, vocabulary: _Vocabulary) -> list[int]:
    tokens, kinds, ids = vocabulary
    named = [ids["eos_token_id"]] if "eos_token_id" in ids else []
    named += [
        _checked_id(gguf, f"tokenizer.ggml.{key}", len(tokens))
        for key in ("eot_token_id", "eom_token_id")
        if gguf.has(f"tokenizer.ggml.{key}")
    ]
    known = [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if token in _TURN_ENDS and kind in {CONTROL, USER_DEFINED} and index != ids.get("unk_token_id")
    ]
    return list(dict.fromkeys(named + known))


def _chat_templates(gguf: GgufFile) -> dict[str, str]:
    keys = {"default": "tokenizer.chat_template"}
    names = gguf.values("tokenizer.chat_templates", str) or []
    keys |= {name: f"tokenizer.chat_template.{name}" for name in names if name != "default"}
    return {name: gguf.value(key, str) for name, key in keys.items() if gguf.has(key)}


def _sentence_pieces(gguf: GgufFile, vocabulary: _Vocabulary, is_unigram: bool) -> Tokenizer:
    tokens, kinds, ids = vocabulary
    scores = gguf.values("tokenizer.ggml.scores", float)
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(f"{gguf.path}: tokenizer.ggml.scores must rank each of {len(tokens)} tokens")
    unknown = kinds.index(UNKNOWN) if UNKNOWN in kinds else ids.get("unk_token_id", -1)
    charsmap = gguf.values("tokenizer.ggml.precompiled_charsmap", int) or []
    model = PieceModel(
        tokens,
        scores,
        kinds,
        is_unigram,
        unk_id=unknown,
        adds_prefix=gguf.value("tokenizer.ggml.add_space_prefix", bool, True),
        removes_extra_spaces=gguf.value("tokenizer.ggml.remove_extra_whitespaces", bool, False),
        charsmap=bytes(value & 0xFF for value in charsmap),
    )
    # llama.cpp knows this of Phi-3 by its name: spaces after a marker do not count
    is_phi3 = gguf.value("general.architecture", str) == "phi3"
    try:
        return sentence_pieces.build(model, markers_take_spaces=is_phi3)
    except CheckpointError as error:
        raise CheckpointError(f"{gguf.path}: {error}") from error


def _known_pre(gguf: GgufFile) -> _Pre:
    name = gguf.value("tokenizer.ggml.pre", str, "(none)")
    if name not in _PRE:
        raise UnsupportedModel(
            f"{gguf.path}: pre-tokenizer {name!r} is not one whose ids are known to be right; known: {', '.join(_PRE)}"
        )
    return _PRE[name]


def _special_ids(gguf: GgufFile, num_tokens: int) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "unk_token_id": "unknown", "pad_token_id": "padding"}
    return {
        name: _checked_id(gguf, f"tokenizer.ggml.{key}_token_id", num_tokens)
        for name, key in keys.items()
        if gguf.has(f"tokenizer.ggml.{key}_token_id")
    }


def _checked_id(gguf: GgufFile, key: str, num_tokens: int) -> int:
    token_id = gguf.value(key, int)
    if not 0 <= token_id < num_tokens:
        raise CheckpointError(f"{gguf.path}: metadata {key} is {token_id}, outside the vocabulary of {num_tokens}")
    return token_id


def _byte_level_bpe(gguf: GgufFile, tokens: list[str], pre: _Pre) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{gguf.path}: {len(tokens) - len(vocabulary)} tokens are listed twice")
    merges = []
    for merge in gguf.values("tokenizer.ggml.merges", str) or []:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(f"{gguf.path}: merge {merge!r} does not join two tokens into a third")
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges))
    splits: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        splits.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    if pre.composes:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _mark_added_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    pairs = list(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in pairs if kind == CONTROL]
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == USER_DEFINED])


def _add_bos_and_eos(
    gguf: GgufFile, backend: Tokenizer, tokens: list[str], ids: dict[str, int], implied: dict[str, bool]
) -> None:
    """Let encoding add the begin and end tokens that the file asks for."""
    added: dict[str, tuple[str, int]] = {}
    for name in ("bos", "eos"):
        if gguf.value(f"tokenizer.ggml.add_{name}_token", bool, implied[name]):
            if f"{name}_token_id" not in ids:
                raise CheckpointError(f"{gguf.path}: texts are to get a {name}_token_id, but the file names none")
            token_id = ids[f"{name}_token_id"]
            added[name] = (tokens[token_id], token_id)
    sentence_pieces.add_ends(backend, added.get("bos"), added.get("eos"))
