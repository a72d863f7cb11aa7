"""From a model's name to its folder and tokenizer. Blocking; call it off the Trio thread. Imports no torch."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.client.tokenizer import Tokenizer, load_tokenizer
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.base import Progress
from engine.models import NULL_MODEL
from engine.models.fetch import Wait, wait_in_read
from engine.models.store import model_name, resolve


class ModelFiles(NamedTuple):
    """What a client needs of a model.

    Attributes:
        config: The settings with `model` as the folder's path and `prefix_hash_seed` drawn.
        tokenizer: Of that model.
        name: What the model is called towards users.
    """

    config: EngineConfig
    tokenizer: Tokenizer
    name: str


def open_model(config: EngineConfig, progress: Progress, wait: Wait = wait_in_read) -> ModelFiles:
    """Find (and where needed fetch and convert) the model that `config` names.

    What `progress` or `wait` (see `resolve`) raises gives it up.

    Raises:
        ConfigError: There is no such model, or it cannot be fetched.
        ModelError: Its files cannot be used.
    """
    name = config.model
    template = None if config.chat_template is None else _read_template(config.chat_template)
    if name == NULL_MODEL:
        tokenizer = load_tokenizer(NULL_MODEL, template)
    else:
        folder = resolve(name, progress, wait, config.revision)
        tokenizer = load_tokenizer(folder, template)
        config = msgspec.structs.replace(config, model=str(folder), revision=None)
        name = model_name(name)
    if config.prefix_hash_seed is None:
        config = msgspec.structs.replace(config, prefix_hash_seed=secrets.token_hex(16))
    return ModelFiles(config, tokenizer, name)


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path} is not text in UTF-8: {error}") from error
