"""A small model of the kind that a configuration describes, drawn at random: the guard judges it without weights.

Whether an architecture runs rightly is a matter of its structure: kinds of layers and their order, windows, rotary
parameters, grouped heads, experts, what is computed from positions. All of that is kept, with every layer and the size
of a head; only widths shrink. Parameters are drawn around the values that the architecture starts with, norms and
biases too, for at those values faults can hide.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from engine.models.guard import are_equal, inspect, tolerance
from engine.models.transformers_backend import ATTENTION_NAME, Body

MAX_NUMBERS = 2 * 10**8
"""Of a likeness: where the structure alone needs more, none is made."""
_MAX_LAYERS = 256
_NUM_TOKENS = 16
_WIDTH = 128
_NUM_GROUPS = 2
_NUM_EXPERTS = 8
_EXPERTS = re.compile(r"^(moe_)?(num|n)(_local|_routed)?_experts$|^zero_expert_num$")
_AT_MOST = {
    re.compile(r"vocab_size"): 256,
    re.compile(r"intermediate_size|ffn|(^|_)ff$|^dff$|_inner$"): 32,
    re.compile(r"experts_per_tok$|^moe_top_?k$|^moe_k$|^top_k_experts$"): 2,
    re.compile(r"^(q|kv)_lora_rank$"): 32,
}
_OTHER_WIDTHS = ("attention_hidden_size", "embedding_size", "word_embed_proj_dim")
_OTHER_HEADS = ("encoder_attention_heads", "decoder_attention_heads")
"""Those of the model or, where they differ from it, part of the structure."""
_MATRIX_SPREAD, _VECTOR_SPREAD = 0.25, 0.3
"""Of what is drawn: of a matrix times its width's root, and of norms and biases."""


class NoLikeness(Exception):
    """No small model can be made of a configuration, or what it does tells nothing."""


def judge(config: PretrainedConfig, max_positions: int, progress: Callable[[int, int], None]) -> None:
    """Put a likeness before the guard; takes seconds where there are many layers.

    Raises:
        NoLikeness: There is none to judge by.
        UnsupportedModel: Naming the check that failed.
    """
    with silence():
        progress(0, 2)
        module = draw(config)
        progress(1, 2)
        module.set_attn_implementation(ATTENTION_NAME)
        with _WideSoftmax() if module.dtype == torch.float64 else contextlib.nullcontext():
            inspect(Body(module), max_positions)
        progress(2, 2)


def draw(config: PretrainedConfig) -> PreTrainedModel:
    """Return a small random model of the kind of `config`, under transformers' own eager attention.

    It is of float32; of float64 where it magnifies what rounding does: what is magnified then is next to nothing.

    Raises:
        NoLikeness: The sizes of that kind depend on each other in ways not known here, it is not small, it does not run
            even by itself, or it magnifies what rounding does.
    """
    loader: Any = transformers.AutoModelForCausalLM
    with _no_likeness(), torch.random.fork_rng(devices=[]), torch.inference_mode():
        small = _shrunk(config)
        num_layers = small.get_text_config(decoder=True).num_hidden_layers
        if num_layers > _MAX_LAYERS:
            raise NoLikeness(f"a model of {num_layers} layers is not small")
        with torch.device("meta"):
            imagined = loader.from_config(copy.deepcopy(small), attn_implementation="eager")
        num_numbers = sum(held.numel() for held in (*imagined.parameters(), *imagined.buffers()))
        if num_numbers > MAX_NUMBERS:
            raise NoLikeness(f"a small model of its kind has {num_numbers} numbers")
        for dtype in (torch.float32, torch.float64):
            module = _drawn(small, dtype)
            if not _magnifies_rounding(module, num_layers):
                return module
        raise NoLikeness("a small model of its kind magnifies what rounding does")


def _drawn(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    loader: Any = transformers.AutoModelForCausalLM
    module: PreTrainedModel = loader.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=dtype).eval()
    if dtype == torch.float64:
        module.set_experts_implementation("eager")  # the library's grouped products have no such type
    for parameter in module.parameters():
        spread = _MATRIX_SPREAD * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else _VECTOR_SPREAD
        parameter.add_(torch.randn_like(parameter), alpha=spread)
    return module


class _WideSoftmax(TorchFunctionMode):
    """Softmax in float64 where float32 is asked for: its sums would round by the number of keys."""

    def __torch_function__(
        self, function: Any, _types: Any, arguments: Sequence[Any] = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if keywords.get("dtype") is torch.float32 and function.__name__ == "softmax":
            keywords = keywords | {"dtype": torch.float64}
        return function(*arguments, **keywords)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep transformers from warning of a model that nobody has."""
    logging: Any = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _no_likeness() -> Iterator[None]:
    """Whatever transformers raises inside the block says that there is no likeness; a door for its errors."""
    try:
        yield
    except NoLikeness:
        raise
    except Exception as error:
        raise NoLikeness(f"a small model of its kind cannot be made: {type(error).__name__}: {error}") from error


def _magnifies_rounding(module: PreTrainedModel, num_layers: int) -> bool:
    """Whether a change of the last bits moves the logits by as much as a fault would."""
    embedding: Any = module.get_input_embeddings()
    token_ids = torch.arange(_NUM_TOKENS)[None]
    logits = module(input_ids=token_ids, use_cache=False).logits[0]
    kept = embedding.weight.clone()
    embedding.weight.mul_(1 + torch.randn_like(kept) * torch.finfo(kept.dtype).eps)
    moved = module(input_ids=token_ids, use_cache=False).logits[0]
    embedding.weight.copy_(kept)
    return not are_equal(moved, logits, tolerance(module.dtype, num_layers))


def _shrunk(config: PretrainedConfig) -> PretrainedConfig:
    small = copy.deepcopy(config)
    for part in (small, *(getattr(small, name, None) for name in small.sub_configs)):
        if isinstance(part, PretrainedConfig):
            _shrink_sizes(part)
            _shrink_heads(part)
    return small


def _shrink_sizes(config: PretrainedConfig) -> None:
    num_experts = max(_NUM_EXPERTS, 2 * (_count(config, "n_group") or 0))
    at_most = {**_AT_MOST, _EXPERTS: num_experts}
    for name, value in config.to_dict().items():
        limit = next((limit for pattern, limit in at_most.items() if pattern.search(name)), None)
        if limit is not None and type(value) is int:
            setattr(config, name, min(value, limit))
        elif limit is not None and isinstance(value, list):  # of each layer
            setattr(config, name, [min(size, limit) for size in value])
    vocab_size = _count(config, "vocab_size")
    for name, value in config.to_dict().items():
        if vocab_size and name.endswith("_token_id") and type(value) is int:
            setattr(config, name, min(value, vocab_size - 1))


def _shrink_heads(config: PretrainedConfig) -> None:
    """Keep the size of a head and the kind of grouping: all heads alone, some together, or all."""
    width, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    if width is None:
        return
    narrow = min(width, _WIDTH)
    if num_heads is not None:
        num_groups = _count(config, "num_key_value_heads")
        head_dim = _count(config, "head_dim") or width // num_heads
        few_groups = min(num_groups or num_heads, _NUM_GROUPS)
        few_heads = few_groups * min(num_heads // (num_groups or num_heads), 2)
        narrow = min(width, few_heads * head_dim if width == num_heads * head_dim else 2 * head_dim)
        _replace(config, ("num_attention_heads", *_OTHER_HEADS), num_heads, few_heads)
        if num_groups is not None:
            config.num_key_value_heads = few_groups
    _replace(config, ("hidden_size", *_OTHER_WIDTHS), width, narrow)


def _replace(config: PretrainedConfig, names: tuple[str, ...], size: int, small: int) -> None:
    for name in names:
        if _count(config, name) == size:
            setattr(config, name, small)


def _count(config: PretrainedConfig, name: str) -> int | None:
    """Return a whole number above 0 by its standard name; None where there is none, or each layer has its own."""
    value = vars(config).get(config.attribute_map.get(name, name))
    return value if type(value) is int and value > 0 else None
