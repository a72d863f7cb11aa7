"""Which architecture runs on which implementation; everything else is refused with the reason."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, ModelError, UnsupportedModel
from engine.models.base import BuiltModel
from engine.models.cache import own_torch_cache
from engine.models.checkpoint import EMBEDDING, HEAD, read_config, stored_tensors
from engine.models.compiled_loading import load_compiled, step_row_bytes
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.families import DECODERS
from engine.models.weights import check_headers, load_weights, resolve_dtype, stores_other_head

logger = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """What would run a model.

    Attributes:
        architecture: The one of those that config.json names which is taken.
        implementation: Of it, in words.
        max_positions: The longest context; None where config.json names none.
    """

    architecture: str
    implementation: str
    max_positions: int | None


def choose(raw: dict[str, Any], folder: Path | None, progress: Callable[[int, int], None]) -> Verdict:
    """Return what would run a model with this config.json; no weight is loaded.

    Args:
        raw: The content of config.json.
        folder: Of the model; what its weight files' headers say is held against `raw`. None where it has none yet.
        progress: Called with (done, in all) while the guard is at work.

    Raises:
        UnsupportedModel: Nothing would; the message has both reasons, transformers' first.
        CheckpointError: A number in it is missing or makes no sense, to both, or the weight files do not fit it.
    """
    own_torch_cache()
    try:
        shape = decoder_config(raw)
    except ModelError as refusal:
        from engine.models import transformers_loading

        with _adding(refusal), tempfile.TemporaryDirectory() as copied:  # transformers reads files alone
            (Path(copied) / "config.json").write_text(json.dumps(raw))
            settings = transformers_loading.open_config(Path(copied), raw)
            if folder is not None:
                resolve_dtype("auto", raw, folder)
                transformers_loading.check(folder, settings)
                transformers_loading.check_tensors(folder, settings)
            implementation = transformers_loading.foretell(settings, progress)
            architecture = transformers_loading.architecture_of(settings)
            return Verdict(architecture, implementation, transformers_loading.max_positions(settings))
    if folder is not None:
        resolve_dtype("auto", raw, folder)
        _check_files(folder, shape)
    return Verdict(own_architecture(raw), "the own decoder", shape.max_positions)


def _check_files(folder: Path, shape: DecoderConfig) -> None:
    """Refuse weight files that hold something else than a decoder of `shape` needs, before any of it is allocated."""
    num_parts = sum(1 if experts is None else experts.num_experts for experts in shape.experts)
    num_tensors = sum(1 for _ in stored_tensors(folder))
    if num_parts > num_tensors:
        raise CheckpointError(
            f"config.json: {shape.num_layers} layers of {num_parts} MLPs in all, but the weight files of {folder} hold "
            f"{num_tensors} tensors"
        )
    try:
        with torch.device("meta"):
            destinations = _destinations(folder, Decoder(shape, 2, torch.float32))
    except (RuntimeError, OverflowError) as error:
        raise CheckpointError(f"the sizes in the config.json of {folder} make no model: {error}") from error
    check_headers(folder, destinations)


def _destinations(folder: Path, decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return what is to be filled, by name; where head and embedding are one, its one tensor may have either name."""
    destinations = decoder.destinations()
    names = {tensor.name for tensor in stored_tensors(folder)}
    if HEAD not in destinations and HEAD in names and EMBEDDING not in names:
        destinations[HEAD] = destinations.pop(EMBEDDING)
    return destinations


def decoder_config(raw: dict[str, Any]) -> DecoderConfig:
    """Return what to build for the content of a config.json.

    Raises:
        UnsupportedModel: The architecture is not one of `DECODERS`, or asks for what is not built.
        CheckpointError: A number in it is missing or makes no sense.
    """
    return DecoderConfig.of(raw, DECODERS[own_architecture(raw)])


def own_architecture(raw: dict[str, Any]) -> str:
    """Return which of the architectures that a config.json names our own decoder has.

    What is left out of a config.json is a matter of its model_type, and several have one architecture with defaults of
    their own: transformers goes by the model_type alone.

    Raises:
        UnsupportedModel: It has none of them, or not with this model_type.
    """
    architectures, model_type = raw.get("architectures") or [], raw.get("model_type")
    known = [architecture for architecture in architectures if architecture in DECODERS]
    for architecture in known:
        if model_type in (None, DECODERS[architecture].model_type):
            return str(architecture)
    if known:
        raise UnsupportedModel(
            f"config.json names {known[0]} with model_type {model_type!r}, whose defaults are others than those that "
            f"our own decoder has for it: {DECODERS[known[0]].model_type!r}"
        )
    named = ", ".join(map(str, architectures)) or "no architecture at all"
    code = "; it asks for code of its own (auto_map), which is never executed" if raw.get("auto_map") else ""
    raise UnsupportedModel(f"config.json names {named}; our own decoder runs {', '.join(sorted(DECODERS))}{code}")


def own_shape(folder: Path, config: EngineConfig) -> DecoderConfig | None:
    """Return the shape of our own decoder where `build_model` will take it for `folder`, else None.

    Raises:
        CheckpointError: config.json is missing or no JSON object.
    """
    raw = read_config(folder)
    try:
        return None if config.model_impl == "transformers" else decoder_config(raw)
    except ModelError:
        return None


def own_row_bytes(folder: Path, config: EngineConfig, shape: DecoderConfig) -> int:
    """Return the memory that a row of a step of `shape`, the own decoder's, takes, as far as it is known before.

    Raises:
        UnsupportedModel: The checkpoint's own type is not one that is read.
        CheckpointError: There is no readable weight file.
    """
    return step_row_bytes(shape, config, resolve_dtype(config.dtype, read_config(folder), folder))


def build_model(folder: Path, config: EngineConfig, progress: Callable[[int, int], None]) -> BuiltModel:
    """Load the model of `folder` with the implementation that `config.model_impl` allows.

    Args:
        folder: In Hugging Face layout.
        config: Of the engine.
        progress: Called with (done, in all) while weights come in.

    Raises:
        UnsupportedModel: Nothing allowed runs it rightly; the message has every reason, transformers' first.
        CheckpointError: A file is missing, corrupt or makes no sense; as above.
        ConfigError: The asked context is longer than the model's.
    """
    own_torch_cache()
    raw = read_config(folder)
    if config.model_impl == "transformers":
        return _through_transformers(folder, raw, config, progress)
    try:
        shape = decoder_config(raw)
    except ModelError as refusal:
        if config.model_impl == "own":
            raise
        with _adding(refusal):
            return _through_transformers(folder, raw, config, progress)
    max_model_len = _max_model_len(config, shape.max_positions, folder)
    dtype = resolve_dtype(config.dtype, raw, folder)
    _check_files(folder, shape)
    if shape.ties_embeddings and stores_other_head(folder, dtype):
        logger.warning("%s ties head and embedding, but both are stored and differ: they are not tied", folder)
        shape = dataclasses.replace(shape, ties_embeddings=False)
    compiled = load_compiled(folder, shape, config, max_model_len, dtype, progress)
    if compiled is not None:
        return compiled
    _refuse_other_pages(config, dtype)
    decoder = Decoder(shape, max_model_len, dtype)
    load_weights(folder, _destinations(folder, decoder), progress)
    decoder.pack()
    return BuiltModel(decoder, max_model_len, dtype, dtype)


def _refuse_other_pages(config: EngineConfig, dtype: torch.dtype) -> None:
    """Raise ConfigError if something is asked for that only the operations in C have."""
    own = str(dtype).removeprefix("torch.")
    if config.kv_cache_dtype not in ("auto", own):
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: on torch's operations keys and values are of the weights' "
            f"type, {own}: leave it out"
        )
    if config.head_quantization not in ("auto", "none"):
        raise ConfigError(f"--head-quantization {config.head_quantization} needs the operations in C: leave it out")
    if config.kernels == "compiled":
        raise ConfigError("--kernels compiled: only our own decoder runs on the operations in C: leave it out")
    if config.quantization != "none":
        raise ConfigError(f"--quantization {config.quantization}: only our own decoder can be quantized: leave it out")


@contextlib.contextmanager
def _adding(refusal: ModelError) -> Iterator[None]:
    """Let what transformers refuses inside the block say why our own decoder did not take it either."""
    try:
        yield
    except ModelError as error:
        raise type(error)(f"{error}. Our own decoder does not run it either: {refusal}") from error


def _through_transformers(
    folder: Path, raw: dict[str, Any], config: EngineConfig, progress: Callable[[int, int], None]
) -> BuiltModel:
    from engine.models import transformers_loading  # seconds to import, for the models that need it alone

    settings = transformers_loading.open_config(folder, raw)
    max_model_len = _max_model_len(config, transformers_loading.max_positions(settings), folder)
    dtype = resolve_dtype(config.dtype, raw, folder)
    _refuse_other_pages(config, dtype)
    model = transformers_loading.load(folder, settings, max_model_len, dtype, progress)
    return BuiltModel(model, max_model_len, dtype, dtype)


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
