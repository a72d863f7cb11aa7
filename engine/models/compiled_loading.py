"""Whether the operations in C run a model here, in which forms, and its weights into them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from engine.attention.compiled import CompiledPages
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels.library import NoKernels, load
from engine.kernels.operations import Form, Team
from engine.kernels.weights import Int4
from engine.models.base import BuiltModel
from engine.models.checkpoint import EMBEDDING, HEAD, stored_tensors
from engine.models.compiled_decoder import CompiledDecoder, Forms, row_bytes, why_not
from engine.models.decoder_config import DecoderConfig
from engine.models.weights import WeightReader

logger = logging.getLogger(__name__)


def load_compiled(
    folder: Path,
    shape: DecoderConfig,
    config: EngineConfig,
    max_model_len: int,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> BuiltModel | None:
    """Return the decoder of `shape` on the operations in C; None, said in the log, where they cannot run it.

    Args:
        folder: In Hugging Face layout; the headers of its weight files fit `shape`.
        shape: Of the decoder.
        config: Of the engine.
        max_model_len: The longest context.
        dtype: Weights are read as, or float16, which the operations do not have: they take a float16 checkpoint for
            bfloat16 unless float16 was asked for.
        progress: Called with (done, in all) while weights come in.

    Raises:
        ConfigError: They cannot, and `config` allows nothing else.
        CheckpointError: A weight file is truncated or corrupt.
        UnsupportedModel: A rotary embedding cannot be had for so many positions.
    """
    if config.kernels == "torch":
        return None
    is_quantized = config.quantization != "none"
    dtype = _read_as(dtype, config)
    reason, library = why_not(shape, config.block_size, dtype, is_quantized=is_quantized), None
    try:
        library = load() if reason is None else None
    except NoKernels as error:
        reason = str(error)
    if library is None:
        if config.kernels == "compiled" or is_quantized:
            asked = "--kernels compiled" if config.kernels == "compiled" else f"--quantization {config.quantization}"
            raise ConfigError(f"{asked}: the operations in C cannot run this model here: {reason}")
        logger.warning("the model runs on torch's operations, several times slower than those in C: %s", reason)
        return None
    num_threads = torch.get_num_threads()
    try:
        team = Team(library, num_threads, round(config.spin * 1000))
    except (MemoryError, OSError) as error:
        raise ConfigError(
            f"no memory for the stacks of {num_threads} threads ({error}): lower --num-threads"
        ) from error
    kv_dtype = _kv_dtype(config, dtype)
    forms = _forms(config, dtype)
    int4 = _stored_int4(folder, forms)
    names = {tensor.name for tensor in stored_tensors(folder)}
    reader = WeightReader(folder, len(names), progress)

    def fill(tensors: Mapping[str, torch.Tensor]) -> None:
        if EMBEDDING in tensors and EMBEDDING not in names:  # one tensor is both, and may have either name
            tensors = {HEAD: tensors[EMBEDDING]}
        reader.fill(tensors)

    rows = config.max_num_batched_tokens
    model = CompiledDecoder(shape, dtype, fill, rows, max_model_len, team, forms, int4)
    torch.set_num_threads(1)  # a team of torch's would spin after each little operation, on cores that ours needs
    logger.info(
        "operations in C, layers %s, head %s, keys and values %s%s",
        forms.layers.name.lower(),
        forms.head.name.lower(),
        forms.pages.name.lower(),
        f"; {model.num_stored_int4} tensors in 4 bits as they are stored" if model.num_stored_int4 else "",
    )
    return BuiltModel(model, max_model_len, dtype, kv_dtype, CompiledPages, model.greatest)


def step_row_bytes(shape: DecoderConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the memory that a row of a step takes where the operations in C run `shape`; 0 where they cannot."""
    dtype = _read_as(dtype, config)
    reason = why_not(shape, config.block_size, dtype, is_quantized=config.quantization != "none")
    return 0 if reason is not None or config.kernels == "torch" else row_bytes(shape, _forms(config, dtype))


def _read_as(dtype: torch.dtype, config: EngineConfig) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float16 and config.dtype == "auto" else dtype


def _forms(config: EngineConfig, dtype: torch.dtype) -> Forms:
    pages = Form.of_pages(_kv_dtype(config, dtype))
    return Forms(Form.of(config.quantization, dtype), Form.of(_head(config), dtype), pages)


def _stored_int4(folder: Path, forms: Forms) -> dict[str, Callable[[], Int4]]:
    if Form.INT4 not in (forms.layers, forms.head):
        return {}
    from engine.models.gguf_blocks import stored_int4  # and the gguf package, for this form alone

    return stored_int4(folder)


def _head(config: EngineConfig) -> str:
    if config.head_quantization != "auto":
        return config.head_quantization
    return "none" if config.quantization == "none" else "int8"


def _kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    if config.kv_cache_dtype != "auto":
        found: torch.dtype = getattr(torch, config.kv_cache_dtype)
        return found
    if config.quantization != "none":
        return torch.int8
    return torch.float32 if dtype == torch.float32 else torch.bfloat16
