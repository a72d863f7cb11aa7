"""The verb `generate`: one prompt in, its completions out as they come; a signal ends them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from engine.client.async_llm import AsyncLLM
from engine.client.input_processor import PromptInput
from engine.client.output_processor import CompletionOutput, Logprobs
from engine.client.tokenizer import Tokenizer
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models import DEFAULT
from engine.program import EXIT_DEAD, EXIT_INTERRUPTED, EXIT_OK, until_stopped, with_engine
from engine.sampling_params import SamplingParams
from engine.terminal import TextWriter, read_all

logger = logging.getLogger("engine")

STDIN = "-"


def model_and_prompt(words: Sequence[str], file: Path | None, default_model: str = DEFAULT) -> tuple[str, str]:
    """Tell what the words of `[MODEL] (PROMPT | -)`, or of `[MODEL]` beside --file, mean; `-` stays to be read.

    Raises:
        ConfigError: There is no prompt, or more than one, or the file cannot be read.
    """
    num_models = len(words) if file is not None else len(words) - 1
    if not 0 <= num_models <= 1:
        what = "no PROMPT" if num_models < 0 else f"{len(words)} words beside flags"
        raise ConfigError(f"{what}: expected [MODEL] and a PROMPT in quotes, `-` for standard input, or --file FILE")
    model = words[0] if num_models else default_model
    return model, words[-1] if file is None else _text(_read(file), f"--file {file}")


async def generate_until(
    config: EngineConfig, prompt: str, params: SamplingParams, is_chat: bool, stop: trio.Event
) -> int:
    """Print the completions of `prompt`; `stop` aborts them. Returns the exit code.

    One completion is printed as it comes; several, and what has logprobs, each when all have ended.
    """
    if prompt == STDIN:
        logger.info("reading the prompt from standard input")
        read = b""

        async def read_prompt() -> None:
            nonlocal read
            read = await read_all(sys.stdin.fileno())

        await until_stopped(stop, read_prompt)
        prompt = _text(read, "standard input")
    exit_code = EXIT_INTERRUPTED

    async def print_completions(llm: AsyncLLM) -> None:
        async def run() -> None:
            nonlocal exit_code
            asked: PromptInput = [{"role": "user", "content": prompt}] if is_chat else prompt
            failed = await _print(llm, asked, params)
            exit_code = EXIT_DEAD if failed else EXIT_OK

        await until_stopped(stop, run)

    if not stop.is_set():
        await with_engine(config, stop, print_completions)
    return exit_code


async def _print(llm: AsyncLLM, prompt: PromptInput, params: SamplingParams) -> bool:
    """Print and return whether a completion failed."""
    out = TextWriter(sys.stdout.fileno())
    async with llm.generate(prompt, params) as stream:
        if params.n > 1 or params.logprobs is not None or params.prompt_logprobs is not None:
            collected = await stream.collect()
            outputs = collected.outputs
            if collected.prompt_logprobs is not None:
                await out.send(f"[prompt]\n{_table(collected.prompt_logprobs, llm.tokenizer)}")
            for output in outputs:
                await out.send(f"[{output.index}: {output.finish_reason}]\n{output.text}\n")
                if output.logprobs is not None:
                    await out.send(_table(output.logprobs, llm.tokenizer))
            failures = [_has_failed(output) for output in outputs]
            return any(failures)
        async for delta in stream:
            await out.send(delta.text)
        await out.send("\n")
        return _has_failed(delta)


def _table(logprobs: Logprobs, tokenizer: Tokenizer) -> str:
    """Return a line a token: its logprob, its rank, itself, then the likeliest in its place, all separated by tabs."""

    def shown(token_id: int, logprob: float) -> str:
        return f"{logprob:.4f} {tokenizer.decode([token_id], skip_special_tokens=False)!r}"

    lines = []
    for ids, values, rank in zip(logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.ranks, strict=True):
        chosen, *top = [shown(token_id, value) for token_id, value in zip(ids, values, strict=True)]
        lines.append("\t".join([chosen, f"rank {rank}", *top]) + "\n")
    return "".join(lines)


def _has_failed(output: CompletionOutput) -> bool:
    if output.error is not None:
        print(f"metronome: completion {output.index} failed: {output.error}", file=sys.stderr)
    return output.error is not None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--file {file} cannot be read: {error.strerror}") from error


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text: {error}") from error
