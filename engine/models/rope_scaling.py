"""How rotary frequencies are stretched for contexts longer than those first trained on; one class a kind.

Everything is computed in float32 in the order of operations of transformers, so that the result is the same to the
bit. The methods: linear and dynamic NTK interpolation; llama 3.1's; YaRN (arXiv:2309.00071); LongRoPE
(arXiv:2402.13753).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.errors import CheckpointError, UnsupportedModel


class RopeScaling(Protocol):
    """One way to get frequencies from the periods a model was trained with. Hashable."""

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines."""
        ...

    def frequencies(self, periods: torch.Tensor, theta: float, max_model_len: int) -> torch.Tensor:
        """Return the angle a position adds to each pair of dimensions.

        Args:
            periods: `theta ** (2 i / dim)` for each pair i, float32 `[dim / 2]`.
            theta: The base of the periods.
            max_model_len: No position reaches it.

        Raises:
            UnsupportedModel: A context of `max_model_len` would need frequencies that change as a request grows.
        """
        ...


@dataclass(frozen=True, slots=True)
class Unscaled:
    """As trained."""

    amplitude: float = 1.0

    def frequencies(self, periods: torch.Tensor, theta: float, max_model_len: int) -> torch.Tensor:
        """See `RopeScaling.frequencies`."""
        return 1.0 / periods


UNSCALED = Unscaled()


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    factor: float
    amplitude: float = 1.0

    def frequencies(self, periods: torch.Tensor, theta: float, max_model_len: int) -> torch.Tensor:
        """See `RopeScaling.frequencies`."""
        return (1.0 / periods) / self.factor


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """As trained up to `max_positions`; beyond it every key would have to be rotated anew with each token."""

    max_positions: int
    amplitude: float = 1.0

    def frequencies(self, periods: torch.Tensor, theta: float, max_model_len: int) -> torch.Tensor:
        """See `RopeScaling.frequencies`."""
        if max_model_len > self.max_positions:
            raise UnsupportedModel(
                f"rope scaling 'dynamic' changes the rotation of all keys beyond {self.max_positions} positions "
                f"(max_position_embeddings), which is not supported: lower the context of {max_model_len} to it"
            )
        return 1.0 / periods


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Only the slow frequencies divided by `factor`.

    Attributes:
        factor: Divides the frequencies.
        low_freq_factor: Wavelengths above `original_max_positions` / this are divided by `factor`.
        high_freq_factor: Wavelengths below `original_max_positions` / this stay; between both is a smooth passage.
        original_max_positions: The context the model was first trained on, in tokens.
        amplitude: Factor of the cosines and sines.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    amplitude: float = 1.0

    def frequencies(self, periods: torch.Tensor, theta: float, max_model_len: int) -> torch.Tensor:
        """See `RopeScaling.frequencies`."""
        trained = 1.0 / periods
        wavelengths = 2 * math.pi / trained
        shortest_slow = self.original_max_positions / self.low_freq_factor
        longest_fast = self.original_max_positions / self.high_freq_factor
        share = self.original_max_positions / wavelengths - self.low_freq_factor
        share /= self.high_freq_factor - self.low_freq_factor
        between = (1 - share) * trained / self.factor + share * trained
        stretched = torch.where(wavelengths > shortest_slow, trained / self.factor, between)
        return torch.where(wavelengths < longest_fast, trained, stretched)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Pairs that turn often within the original context stay, those that turn little are divided by `factor`.

    Attributes:
        factor: Divides the frequencies.
        beta_fast: Turns within the original context from which on a pair stays.
        beta_slow: Turns up to which it is divided; between both is a linear passage over the pairs.
        original_max_positions: The context the model was first trained on, in tokens.
        truncates: Whether the ends of the passage are rounded outwards to whole pairs.
        amplitude: Factor of the cosines and sines.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    truncates: bool
    amplitude: float

    def frequencies(self, periods: torch.Tensor, theta: float, max_model_len: int) -> torch.Tensor:
        """See `RopeScaling.frequencies`."""
        dim = 2 * len(periods)
        first, last = self._pair_of(self.beta_fast, dim, theta), self._pair_of(self.beta_slow, dim, theta)
        if self.truncates:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        if first == last:
            last += 0.001  # no division by zero
        ramp = torch.clamp((torch.arange(len(periods), dtype=torch.float32) - first) / (last - first), 0, 1)
        kept = 1 - ramp
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _pair_of(self, num_turns: float, dim: int, theta: float) -> float:
        return dim * math.log(self.original_max_positions / (num_turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each pair's frequency divided by a factor of its own: one list for short contexts, one for long ones.

    transformers picks the list by the length of the call, so a request's earlier keys would change while it grows.
    Here the context decides, once: the long list where `max_model_len` is beyond the original context.

    Attributes:
        short_factor: One number a pair.
        long_factor: One number a pair.
        original_max_positions: The context the model was first trained on, in tokens.
        amplitude: Factor of the cosines and sines.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    amplitude: float

    def frequencies(self, periods: torch.Tensor, theta: float, max_model_len: int) -> torch.Tensor:
        """See `RopeScaling.frequencies`."""
        is_long = max_model_len > self.original_max_positions
        factors = torch.tensor(self.long_factor if is_long else self.short_factor, dtype=torch.float32)
        return 1.0 / (factors * periods)


def read_scaling(parameters: dict[str, Any], config: dict[str, Any], dim: int, names: Mapping[str, str]) -> RopeScaling:
    """Read the scaling from a config.json's rope parameters.

    Args:
        parameters: What `rope_parameters` or `rope_scaling` holds.
        config: All of config.json.
        dim: Dimensions of a head that are rotated.
        names: The kinds of scaling that the family knows, and which of those here each is; if empty, all.

    Raises:
        UnsupportedModel: The kind of scaling is not built here.
        CheckpointError: A number that the scaling needs is missing or makes no sense.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str):
        raise CheckpointError(f"config.json: rope_type must be a name, got {kind!r}")
    names = names or dict(zip(_READERS, _READERS, strict=True))
    if kind not in names:
        raise UnsupportedModel(f"rope scaling {kind!r} is not supported; only {', '.join(names)} are")
    return _READERS[names[kind]](parameters, config, dim)


def number(values: dict[str, Any], key: str, default: float | None = None) -> float:
    """Return `values[key]`, which must be a finite number above 0; `default` where it is missing or null.

    Raises:
        CheckpointError: It is not, or it is missing and there is no default.
    """
    value = values.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json: {key} must be a finite number above 0, got {value!r}")
    return float(value)


def _read_llama3(parameters: dict[str, Any], config: dict[str, Any], dim: int) -> RopeScaling:
    low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
    if high <= low:
        raise CheckpointError(f"config.json: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
    return Llama3Scaling(number(parameters, "factor"), low, high, _original_max_positions(parameters, config))


def _read_yarn(parameters: dict[str, Any], config: dict[str, Any], dim: int) -> RopeScaling:
    factor = number(parameters, "factor")
    amplitude = _yarn_amplitude(factor, 1.0)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        amplitude = _yarn_amplitude(factor, number(parameters, "mscale"))
        amplitude /= _yarn_amplitude(factor, number(parameters, "mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        original_max_positions=_original_max_positions(parameters, config),
        truncates=bool(parameters.get("truncate", True)),
        amplitude=number(parameters, "attention_factor", amplitude),
    )


def _yarn_amplitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _read_longrope(parameters: dict[str, Any], config: dict[str, Any], dim: int) -> RopeScaling:
    original = _original_max_positions(parameters, config)
    factor = number(parameters, "factor", number(config, "max_position_embeddings") / original)
    amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short_factor=_factors(parameters, "short_factor", dim // 2),
        long_factor=_factors(parameters, "long_factor", dim // 2),
        original_max_positions=original,
        amplitude=number(parameters, "attention_factor", amplitude),
    )


def _factors(parameters: dict[str, Any], key: str, num_pairs: int) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list) or len(values) != num_pairs:
        raise CheckpointError(f"config.json: {key} must be a list of {num_pairs} numbers, got {values!r}")
    return tuple(number({key: value}, key) for value in values)


def _original_max_positions(parameters: dict[str, Any], config: dict[str, Any]) -> int:
    """Return the one beside the rope parameters, else among them, else the whole context, as transformers does."""
    key = "original_max_position_embeddings"
    given = config if config.get(key) is not None else parameters
    size = number(given, key, number(config, "max_position_embeddings") if given is parameters else None)
    if size < 2:  # its logarithm divides
        raise CheckpointError(f"config.json: {key} must be at least 2, got {size:g}")
    return int(size)


_READERS: dict[str, Callable[[dict[str, Any], dict[str, Any], int], RopeScaling]] = {
    "default": lambda parameters, config, dim: UNSCALED,
    "linear": lambda parameters, config, dim: LinearScaling(number(parameters, "factor")),
    "dynamic": lambda parameters, config, dim: DynamicScaling(int(number(config, "max_position_embeddings"))),
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
}
