"""From a model folder to a checked `TransformersModel`: configuration, weights, guard. The one door to transformers.

Only classes that transformers itself ships are run: code in a model folder never is. Weights come in through
transformers' own loader, for it alone knows how an architecture's tensors are renamed, fused and split; it maps the
files or converts tensor by tensor, and holds nothing twice. What it would fill at random is refused here.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.checkpoint import MASKS, MAX_LAYERS, NEVER_READ, stored_tensors, weight_files
from engine.models.guard import inspect, strange_layer_types
from engine.models.likeness import NoLikeness, judge, silence
from engine.models.transformers_backend import ATTENTION_NAME, Body, TransformersModel
from engine.models.weights import name_faults, refuse_stored_type

logger = logging.getLogger(__name__)
transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # its loading threads are waited for by nobody

_ARCHITECTURES = frozenset(name.casefold() for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
"""The causal language models that this transformers has; checkpoints spell PhiMoE and MPT otherwise than it does."""
_POSITIVE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
_MAX_UNSTORED = 2
"""The most numbers that a model has for each that is stored: some compute tables, which are parameters to them."""
_UNNAMED_POSITIONS = 128
"""Of a model that names no longest context: any number is as good."""


def open_config(folder: Path, raw: dict[str, Any]) -> PretrainedConfig:
    """Return transformers' reading of a config.json whose content is `raw`.

    Raises:
        UnsupportedModel: transformers has no such causal language model, or it is quantized.
        CheckpointError: transformers does not accept the numbers in it.
    """
    named = raw.get("architectures") or []
    spelled_alike = {str(name).casefold() for name in named}
    if not _ARCHITECTURES & spelled_alike:
        remote = " (its code is in the folder, and code from a model folder is never run)" if "auto_map" in raw else ""
        if not named:
            raise UnsupportedModel(
                f"config.json names no architecture: name the model's class under architectures{remote}"
            )
        raise UnsupportedModel(
            f"transformers {transformers.__version__} has no causal language model {', '.join(map(str, named))}{remote}"
        )
    if raw.get("quantization_config"):
        raise UnsupportedModel(f"quantized checkpoints are not supported: {raw['quantization_config']}")
    try:
        config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        runs = architecture_of(config)
    except Exception as error:
        raise CheckpointError(f"config.json is not accepted by transformers: {_said(error)}") from error
    text = config.get_text_config(decoder=True)
    for name in _POSITIVE:
        size = vars(text).get(text.attribute_map.get(name, name))
        if isinstance(size, int) and size < 1:
            raise CheckpointError(f"config.json: {name} must be above 0, got {size}")
    meant = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(raw["model_type"], runs)  # a mistral with layer_types is a ministral
    if not {runs.casefold(), meant.casefold()} & spelled_alike:
        raise UnsupportedModel(f"config.json names {named}, but its model_type is one of {runs}")
    return config


def architecture_of(config: PretrainedConfig) -> str:
    """Return the class of transformers that runs `config`."""
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return str(model_class.__name__)


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the longest prompt plus output that `config` names, None where it names none."""
    size = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return size if isinstance(size, int) and size > 0 else None


def foretell(config: PretrainedConfig, progress: Callable[[int, int], None]) -> str:
    """Return what will run a model of this configuration, in words; its weights need not be there.

    Raises:
        UnsupportedModel: Nothing will: the guard refuses all models of its kind, naming the check that failed.
        CheckpointError: transformers cannot make the model.
    """
    refuse_strange_layers(config)
    _imagined(config)
    try:
        judge(config, max_positions(config) or _UNNAMED_POSITIONS, progress)
    except NoLikeness as error:
        return f"transformers' model, if it passes the guard when it is loaded ({_said(error)}),"
    return "transformers' model, which passes the guard,"


def refuse_strange_layers(config: PretrainedConfig) -> None:
    """Raise UnsupportedModel where config.json names kinds of layers that are not run."""
    kinds = strange_layer_types(config.get_text_config(decoder=True))
    if kinds:
        raise UnsupportedModel(
            f"{architecture_of(config)} does not run rightly through transformers {transformers.__version__}: "
            f"check 'layer types' failed: {', '.join(kinds)} is neither full nor sliding attention"
        )


def check(folder: Path, config: PretrainedConfig) -> None:
    """Refuse what needs no weights to be refused: strange layers, and sizes beyond all that the weight files hold.

    What transformers would fill at random is allocated before it is reported, so the sizes are compared first.

    Raises:
        UnsupportedModel: config.json names kinds of layers that are not run, or a tensor is of a type that is not.
        CheckpointError: transformers cannot make the model, or a weight file is missing, corrupt or far too small.
    """
    refuse_strange_layers(config)
    num_stored = num_tensors = 0
    for tensor in stored_tensors(folder):
        if not MASKS.search(tensor.name):
            refuse_stored_type(folder, tensor)
        num_stored += math.prod(tensor.shape)
        num_tensors += 1
    num_layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if isinstance(num_layers, int) and num_layers > min(num_tensors, MAX_LAYERS):
        raise CheckpointError(
            f"config.json: {num_layers} layers (at most {MAX_LAYERS}), but the weight files of {folder} hold "
            f"{num_tensors} tensors"
        )
    num_needed = sum(parameter.numel() for parameter in _imagined(config).parameters())
    if num_needed > _MAX_UNSTORED * num_stored:
        raise CheckpointError(
            f"config.json describes {num_needed} numbers, the weight files of {folder} hold {num_stored}"
        )


def check_tensors(folder: Path, config: PretrainedConfig) -> None:
    """Hold the tensors that the weight files name against those of the model; nothing is read or allocated.

    Raises: as `load` does of tensors.
    """
    with silence():
        _load_module(folder, config, torch.float32, device="meta")


def _imagined(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model without memory for its weights."""
    loader: Any = transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            module: PreTrainedModel = loader.from_config(copy.deepcopy(config))
    except Exception as error:
        raise CheckpointError(f"config.json makes no model of transformers: {_said(error)}") from error
    return module


def load(
    folder: Path, config: PretrainedConfig, max_model_len: int, dtype: torch.dtype, progress: Callable[[int, int], None]
) -> TransformersModel:
    """Load and inspect; the guard's forwards take as long as a prompt of about 100 tokens.

    Raises:
        UnsupportedModel: The guard refuses it, naming the check that failed.
        CheckpointError: A weight file or tensor is missing, unknown, misshapen or corrupt.
    """
    num_files = len(weight_files(folder))
    progress(0, num_files)
    check(folder, config)
    body = Body(_load_module(folder, config, dtype))
    shape = inspect(body, max_model_len)
    progress(num_files, num_files)
    logger.info(
        "%s runs through transformers %s: its matrix products are the library's, so the last bits of a request's "
        "logits may depend on its neighbours in a step; the tokens are right",
        type(body.module).__name__,
        transformers.__version__,
    )
    return TransformersModel(body, shape)


def _load_module(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: str | None = None
) -> PreTrainedModel:
    loader: Any = transformers.AutoModelForCausalLM
    try:
        module, report = loader.from_pretrained(
            folder,
            config=copy.deepcopy(config),
            dtype=dtype,
            device_map=device,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that they are reported, with the rest
            output_loading_info=True,
        )
    except (KeyError, ValueError) as error:  # what it raises for a class that knows its own attention only
        if ATTENTION_NAME not in str(error):
            raise CheckpointError(f"{folder} cannot be loaded by transformers: {_said(error)}") from error
        raise UnsupportedModel(
            f"{architecture_of(config)} does not run rightly through transformers {transformers.__version__}: "
            f"check 'call a layer' failed: it knows no attention function but its own"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be loaded by transformers: {_said(error)}") from error
    name_faults(
        folder,
        missing=sorted(report["missing_keys"]),
        unknown=sorted(key for key in report["unexpected_keys"] if not NEVER_READ.search(key)),
        misshapen=[f"{key} is {list(found)}, must be {list(asked)}" for key, found, asked in report["mismatched_keys"]],
    )
    return module.eval()  # type: ignore[no-any-return]


def _said(error: Exception) -> str:
    """Return the error's text, and its type too where the text says nothing."""
    return repr(error) if str(error) in ("", "None") else str(error)
