"""The tokenizer inside a GGUF file: byte-level BPE, rebuilt for the `tokenizers` library.

A GGUF file names its pre-tokenizer instead of storing it; a wrong one gives wrong ids without any error. Only names
whose splitting was checked against the original tokenizers are in the table, all others are refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.gguf import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of GGUF: markers that only a template writes, and strings that are never split."""

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
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _Pre(_QWEN2, composes=True),
    "tekken": _Pre(_TEKKEN, ignore_merges=True, adds_bos=True),
}


class GgufTokenizer(NamedTuple):
    """What a GGUF file says about text.

    Attributes:
        backend: The tokenizer itself; its JSON is tokenizer.json.
        tokens: By id, in the byte-level alphabet.
        ids: `bos_token_id`, `eos_token_id`, `unk_token_id`, `pad_token_id`, those that exist.
        eos_token_ids: All that end a text: end of sequence, of turn, of message.
        config: Content of tokenizer_config.json.
        chat_template: Jinja source, if the file has one.
    """

    backend: Tokenizer
    tokens: list[str]
    ids: dict[str, int]
    eos_token_ids: list[int]
    config: dict[str, Any]
    chat_template: str | None


def read_tokenizer(gguf: GgufFile) -> GgufTokenizer:
    """Rebuild the tokenizer of `gguf`.

    Raises:
        UnsupportedModel: The tokenizer model or pre-tokenizer is not in the table.
        CheckpointError: Metadata is missing or does not fit together.
    """
    pre = _known_pre(gguf)
    tokens = gguf.values("tokenizer.ggml.tokens", str) or []
    ids = _special_ids(gguf, len(tokens))
    backend = _byte_level_bpe(gguf, tokens, pre)
    _mark_added_tokens(gguf, backend, tokens)
    _add_bos_and_eos(gguf, backend, tokens, ids, pre.adds_bos)
    eos = [ids["eos_token_id"]] if "eos_token_id" in ids else []
    eos += [
        _checked_id(gguf, f"tokenizer.ggml.{key}", len(tokens))
        for key in ("eot_token_id", "eom_token_id")
        if gguf.has(f"tokenizer.ggml.{key}")
    ]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.value("llama.context_length", int),
    }
    config |= {key.removesuffix("_id"): tokens[value] for key, value in ids.items()}
    template = gguf.value("tokenizer.chat_template", str) if gguf.has("tokenizer.chat_template") else None
    return GgufTokenizer(backend, tokens, ids, list(dict.fromkeys(eos)), config, template)


def _known_pre(gguf: GgufFile) -> _Pre:
    model = gguf.value("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise UnsupportedModel(
            f"{gguf.path}: tokenizer model {model!r} is not converted; only gpt2 (byte-level BPE) is"
        )
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


def _mark_added_tokens(gguf: GgufFile, backend: Tokenizer, tokens: list[str]) -> None:
    kinds = gguf.values("tokenizer.ggml.token_type", int)
    if kinds is None or len(kinds) != len(tokens):
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.token_type must tell the type of each of {len(tokens)} tokens"
        )
    pairs = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in pairs if kind == _CONTROL]
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == _USER_DEFINED])


def _add_bos_and_eos(
    gguf: GgufFile, backend: Tokenizer, tokens: list[str], ids: dict[str, int], adds_bos: bool
) -> None:
    """Let encoding add the begin and end tokens that the file asks for."""
    wanted = {
        "bos_token_id": gguf.value("tokenizer.ggml.add_bos_token", bool, adds_bos),
        "eos_token_id": gguf.value("tokenizer.ggml.add_eos_token", bool, False),
    }
    added = {}
    for name, is_wanted in wanted.items():
        if is_wanted and name not in ids:
            raise CheckpointError(f"{gguf.path}: texts are to get a {name}, but the file names none")
        if is_wanted:
            added[name] = (tokens[ids[name]], ids[name])
    if not added:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        return
    pieces = [added["bos_token_id"][0]] if "bos_token_id" in added else []
    pieces += ["$A"] + ([added["eos_token_id"][0]] if "eos_token_id" in added else [])
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=list(added.values()))
