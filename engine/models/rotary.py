"""Rotary position embedding: a table of cosines and sines, and the rotation of heads by it.

Of the dimensions that are rotated, the first half is paired with the second, as in Hugging Face checkpoints; what
follows them in a head stays. The frequencies are those of transformers, to the bit in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.rope_scaling import UNSCALED, RopeScaling, number, read_scaling

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How heads are rotated; hashable, for layers that rotate alike share one table.

    Attributes:
        dim: Leading dimensions of a head that are rotated, an even number.
        theta: Base of the frequencies.
        scaling: How they are stretched.
    """

    dim: int
    theta: float = DEFAULT_THETA
    scaling: RopeScaling = UNSCALED

    @classmethod
    def of(
        cls, config: dict[str, Any], head_dim: int, parameters: Any = None, names: Mapping[str, str] | None = None
    ) -> RopeConfig:
        """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`, of a config.json.

        Where both are given, `rope_scaling` counts and nothing of `rope_parameters` does, as in transformers.

        Args:
            config: All of it; a `rope_theta` and `partial_rotary_factor` there count where `parameters` has none.
            head_dim: Dimensions of a head.
            parameters: To be read instead of the config's own `rope_parameters`.
            names: The kinds of scaling that the family knows, and which of those here each is; None for all.

        Raises:
            UnsupportedModel: A scaling, or a part of it, that is not built here, with its value.
            CheckpointError: A number that the scaling needs is missing or not a number.
        """
        if parameters is None:
            parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(parameters, dict):
            raise CheckpointError(f"config.json: rope_parameters must be an object, got {parameters!r}")
        for key, value in parameters.items():
            if isinstance(value, dict) or key in ("mrope_section", "full_attention", "sliding_attention"):
                raise UnsupportedModel(f"rope parameters with {key} {value!r} are not supported by this architecture")
        numbers = {"rope_theta": config.get("rope_theta", DEFAULT_THETA)} | parameters
        share = number(parameters, "partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
        dim = int(head_dim * share)
        if dim % 2 or not 0 < dim <= head_dim:
            raise CheckpointError(
                f"config.json: partial_rotary_factor {share:g} of {head_dim} dimensions is no even number"
            )
        theta = number(numbers, "rope_theta")
        if theta <= 1:  # its powers must grow, its logarithm divides
            raise CheckpointError(f"config.json: rope_theta must be above 1, got {theta:g}")
        return cls(dim, theta, read_scaling(parameters, config, dim, names or {}))


def inverse_frequencies(config: RopeConfig, max_model_len: int) -> torch.Tensor:
    """Return the angle a position adds to each pair of dimensions, float32 `[dim / 2]`."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.int64).float() / config.dim
    return config.scaling.frequencies(config.theta**exponents, config.theta, max_model_len)


class RotaryEmbedding:
    """Cosines and sines of all positions, computed once; `[max_positions, dim / 2]` each."""

    def __init__(self, config: RopeConfig, max_positions: int, dtype: torch.dtype) -> None:
        """Fill the table for positions below `max_positions`, computed in float32 and kept in `dtype`.

        Raises:
            UnsupportedModel: The scaling cannot be had for so many positions.
        """
        with torch.device("cpu"):  # on the meta device, where only shapes are asked for, arange imports a compiler
            positions = torch.arange(max_positions, dtype=torch.float32)
            angles = positions[:, None] * inverse_frequencies(config, max_positions)
            self.cos = (angles.cos() * config.scaling.amplitude).to(dtype)
            self.sin = (angles.sin() * config.scaling.amplitude).to(dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and signed sines of `positions [n]`, each `[n, 1, dim]`."""
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `heads [n, num_heads, head_dim]` by what `RotaryEmbedding.at` gave for the rows' positions."""
    dim = cos.shape[-1]
    if dim < heads.shape[-1]:
        rotated, kept = heads[..., :dim], heads[..., dim:]
        return torch.cat((rotate(rotated, cos, sin), kept), dim=-1)
    return heads * cos + heads.roll(dim // 2, dims=-1) * sin
