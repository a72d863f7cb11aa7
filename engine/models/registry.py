"""Which architecture runs on which implementation; everything else is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, UnsupportedModel
from engine.models.base import Model
from engine.models.checkpoint import read_config
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig, DecoderTraits
from engine.models.weights import load_weights, resolve_dtype

DECODERS: dict[str, DecoderTraits] = {
    "LlamaForCausalLM": DecoderTraits(),
    "MistralForCausalLM": DecoderTraits(biases="none", windows="all"),
    "Qwen2ForCausalLM": DecoderTraits(biases="qkv", windows="upper"),
    "Qwen3ForCausalLM": DecoderTraits(qk_norm=True, windows="upper"),
}
"""Architecture, as config.json names it → traits of `models.decoder`."""


def decoder_config(raw: dict[str, Any]) -> DecoderConfig:
    """Return what to build for the content of a config.json.

    Raises:
        UnsupportedModel: The architecture is not one of `DECODERS`, or asks for what is not built.
        CheckpointError: A number in it is missing or makes no sense.
    """
    architectures = raw.get("architectures") or []
    for architecture in architectures:
        if architecture in DECODERS:
            return DecoderConfig.of(raw, DECODERS[architecture])
    named = ", ".join(map(str, architectures)) or "no architecture at all"
    raise UnsupportedModel(f"config.json names {named}; supported are: {', '.join(sorted(DECODERS))}")


class BuiltModel(NamedTuple):
    """A model with its weights, for contexts of up to `max_model_len` tokens; weights and K/V are of `dtype`."""

    model: Model
    max_model_len: int
    dtype: torch.dtype


def build_model(folder: Path, config: EngineConfig, progress: Callable[[int, int], None]) -> BuiltModel:
    """Load the model of `folder` with the implementation that `config.model_impl` allows.

    Args:
        folder: In Hugging Face layout.
        config: Of the engine.
        progress: Called with (done, in all) while weights come in.

    Raises:
        UnsupportedModel: Nothing allowed runs it rightly; the message has every reason.
        CheckpointError: A file is missing, corrupt or makes no sense.
        ConfigError: The asked context is longer than the model's.
    """
    raw = read_config(folder)
    if config.model_impl == "transformers":
        return _through_transformers(folder, raw, config, progress)
    try:
        shape = decoder_config(raw)
    except UnsupportedModel as refusal:
        if config.model_impl == "own":
            raise
        try:
            return _through_transformers(folder, raw, config, progress)
        except UnsupportedModel as other:
            raise UnsupportedModel(f"{refusal}. Through transformers: {other}") from other
    max_model_len = _max_model_len(config, shape.max_positions, folder)
    dtype = resolve_dtype(config.dtype, raw, folder)
    decoder = Decoder(shape, max_model_len, dtype)
    load_weights(folder, decoder.destinations(), progress)
    decoder.pack()
    return BuiltModel(decoder, max_model_len, dtype)


def _through_transformers(
    folder: Path, raw: dict[str, Any], config: EngineConfig, progress: Callable[[int, int], None]
) -> BuiltModel:
    from engine.models import transformers_loading  # seconds to import, for the models that need it alone

    settings = transformers_loading.open_config(folder, raw)
    max_model_len = _max_model_len(config, transformers_loading.max_positions(settings), folder)
    dtype = resolve_dtype(config.dtype, raw, folder)
    model = transformers_loading.load(folder, settings, max_model_len, dtype, progress)
    return BuiltModel(model, max_model_len, dtype)


def _max_model_len(config: EngineConfig, max_positions: int | None, folder: Path) -> int:
    asked = config.max_model_len
    if max_positions is None and asked is None:
        raise ConfigError(f"the config.json of {folder} names no longest context: give --max-model-len")
    if asked is not None and max_positions is not None and asked > max_positions:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {max_positions} positions (max_position_embeddings) "
            f"of {folder}: lower it to {max_positions} or leave it out"
        )
    return asked or max_positions or 0
