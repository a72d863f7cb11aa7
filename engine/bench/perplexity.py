"""Bench `perplexity`: how well the model foretells a text, beside the same weights as they are, in this process."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from engine.bench.report import Report
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.llm import LLM
from engine.sampling_params import SamplingParams

WINDOW = 1024
"""Tokens that are scored together, each from those before it."""


def perplexity(config: EngineConfig, text: Path | None, num_tokens: int) -> Report:
    """Score the first `num_tokens` tokens of `text`; with quantized weights also as they are without.

    Args:
        config: Of the engine.
        text: A file; None for the help texts that come with Python.
        num_tokens: At most so many.

    Raises:
        ConfigError: `text` cannot be read or is too short.
    """
    content = _read(text)
    name = "Python's own help" if text is None else str(text)
    found, scored = _score(config, content, num_tokens)
    report = Report("perplexity", {"text": name, "num_tokens": scored, "quantization": config.quantization})
    report.add("perplexity", found)
    if config.quantization != "none":
        plain = msgspec.structs.replace(config, quantization="none", head_quantization="auto", kv_cache_dtype="auto")
        before, _ = _score(plain, content, num_tokens)
        report.add("perplexity_without_quantization", before)
        report.add("over_it", 100 * (found / before - 1), "%")
    return report


def _read(text: Path | None) -> str:
    if text is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text} cannot be read as UTF-8: {error}") from error


def _score(config: EngineConfig, content: str, num_tokens: int) -> tuple[float, int]:
    """Return the perplexity and how many tokens were scored: all but the first of each window."""
    settings = msgspec.structs.asdict(config) | {"enable_prefix_caching": False}
    with LLM(**settings) as llm:
        window = min(WINDOW, llm.ready.max_model_len - 1)
        token_ids = llm.tokenizer.encode(content[: 16 * num_tokens])[:num_tokens]
        prompts = [part for i in range(0, len(token_ids), window) if len(part := token_ids[i : i + window]) > 1]
        if not prompts:
            raise ConfigError(f"the text has {len(token_ids)} tokens: at least 2 are needed")
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    scores = [output.prompt_logprobs for output in outputs]
    total = math.fsum(float(score.logprobs[:, 0].sum()) for score in scores if score is not None)
    count = sum(len(score) for score in scores if score is not None)
    return math.exp(-total / count), count
