"""Metronome: an LLM inference engine on Trio.

The public names resolve on first use (PEP 562), so that a process which never runs a model never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.client.async_llm import AsyncLLM
    from engine.client.input_processor import Conversation
    from engine.client.output_processor import CompletionOutput, RequestOutput
    from engine.client.session import Session
    from engine.client.stream import Stream
    from engine.config import EngineConfig
    from engine.errors import EngineDeadError, MetronomeError, UtilityError, UtilityTimeout
    from engine.launch import open_engine
    from engine.llm import LLM
    from engine.llm_engine import LLMEngine
    from engine.sampling.logits_processor import LogitsProcessor
    from engine.sampling_params import OutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "engine.llm",
    "LLMEngine": "engine.llm_engine",
    "AsyncLLM": "engine.client.async_llm",
    "CompletionOutput": "engine.client.output_processor",
    "Conversation": "engine.client.input_processor",
    "EngineConfig": "engine.config",
    "EngineDeadError": "engine.errors",
    "LogitsProcessor": "engine.sampling.logits_processor",
    "MetronomeError": "engine.errors",
    "OutputKind": "engine.sampling_params",
    "RequestOutput": "engine.client.output_processor",
    "SamplingParams": "engine.sampling_params",
    "Session": "engine.client.session",
    "Stream": "engine.client.stream",
    "StructuredOutputsParams": "engine.sampling_params",
    "UtilityError": "engine.errors",
    "UtilityTimeout": "engine.errors",
    "open_engine": "engine.launch",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Conversation",
    "EngineConfig",
    "EngineDeadError",
    "LLMEngine",
    "LogitsProcessor",
    "MetronomeError",
    "OutputKind",
    "RequestOutput",
    "SamplingParams",
    "Session",
    "Stream",
    "StructuredOutputsParams",
    "UtilityError",
    "UtilityTimeout",
    "open_engine",
]


def __getattr__(name: str) -> Any:
    """Import the public name's module on first use."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
