"""The rotary embedding of a GGUF file as the rope fields of a config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import CheckpointError
from engine.models.gguf_metadata import Metadata, shortest

TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are numbers of the configuration."""

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def read_rope(metadata: Metadata, head_dim: int, may_be_partial: bool) -> dict[str, Any]:
    """Return what config.json says of rotary embedding: rope_theta, rope_scaling, partial_rotary_factor.

    Raises:
        UnsupportedModel: A scaling, or a rotation of a part of each head, that is not converted.
        CheckpointError: A tensor of factors is misshapen.
    """
    theta = metadata.number("rope.freq_base", 10000.0)
    config: dict[str, Any] = {"rope_theta": theta}
    num_rotated = metadata.value("rope.dimension_count", int, head_dim)
    is_partial = num_rotated != head_dim
    if num_rotated % 2 or num_rotated > head_dim or (is_partial and not may_be_partial):
        raise metadata.refusal(f"a rotation of {num_rotated} of {head_dim} dimensions (rope.dimension_count)")
    if is_partial:
        config["partial_rotary_factor"] = num_rotated / head_dim
    scaling = _rope_scaling(metadata, theta, num_rotated)
    return config if scaling is None else config | {"rope_scaling": scaling}


def _rope_scaling(metadata: Metadata, theta: float, num_rotated: int) -> dict[str, Any] | None:
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    kind = metadata.value("rope.scaling.type", str, "linear" if factor != 1.0 else "none")
    if metadata.has_tensor("rope_factors_long.weight") and kind in {"none", "longrope"}:
        return _longrope(metadata)
    if metadata.has_tensor("rope_freqs.weight"):
        if kind != "none":
            raise metadata.refusal(f"rope_freqs.weight beside rope.scaling.type {kind}")
        return _llama3(metadata, theta, num_rotated)
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor}
        case "yarn":
            original = metadata.value(
                "rope.scaling.original_context_length", int, metadata.value("context_length", int)
            )
            betas = {
                name: metadata.number(f"rope.scaling.yarn_{name}")
                for name in ("beta_fast", "beta_slow")
                if metadata.has(f"rope.scaling.yarn_{name}")
            }
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
    raise metadata.refusal(f"rope.scaling.type {kind}")


def _longrope(metadata: Metadata) -> dict[str, Any]:
    original = metadata.value("rope.scaling.original_context_length", int)
    scale = metadata.value("context_length", int) / original
    implied = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    asked = metadata.number("rope.scaling.attn_factor", implied)
    factors = {
        f"{name}_factor": [shortest(value) for value in metadata.gguf.vector(f"rope_factors_{name}.weight")]
        for name in ("short", "long")
    }
    scaling: dict[str, Any] = {"rope_type": "longrope", **factors, "original_max_position_embeddings": original}
    return scaling if math.isclose(asked, implied, rel_tol=1e-5) else scaling | {"attention_factor": asked}


def _llama3(metadata: Metadata, theta: float, num_rotated: int) -> dict[str, Any]:
    """Find the numbers of a llama3 scaling whose result the file holds.

    Of the four, all published models share two, and the third is a power of two.
    """
    stored = metadata.gguf.vector("rope_freqs.weight")
    if stored.shape != (num_rotated // 2,):
        raise CheckpointError(f"{metadata.gguf.path}: rope_freqs.weight must hold {num_rotated // 2} numbers")
    factor = shortest(float(stored.max()))
    for original in (_LLAMA3_ORIGINAL, *(2**exponent for exponent in range(5, 21))):
        if np.allclose(stored, _llama3_divisors(theta, num_rotated, factor, original), rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": original,
            }
    raise metadata.refusal("a rotary scaling (rope_freqs.weight) that is none of Llama 3's")


def _llama3_divisors(theta: float, num_rotated: int, factor: float, original: int) -> npt.NDArray[np.float64]:
    with np.errstate(all="ignore"):
        wavelengths = 2 * np.pi * theta ** (np.arange(0, num_rotated, 2) / num_rotated)
        share = np.clip((original / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
        divisors: npt.NDArray[np.float64] = 1 / ((1 - share) / factor + share)
    return divisors
