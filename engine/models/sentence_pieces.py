"""SentencePiece models, from a tokenizer.model or a GGUF file, rebuilt for the `tokenizers` library.

A tokenizer.model is one protobuf message (sentencepiece_model.proto of the SentencePiece project); the few fields that
decide on ids are read here, so that neither protobuf nor sentencepiece has to be installed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import CheckpointError, UnsupportedModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces, as SentencePiece and GGUF number them."""

_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"
_PLAIN_MARKERS = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_NEVER = -1e6
"""A score that loses against every other way to split a text."""


class PieceModel(NamedTuple):
    """What decides on ids.

    Attributes:
        pieces, scores, kinds: By id.
        is_unigram: Whether the likeliest split is sought; else pairs are merged, best score first.
        unk_id: The piece for what no piece spells.
        adds_prefix: Whether a text begins as if a space stood before it.
        prefixes_all: Whether that holds too for what follows a token that is never split.
        removes_extra_spaces: Whether spaces at both ends go, and runs of them become one.
        charsmap: SentencePiece's compiled character normalisation; empty for none.
        bos_id, eos_id: Begin and end of a text; -1 for none.
    """

    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    is_unigram: bool
    unk_id: int
    adds_prefix: bool = True
    prefixes_all: bool = True
    removes_extra_spaces: bool = False
    charsmap: bytes = b""
    bos_id: int = -1
    eos_id: int = -1


def build(model: PieceModel, markers_take_spaces: bool = False) -> Tokenizer:
    """Return the tokenizer, without begin and end tokens; control pieces are special in it, user-defined never split.

    A user-defined piece is known by the text it stands for: with spaces. Where nothing but spaces is spelled otherwise,
    it is found in the text as spelled, as SentencePiece does; else before that, as llama.cpp does. With
    `markers_take_spaces`, white space after a control piece belongs to it, but for the begin and end of a text.

    Raises:
        CheckpointError: Pieces are listed twice, or something of the model is damaged.
    """
    if not -1 <= model.unk_id < len(model.pieces):
        raise CheckpointError(f"the unknown piece has the id {model.unk_id}, outside of {len(model.pieces)} pieces")
    tokens = [
        piece.replace(_SPACE, " ") if kind == USER_DEFINED else piece
        for piece, kind in zip(model.pieces, model.kinds, strict=True)
    ]
    try:
        backend = Tokenizer(_unigram(model, tokens) if model.is_unigram else _bpe(model, tokens))
        backend.normalizer = _normalizer(model)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"the pieces make no tokenizer: {error}") from error
    if model.adds_prefix and not model.prefixes_all:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    stripped = [decoders.Strip(content=" ", left=1)] if model.adds_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    _mark_added_tokens(backend, model, tokens, markers_take_spaces)
    return backend


def _unigram(model: PieceModel, tokens: list[str]) -> models.Unigram:
    unreachable = {UNUSED, CONTROL}
    scores = [_NEVER if kind in unreachable else score for score, kind in zip(model.scores, model.kinds, strict=True)]
    unk_id = model.unk_id if model.unk_id >= 0 else None
    return models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=unk_id, byte_fallback=BYTE in model.kinds)


def _bpe(model: PieceModel, tokens: list[str]) -> models.BPE:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{len(tokens) - len(vocabulary)} pieces of the tokenizer are listed twice")
    return models.BPE(
        vocab=vocabulary,
        merges=_merges(model),
        unk_token=tokens[model.unk_id] if model.unk_id >= 0 else None,
        fuse_unk=True,
        byte_fallback=BYTE in model.kinds,
    )


def _mark_added_tokens(backend: Tokenizer, model: PieceModel, tokens: list[str], markers_take_spaces: bool) -> None:
    pairs = list(zip(tokens, model.kinds, strict=True))
    taking = {token for token, _ in pairs if token not in _PLAIN_MARKERS} if markers_take_spaces else set()
    markers = [AddedToken(token, normalized=False, rstrip=token in taking) for token, kind in pairs if kind == CONTROL]
    backend.add_special_tokens(markers)
    spells_spaces_only = not (
        model.charsmap or model.removes_extra_spaces or (model.adds_prefix and model.prefixes_all)
    )
    unsplit = [token for token, kind in pairs if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=spells_spaces_only) for token in unsplit])


def add_ends(backend: Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """Let encoding put `bos`, a token and its id, before a text and `eos` after it."""
    if bos is None and eos is None:
        return
    pieces = [*(() if bos is None else (bos[0],)), "$A", *(() if eos is None else (eos[0],))]
    ends = [end for end in (bos, eos) if end is not None]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ends)


def _normalizer(model: PieceModel) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.removes_extra_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.adds_prefix and model.prefixes_all:
        steps.append(normalizers.Prepend(" "))
    steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


def _merges(model: PieceModel) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best score first, as SentencePiece merges them."""
    ids = {
        piece: index
        for index, (piece, kind) in enumerate(zip(model.pieces, model.kinds, strict=True))
        if kind == NORMAL
    }
    ranked = [
        (-model.scores[index], index, ids[piece[:cut]], ids[piece[cut:]])
        for piece, index in ids.items()
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    return [(model.pieces[left], model.pieces[right]) for _, _, left, right in sorted(ranked)]


# -- tokenizer.model ---------------------------------------------------------------------------------------------------


def read_model_file(path: Path) -> PieceModel:
    """Read a tokenizer.model.

    Raises:
        CheckpointError: It cannot be read, or is no SentencePiece model.
        UnsupportedModel: It is of a kind that is not built here.
    """
    try:
        content = path.read_bytes()
        model = _piece_model(content)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (LookupError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model: {error}") from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    if not model.pieces:
        raise CheckpointError(f"{path} is not a SentencePiece model: it has no pieces")
    return model


def _piece_model(content: bytes) -> PieceModel:
    """Decode ModelProto: pieces (1), trainer_spec (2), normalizer_spec (3)."""
    pieces, scores, kinds = [], [], []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(_as_bytes(value)))
            pieces.append(_as_bytes(piece[1]).decode())
            (score,) = struct.unpack("<f", _as_bytes(piece.get(2, bytes(4))))
            scores.append(score)
            kinds.append(_as_int(piece.get(3, NORMAL)))
        elif number == 2:
            trainer |= dict(_fields(_as_bytes(value)))
        elif number == 3:
            normalizer |= dict(_fields(_as_bytes(value)))
    kind = trainer.get(3, _UNIGRAM)
    if kind not in {_UNIGRAM, _BPE}:
        raise UnsupportedModel(f"SentencePiece models of kind {kind!r} are not supported; only unigram and BPE are")
    if trainer.get(24, 0) or not normalizer.get(5, 1):
        raise UnsupportedModel("SentencePiece models whose spaces end a word, or are not escaped, are not supported")
    return PieceModel(
        pieces,
        scores,
        kinds,
        is_unigram=kind == _UNIGRAM,
        unk_id=_signed(trainer.get(40, 0)),
        adds_prefix=bool(normalizer.get(3, 1)),
        removes_extra_spaces=bool(normalizer.get(4, 1)),
        charsmap=_as_bytes(normalizer.get(2, b"")),
        bos_id=_signed(trainer.get(41, 1)),
        eos_id=_signed(trainer.get(42, 2)),
    )


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a protobuf message; fixed-width numbers come as their bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        wire_type = tag & 7
        if wire_type == 0:
            number, position = _varint(message, position)
            yield tag >> 3, number
            continue
        if wire_type == 2:
            size, position = _varint(message, position)
        else:
            size = {1: 8, 5: 4}[wire_type]
        if position + size > len(message):
            raise ValueError(f"it ends after {len(message)} bytes where {position + size} are needed (cut short?)")
        yield tag >> 3, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the number at `position`, seven bits a byte, lowest first, and where the next thing begins."""
    number = 0
    for shift in range(0, 70, 7):
        byte = message[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise ValueError("a number has more than ten bytes")


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a field of text holds a number")
    return value


def _as_int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise TypeError("a field for a number holds text")
    return value


def _signed(value: int | bytes) -> int:
    """Undo two's complement: -1 is stored as 2**64 - 1."""
    number = _as_int(value)
    return number - 2**64 if number >= 2**63 else number
