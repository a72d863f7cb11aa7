"""What would run a model, said without loading its weights: the body of `models check`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from engine.client.tokenizer import load_tokenizer
from engine.errors import ConfigError
from engine.models import NULL_MODEL, hub, registry
from engine.models.checkpoint import first_few, read_config, weight_files
from engine.models.convert import inspect
from engine.models.fetch import Progress, wait_in_read
from engine.models.listing import weights_of
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
    elif in_cache is None and (path / "config.json").is_file():
        folder = path
    else:
        folder = resolve(model, progress)
    has_weights = any(folder.glob("*.safetensors"))
    missing = hub.missing_weights(folder) if on_hub is not None else []
    is_whole = has_weights and not missing
    said = _verdict(model, read_config(folder), folder if is_whole else None, progress)
    if on_hub is None and not has_weights:
        return ", ".join([*said, "no *.safetensors file here"])
    tokenizer = load_tokenizer(folder)
    in_part = f"weights downloaded in part, without {first_few(missing)}" if has_weights else "weights not downloaded"
    weights = _weights(folder) if is_whole else in_part
    return ", ".join([*said, weights, *_text(tokenizer.vocab_size, tokenizer.has_chat_template)])


def _check_gguf(path: Path, progress: Progress) -> str:
    config, tokenizer = inspect(path, progress)
    said = _verdict(str(path), config, None, progress)
    size = f"{path.stat().st_size / 1e6:.0f} MB"
    return ", ".join([*said, size, *_text(len(tokenizer.tokens), bool(tokenizer.chat_templates))])


def _verdict(model: str, config: dict[str, Any], folder: Path | None, progress: Progress) -> list[str]:
    architecture, implementation, max_positions = registry.choose(config, folder, functools.partial(progress, "guard"))
    context = f"context {max_positions} tokens" if max_positions else "no longest context: give --max-model-len"
    runs = f"{model}: {architecture}, {implementation} runs it; {context}"
    return [runs, *filter(None, [weights_of(config)])]


def _weights(folder: Path) -> str:
    files = weight_files(folder)
    size_bytes = sum(file.stat().st_size for file in files)
    return f"{size_bytes / 1e6:.0f} MB in {len(files)} file{'s' * (len(files) > 1)}"


def _text(vocab_size: int, has_chat_template: bool) -> list[str]:
    return [f"vocabulary {vocab_size}", f"{'a' if has_chat_template else 'no'} chat template"]
