"""What a Hugging Face folder says about text: tokenizer, chat templates, end tokens, how the model wants to be sampled.

A tokenizer.json is taken as it is; without one, a tokenizer.model is rebuilt. Nothing in the folder is executed but
chat templates, in a sandbox, elsewhere.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from engine.errors import CheckpointError, InvalidRequest, UnsupportedModel
from engine.models import sentence_pieces
from engine.models.checkpoint import first_few
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What is obeyed of a generation_config.json."""
_NO_SAMPLING = frozenset(
    {"do_sample", "transformers_version", "_from_model_config", "cache_implementation", "use_cache", "max_length"}
    | {"output_attentions", "output_hidden_states"}
)
_MAX_TOKEN_ID = 2**31 - 1


class TokenizerFiles(NamedTuple):
    """The content of the folder, checked.

    Attributes:
        backend: Text to ids and back.
        named_tokens: bos_token and its like, by name.
        template_sources: Jinja sources by name.
        eos_token_ids: By generation_config.json, config.json and the tokenizer, in that order.
        sampling_defaults: Fields of `SamplingParams`.
    """

    backend: tokenizers.Tokenizer
    named_tokens: dict[str, str]
    template_sources: dict[str, str]
    eos_token_ids: list[int]
    sampling_defaults: dict[str, Any]


def read_files(folder: Path) -> TokenizerFiles:
    """Read what `folder` says about text.

    Raises:
        CheckpointError: A file is missing or not what it should be.
        UnsupportedModel: Its tokenizer is of a kind that is not read.
    """
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(folder, config)
    backend = _read_backend(folder, config, named)
    _mark_named_tokens(backend, named)
    return TokenizerFiles(
        backend,
        named,
        _template_sources(folder, config),
        _eos_token_ids(folder, backend, named),
        _sampling_defaults(folder / "generation_config.json"),
    )


def _read_backend(folder: Path, config: dict[str, Any], named: dict[str, str]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
    elif (folder / "tokenizer.model").is_file():
        backend = _read_pieces(folder, config, named)
    else:
        raise CheckpointError(
            f"{folder} has neither tokenizer.json nor tokenizer.model; other tokenizer files are not read"
        )
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_pieces(folder: Path, config: dict[str, Any], named: dict[str, str]) -> tokenizers.Tokenizer:
    """Rebuild tokenizer.model, with the tokens that were added to it; what `named` leaves open it fills in."""
    path = folder / "tokenizer.model"
    model = sentence_pieces.read_model_file(path)
    for name, token_id in (("bos_token", model.bos_id), ("eos_token", model.eos_id), ("unk_token", model.unk_id)):
        if 0 <= token_id < len(model.pieces):
            named.setdefault(name, model.pieces[token_id])
    model = model._replace(
        adds_prefix=model.adds_prefix and config.get("add_prefix_space") is not False,
        prefixes_all=config.get("legacy") is not False,
    )
    unsplit = [
        piece for piece, kind in zip(model.pieces, model.kinds, strict=True) if kind == sentence_pieces.USER_DEFINED
    ]
    if unsplit and (model.charsmap or model.removes_extra_spaces or (model.adds_prefix and model.prefixes_all)):
        raise UnsupportedModel(
            f"{path}: its {len(unsplit)} user-defined pieces ({first_few(unsplit)}) are found by SentencePiece after "
            f"the text is normalised, which is not done here: give the folder a tokenizer.json"
        )
    try:
        backend = sentence_pieces.build(model)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    for token_id, token in sorted(_added_tokens(folder, config).items()):
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(f"{path}: the added token {token.content!r} does not get its id {token_id}")
    begins = str(config.get("tokenizer_class", "Llama")).startswith(("Llama", "CodeLlama", "Gemma"))
    added = {"bos_token": config.get("add_bos_token", begins), "eos_token": config.get("add_eos_token", False)}
    ends = [_with_id(backend, named.get(name)) if is_added else None for name, is_added in added.items()]
    sentence_pieces.add_ends(backend, *ends)
    return backend


def _with_id(backend: tokenizers.Tokenizer, token: str | None) -> tuple[str, int] | None:
    token_id = None if token is None else backend.token_to_id(token)
    return None if token is None or token_id is None else (token, token_id)


def _added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens that tokenizer_config.json, or an older file of their own, adds to a vocabulary, by id."""
    found: dict[int, tokenizers.AddedToken] = {}
    try:
        for token, token_id in _read_json(folder / "added_tokens.json").items():
            found[int(token_id)] = tokenizers.AddedToken(token, normalized=False)
        for token_id, entry in config.get("added_tokens_decoder", {}).items():
            flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "special", "single_word")}
            found[int(token_id)] = tokenizers.AddedToken(entry["content"], normalized=False, **flags)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{folder}: the added tokens are not readable: {error!r}") from error
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty where there is no file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error


def _named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return bos_token and its like by name; an older file of their own counts where the newer field is missing."""
    entries = dict(config)
    if "added_tokens_decoder" not in config:
        entries |= _read_json(folder / "special_tokens_map.json")
    tokens = {name: entries[name] for name in _NAMED_TOKENS if entries.get(name) is not None}
    return {name: _content(folder, name, token) for name, token in tokens.items()}


def _content(folder: Path, name: str, token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise CheckpointError(f"{folder}: {name} must be text or an object with a content, got {token!r:.200}")
    return content


def _mark_named_tokens(backend: tokenizers.Tokenizer, named: dict[str, str]) -> None:
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for token in named.values() if token not in added and backend.token_to_id(token) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in missing])


def _template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        named = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        return {name: _read_text(file) for name, file in (named | {"default": path}).items()}
    template = config.get("chat_template", _read_json(folder / "chat_template.json").get("chat_template"))
    if template is None or isinstance(template, str):
        return {} if template is None else {"default": template}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, LookupError) as error:
        raise CheckpointError(f"{folder}: chat_template must be text or a list of named texts: {error!r}") from error


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, named: dict[str, str]) -> list[int]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id <= _MAX_TOKEN_ID:
                must = f"must hold whole numbers from 0 to {_MAX_TOKEN_ID}"
                raise CheckpointError(f"{folder / name}: eos_token_id {must}, got {token_id!r:.200}")
        found += ids
    own = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return found if own is None else [*found, own]


def _sampling_defaults(path: Path) -> dict[str, Any]:
    """Return what a generation_config.json says of sampling; what is not obeyed is named in one log line."""
    content = {name: value for name, value in _read_json(path).items() if value is not None}
    ignored = [name for name in content if name not in _NO_SAMPLING.union(_SAMPLING) and not name.endswith("_token_id")]
    if ignored:
        logger.info("%s asks for what is not obeyed: %s", path, ", ".join(sorted(ignored)))
    defaults = {name: content[name] for name in _SAMPLING if name in content}
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise CheckpointError(f"{path}: {error}") from error
    return defaults
