"""Rotary position embedding: a table of cosines and sines, and the rotation of heads by it.

Dimension i of a head is paired with dimension i + head_dim / 2, as in Hugging Face checkpoints. The frequencies and
their scalings (none, linear, llama3) are those of transformers, to the bit in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import CheckpointError, UnsupportedModel

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the frequencies of longer contexts are stretched.

    Attributes:
        kind: "default" (as trained), "linear" (all by `factor`) or "llama3" (only the slow ones).
        factor: Divides the frequencies.
        low_freq_factor: Wavelengths above `original_max_positions` / this are divided by `factor`.
        high_freq_factor: Wavelengths below `original_max_positions` / this stay; between both is a smooth passage.
        original_max_positions: The context the model was first trained on, in tokens.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base frequency and scaling; read from config.json."""

    theta: float = DEFAULT_THETA
    scaling: RopeScaling = RopeScaling()

    @classmethod
    def of(cls, config: dict[str, Any]) -> RopeConfig:
        """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`, of a config.json.

        Raises:
            UnsupportedModel: A scaling, or a part of it, that is not built here, with its value.
            CheckpointError: A number that the scaling needs is missing or not a number.
        """
        parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(parameters, dict):
            raise CheckpointError(f"config.json: rope_parameters must be an object, got {parameters!r}")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise UnsupportedModel(f"rope scaling {kind!r} is not supported; only default, linear and llama3 are")
        partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial != 1.0:
            raise UnsupportedModel(f"rotary embedding of a part of each head (partial_rotary_factor {partial})")
        numbers = {"rope_theta": config.get("rope_theta", DEFAULT_THETA), **parameters}
        theta = _number(numbers, "rope_theta")
        if kind == "default":
            return cls(theta)
        if kind == "linear":
            return cls(theta, RopeScaling(kind, _number(numbers, "factor")))
        low, high = _number(numbers, "low_freq_factor"), _number(numbers, "high_freq_factor")
        original = int(_number(numbers, "original_max_position_embeddings"))
        if high <= low:
            raise CheckpointError(f"config.json: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
        return cls(theta, RopeScaling(kind, _number(numbers, "factor"), low, high, original))


def _number(parameters: dict[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"config.json: {key} must be a number above 0, got {value!r}")
    return float(value)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle a position adds to each pair of dimensions, float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / config.theta**exponents
    scaling = config.scaling
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _stretch_slow_frequencies(frequencies, scaling)
    return frequencies


def _stretch_slow_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    shortest_slow = scaling.original_max_positions / scaling.low_freq_factor
    longest_fast = scaling.original_max_positions / scaling.high_freq_factor
    share = scaling.original_max_positions / wavelengths - scaling.low_freq_factor
    share /= scaling.high_freq_factor - scaling.low_freq_factor
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    stretched = torch.where(wavelengths > shortest_slow, frequencies / scaling.factor, between)
    return torch.where(wavelengths < longest_fast, frequencies, stretched)


class RotaryEmbedding:
    """Cosines and sines of all positions, computed once; `[max_positions, 1, head_dim]` each."""

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype) -> None:
        """Fill the table for positions below `max_positions`, computed in float32 and kept in `dtype`."""
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(config, head_dim)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self._cos = torch.cat((cos, cos), dim=-1)[:, None]
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None]

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and signed sines of `positions [n]`, each `[n, 1, head_dim]`."""
        return self._cos[positions], self._sin[positions]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `heads [n, num_heads, head_dim]` by what `RotaryEmbedding.at` gave for the rows' positions."""
    return heads * cos + heads.roll(heads.shape[-1] // 2, dims=-1) * sin
