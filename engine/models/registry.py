"""Which architecture runs on which implementation; everything else is refused with the reason."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModel
from engine.models.decoder_config import DecoderConfig, DecoderTraits

DECODERS: dict[str, DecoderTraits] = {
    "LlamaForCausalLM": DecoderTraits(),
    "MistralForCausalLM": DecoderTraits(biases="none", windows="all"),
    "Qwen2ForCausalLM": DecoderTraits(biases="qkv", windows="upper"),
    "Qwen3ForCausalLM": DecoderTraits(qk_norm=True, windows="upper"),
}
"""Architecture, as config.json names it → traits of `models.decoder`."""


def choose(raw: dict[str, Any]) -> str:
    """Return what would run a model with this config.json, in words; no weights are needed.

    Raises:
        UnsupportedModel: Nothing would; says why.
        CheckpointError: A number in it is missing or makes no sense.
    """
    decoder_config(raw)
    return "the own decoder"


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
    code = "; it asks for code of its own (auto_map), which is never executed" if raw.get("auto_map") else ""
    raise UnsupportedModel(f"config.json names {named}; supported are: {', '.join(sorted(DECODERS))}{code}")
