"""One tokenizer of each kind, trained here, gives the ids and texts that transformers gives, also token by token."""

from __future__ import annotations

import contextlib
import io
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from engine.client.detokenizer import Detokenizer
from engine.client.tokenizer import Tokenizer, load_tokenizer
from engine.errors import CheckpointError, ModelError, UnsupportedModel
from engine.models.gguf import GgufFile
from engine.models.gguf_tokenizer import read_tokenizer
from engine.models.sentence_pieces import read_model_file
from engine.sampling_params import SamplingParams

DrawTexts = Callable[[int, int], list[str]]
NUM_TEXTS = 2000
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCES = [
    "the quick brown fox jumps over the lazy dog, and it's not the first time that the fox does so",
    "a request waits in the queue until the engine plans a step for it; then its tokens come, one by one",
    "def add(a, b):\n    return a + b  # the sum of both\n",
    "Zürich ist die größte Stadt der Schweiz, und naïve Reisende zahlen 12 Franken für 1 Kaffee.",
    "наука и жизнь: жизнь и наука, 日本語のテキストと日本の言葉",
    "user@example.org wrote: 3.14159 is about 22/7, isn't it? we'll see...",
]


def train_byte_level(folder: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    save(
        folder,
        backend,
        trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
        ),
    )


def train_unigram(folder: Path) -> None:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    save(
        folder,
        backend,
        trainers.UnigramTrainer(
            vocab_size=400, unk_token="<unk>", special_tokens=["<s>", "</s>", "<unk>"], show_progress=False
        ),
    )


def train_bpe_with_byte_fallback(folder: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *BYTES]
    save(folder, backend, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:3]  # byte tokens are no markers
    (folder / "tokenizer.json").write_text(json.dumps(content))


def train_word_piece(folder: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]", "[CLS]", "[SEP]"]
    save(folder, backend, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single=["[CLS]", "$A", "[SEP]"], special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))


def save(folder: Path, backend: tokenizers.Tokenizer, trainer: Any) -> None:
    backend.train_from_iterator(SENTENCES * 4, trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


KINDS = {
    "byte-level BPE": train_byte_level,
    "unigram": train_unigram,
    "BPE with byte fallback": train_bpe_with_byte_fallback,
    "WordPiece": train_word_piece,
}


def check_equal(tokenizer: Tokenizer, oracle: Any, texts: list[str]) -> None:
    for text, ids in zip(texts, oracle(texts)["input_ids"], strict=True):
        assert tokenizer.encode(text) == ids, text
        for skip in (True, False):
            expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected, text
            params = SamplingParams(skip_special_tokens=skip, max_tokens=None)
            detokenizer = Detokenizer(tokenizer, [], params)
            parts = [detokenizer.update([token_id], False).text for token_id in ids]
            assert "".join(parts) + detokenizer.update([], True).text == expected, text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_equal_those_of_transformers(kind: str, tmp_path: Path, draw_texts: DrawTexts) -> None:
    KINDS[kind](tmp_path)
    check_equal(load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path), draw_texts(NUM_TEXTS, 30))


# -- SentencePiece ---------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
GEMMA = LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "▁▁▁", "\n", "\n\n", "<mask>"]}
T5 = {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma": GEMMA,
    "t5": T5,
    "unigram with byte fallback": T5 | {"byte_fallback": True, "normalization_rule_name": "identity"},
}


def train_pieces(folder: Path, name: str, config: dict[str, Any] | None = None) -> sentencepiece.SentencePieceProcessor:
    """Write a tokenizer.model and return what it means."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(" ".join(SENTENCES).splitlines() + SENTENCES * 4),
        model_writer=written,
        vocab_size=460 if MODELS[name].get("byte_fallback") else 200,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **MODELS[name],
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "TokenizersBackend", **(config or {})})
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def plain(texts: list[str], name: str) -> list[str]:
    """Texts without what SentencePiece itself reads otherwise than transformers and this engine.

    It knows no markers in a text, and normalises characters where the tokenizers library normalises graphemes.
    """
    marked = [text for text in texts if not any(marker in text for marker in ("<s>", "</s>", "<unk>"))]
    return [text for text in marked if name != "t5" or all(map(is_one_grapheme, text))]


def is_one_grapheme(character: str) -> bool:
    return unicodedata.category(character)[0] not in "MC" and character.isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tokenizer_model_gives_the_ids_of_sentencepiece(name: str, tmp_path: Path, draw_texts: DrawTexts) -> None:
    oracle = train_pieces(tmp_path, name)
    tokenizer = load_tokenizer(tmp_path)
    texts = plain(draw_texts(NUM_TEXTS, 31), name)
    assert len(texts) > 500
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text), text
        if oracle.unk_id() not in ids:
            assert tokenizer.decode(ids) == oracle.decode(ids), text


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tokenizer_model_gives_the_ids_and_texts_of_transformers(
    name: str, tmp_path: Path, draw_texts: DrawTexts
) -> None:
    train_pieces(tmp_path, name)
    check_equal(load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path), draw_texts(NUM_TEXTS, 32))


def test_pieces_that_are_never_split_are_found_in_the_text_as_spelled(tmp_path: Path) -> None:
    oracle, tokenizer = train_pieces(tmp_path, "gemma"), load_tokenizer(tmp_path)
    for text in ("the ▁ fox", "▁the", "the▁▁quick", "a  ▁ b", "x <mask> y", "x  <mask>   y\n\nz"):
        assert tokenizer.encode(text) == oracle.encode(text), text


@pytest.mark.parametrize(
    ("name", "changes"), [("llama", {}), ("t5", {}), ("llama", {"normalization_rule_name": "nfkc_cf"})]
)
def test_pieces_that_are_never_split_beside_a_normalisation_are_refused(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, name, MODELS[name] | {"user_defined_symbols": ["▁▁", "<mask>"]} | changes)
    train_pieces(tmp_path, name)
    with pytest.raises(
        UnsupportedModel, match=r"2 user-defined pieces \(▁▁, <mask>\).*give the folder a tokenizer\.json"
    ):
        load_tokenizer(tmp_path)


def test_configuration_decides_on_begin_tokens_prefix_and_added_tokens(tmp_path: Path) -> None:
    size = train_pieces(tmp_path, "llama").vocab_size()
    added = {
        str(size): {"content": "<|turn|>", "special": True, "rstrip": True},
        str(size + 1): {"content": "<call>", "special": False},
    }
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_eos_token": True,
        "legacy": False,
        "added_tokens_decoder": added,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the<|turn|> \n the<call>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.special_token_ids == {1, 2, 0, size}
    assert tokenizer.eos_token_ids == (2,)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("the<call>the", add_special_tokens=False) == oracle.encode(
        "the<call>the", add_special_tokens=False
    )
    first, *rest = tokenizer.encode("the<|turn|>the", add_special_tokens=False)
    assert tokenizer.token(first) == "▁the"
    assert tokenizer.token(rest[-1]) != "▁the"
    del added[str(size)]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"added token '<call>' does not get its id {size + 1}"):
        load_tokenizer(tmp_path)


def test_tokenizer_model_that_is_none_or_is_cut_short_is_named(tmp_path: Path) -> None:
    train_pieces(tmp_path, "llama")
    path = tmp_path / "tokenizer.model"
    whole = path.read_bytes()
    for content in (b"", b"IQ== 0\nIg== 1\n", whole[:-1], whole[: len(whole) // 2], b"\xff" * 40):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.model is not a SentencePiece model"):
            load_tokenizer(tmp_path)


@pytest.mark.slow
def test_random_damage_is_a_model_error_and_nothing_else(tmp_path: Path) -> None:
    for name in ("llama", "t5"):
        train_pieces(tmp_path, name)
        path = tmp_path / "tokenizer.model"
        whole, draw = path.read_bytes(), random.Random(6)
        for index in range(60):
            data = bytearray(whole)
            for _ in range(draw.choice((1, 3, 20))):
                data[draw.randrange(len(data) - 900 if index % 2 else 0, len(data))] = draw.randrange(256)
            path.write_bytes(data)
            with contextlib.suppress(ModelError):
                load_tokenizer(tmp_path).encode("the <s> quick 12")


def test_other_kinds_of_sentencepiece_models_are_refused(tmp_path: Path) -> None:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=written, vocab_size=40, model_type="char", minloglevel=2
    )
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.model: .* of kind 4 are not supported"):
        load_tokenizer(tmp_path)


# -- the same in GGUF --------------------------------------------------------------------------------------------------


def write_pieces(path: Path, source: Path, architecture: str, model: str, **flags: bool) -> GgufFile:
    """A GGUF file with the tokenizer.model of `source`, as llama.cpp's script writes it."""
    pieces = read_model_file(source / "tokenizer.model")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("default")
    # strings that are never split are stored as the text they stand for
    tokens = [
        piece.replace("▁", " ") if kind == 4 else piece for piece, kind in zip(pieces.pieces, pieces.kinds, strict=True)
    ]
    writer.add_token_list(tokens)
    writer.add_token_scores(pieces.scores)
    writer.add_token_types(pieces.kinds)
    if pieces.charsmap:
        writer.add_precompiled_charsmap(pieces.charsmap)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_add_space_prefix(pieces.adds_prefix)
    writer.add_remove_extra_whitespaces(pieces.removes_extra_spaces)
    for name, value in flags.items():
        getattr(writer, name)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [("llama", "llama"), ("gemma", "llama"), ("t5", "t5")])
def test_pieces_in_a_gguf_file_are_those_of_the_tokenizer_model(
    name: str, model: str, tmp_path: Path, draw_texts: DrawTexts
) -> None:
    train_pieces(tmp_path, name)
    expected = load_tokenizer(tmp_path)
    read = read_tokenizer(write_pieces(tmp_path / "x.gguf", tmp_path, "llama", model))
    ours = Tokenizer(read.backend, {}, read.eos_token_ids)
    begin, end = ([1], []) if model == "llama" else ([], [2])
    for text in draw_texts(NUM_TEXTS, 33):
        ids = expected.encode(text, add_special_tokens=False)
        assert ours.encode(text) == begin + ids + end, text
        assert ours.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False), text


def test_gguf_files_with_pieces_name_their_ends_and_ask_for_begin_tokens(tmp_path: Path) -> None:
    train_pieces(tmp_path, "llama")
    read = read_tokenizer(write_pieces(tmp_path / "x.gguf", tmp_path, "llama", "llama", add_add_bos_token=False))
    assert (read.ids, read.eos_token_ids) == ({"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}, [2])
    assert read.backend.encode("the").ids == read.backend.encode("the", add_special_tokens=False).ids


def test_spaces_after_the_markers_of_phi3_belong_to_them(tmp_path: Path) -> None:
    train_pieces(tmp_path, "llama")
    for architecture, is_taken in (("phi3", True), ("llama", False)):
        read = read_tokenizer(write_pieces(tmp_path / "x.gguf", tmp_path, architecture, "llama"))
        ids = read.backend.encode("</s>  \n the", add_special_tokens=False).ids
        assert (read.backend.id_to_token(ids[1]) == "▁the") is is_taken
        assert read.backend.encode("<s> the", add_special_tokens=False).ids[1] != read.backend.token_to_id("▁the")
