"""What would run a model, said without loading its weights: the body of `models check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.client.tokenizer import load_tokenizer
from engine.errors import CheckpointError, ConfigError
from engine.models import NULL_MODEL, hub, registry
from engine.models.checkpoint import read_config, weight_files
from engine.models.convert import Progress, inspect
from engine.models.fetch import wait_in_read
from engine.models.listing import context_of, weights_of
from engine.models.store import cached_folder, look_up, resolve


def check(model: str, progress: Progress) -> str:
    """Return one line about a model: what runs it, its context, weights and tokenizer.

    A GGUF file is read and not converted, of a model on the hub no weights are downloaded, a known model not fetched.

    Raises:
        ConfigError: There is no such model, or it is a known one that was not fetched.
        ModelError: Nothing would run it, or its files cannot be used; says why.
    """
    if model == NULL_MODEL:
        return f"{model}: the integer model runs it; it has no weights"
    path, is_folder = look_up(model)
    if path.suffix == ".gguf" and not is_folder:
        return _check_gguf(path, progress)
    in_cache = cached_folder(model)
    if in_cache is not None and not in_cache.is_dir():
        raise ConfigError(f"{model} is not cached: python -m engine models pull {model}")
    on_hub = None if is_folder else hub.parse_id(model)
    if on_hub is not None:
        progress("fetch", 0, 0)
        folder = hub.find(on_hub, wait_in_read, with_weights=False)
    else:
        folder = resolve(model, progress)
    config = read_config(folder)
    has_weights = on_hub is None or any(folder.glob("*.safetensors"))
    said = _verdict(model, config, folder if has_weights else None)
    tokenizer = load_tokenizer(folder)
    weights = _weights(folder) if has_weights else "weights not downloaded"
    return f"{said}, {weights}, {_text(tokenizer.vocab_size, tokenizer.has_chat_template)}"


def _check_gguf(path: Path, progress: Progress) -> str:
    config, tokenizer = inspect(path, progress)
    said = _verdict(str(path), config, None)
    return f"{said}, {path.stat().st_size / 1e6:.0f} MB, {_text(len(tokenizer.tokens), bool(tokenizer.chat_templates))}"


def _verdict(model: str, config: dict[str, Any], folder: Path | None) -> str:
    implementation = registry.choose(config, folder)
    context = context_of(config)
    if not context:
        raise CheckpointError(f"{model}: config.json names no longest context (max_position_embeddings)")
    architecture = config["architectures"][0]
    return f"{model}: {architecture}, {implementation} runs it; context {context} tokens, {weights_of(config)}"


def _weights(folder: Path) -> str:
    files = weight_files(folder)
    size_bytes = sum(file.stat().st_size for file in files)
    return f"{size_bytes / 1e6:.0f} MB in {len(files)} file{'s' * (len(files) > 1)}"


def _text(vocab_size: int, has_chat_template: bool) -> str:
    return f"vocabulary {vocab_size}, {'a' if has_chat_template else 'no'} chat template"
