"""The verb `chat`: a conversation in a terminal, or one line a turn from a pipe.

Signals follow what is being done: SIGINT aborts the answer under way; at the prompt the first one warns and the second
ends the program. SIGTERM ends it in order at any time. The terminal is waited for like a socket (terminal.py).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import msgspec
import trio

from engine.client.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.errors import PromptTooLong, RequestError
from engine.outputs import FinishReason
from engine.program import EXIT_INTERRUPTED, EXIT_OK, then, until_stopped, with_engine
from engine.sampling_params import SamplingParams
from engine.signals import run_until_stopped
from engine.terminal import LineReader, TextWriter

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"
CONTEXT_SHARE_FOR_ANSWER = 4
"""A quarter of the context, or --max-tokens where that is less, is kept free for the answer."""


def run_chat(config: EngineConfig, params: SamplingParams, system: str | None) -> int:
    """Run a conversation to its end; return the exit code."""
    program = _ChatProgram(config, params, system)
    return trio.run(run_until_stopped, program.run, program.takes)


class Conversation:
    """The messages so far, kept within the model's context."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams, system: str | None) -> None:
        """Start with the system prompt alone, if there is one."""
        self._llm = llm
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, Any]] = []
        self._context = llm.ready.max_model_len
        reserve = self._context // CONTEXT_SHARE_FOR_ANSWER
        self._reserve = max(1, reserve if params.max_tokens is None else min(reserve, params.max_tokens))

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self._turns.clear()

    async def ask(self, text: str) -> tuple[list[int], SamplingParams, str]:
        """Add the user's message; return the prompt, its parameters, and what is to be said of dropped messages.

        To be followed by `answer`, whatever happens.

        Raises:
            RequestError: The message alone is too long, or the template refuses it.
        """
        self._turns.append({"role": "user", "content": text})
        turns = list(self._turns)
        num_tokens = len(token_ids := await self._encode(turns))
        while (room := self._context - len(token_ids)) < self._reserve:
            if len(turns) == 1:
                raise PromptTooLong(
                    f"the message has {len(token_ids)} tokens and the context holds {self._context}, of which "
                    f"{self._reserve} are kept for the answer: shorten it"
                )
            del turns[:2]
            token_ids = await self._encode(turns)
        said = ""
        if len(turns) < len(self._turns):
            said = (
                f"the conversation has {num_tokens} tokens and the context holds {self._context}, of which "
                f"{self._reserve} are kept for the answer: forgot the {len(self._turns) - len(turns)} oldest messages, "
                f"{len(token_ids)} tokens are left"
            )
        self._turns = turns
        max_tokens = room if self._params.max_tokens is None else min(room, self._params.max_tokens)
        min_tokens = min(self._params.min_tokens, max_tokens)
        return token_ids, msgspec.structs.replace(self._params, max_tokens=max_tokens, min_tokens=min_tokens), said

    def answer(self, text: str) -> None:
        """Add the answer, or what there was of it when it was stopped; without any, the question is taken back."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    async def _encode(self, turns: list[dict[str, Any]]) -> list[int]:
        return await trio.to_thread.run_sync(self._llm.tokenizer.encode_chat, self._system + turns)


class _ChatProgram:
    def __init__(self, config: EngineConfig, params: SamplingParams, system: str | None) -> None:
        self._config, self._params, self._system = config, params, system
        self._is_terminal = os.isatty(sys.stdin.fileno())
        self._is_open = False
        self._is_warned = False
        self._answering: trio.CancelScope | None = None

    def takes(self, number: int) -> bool:
        """Deal with a SIGINT that is not to end the program."""
        if number != signal.SIGINT or not (self._is_open and self._is_terminal):
            return False
        if self._answering is not None:
            self._answering.cancel()
            return True
        is_first, self._is_warned = not self._is_warned, True
        if is_first:
            self._say("\n(Ctrl-C again or Ctrl-D to leave)")
            self._prompt()
        return is_first

    async def run(self, stop: trio.Event) -> int:
        await with_engine(self._config, stop, lambda llm: self._converse_until(llm, stop))
        is_interrupted = stop.is_set() and not (self._is_open and self._is_terminal)
        return EXIT_INTERRUPTED if is_interrupted else EXIT_OK

    async def _converse_until(self, llm: AsyncLLM, stop: trio.Event) -> None:
        self._is_open = True
        async with trio.open_nursery() as watchers:
            watchers.start_soon(then, llm.wait_ended, watchers.cancel_scope.cancel)
            await until_stopped(stop, lambda: self._converse(llm))
            watchers.cancel_scope.cancel()
        if llm.death is not None:
            raise llm.death

    async def _converse(self, llm: AsyncLLM) -> None:
        lines = LineReader(sys.stdin.fileno())
        conversation = Conversation(llm, self._params, self._system)
        if self._is_terminal:
            self._say(f"{llm.model_name}, context {llm.ready.max_model_len} tokens. {HELP}.")
        while True:
            self._prompt()
            line = await lines.receive()
            self._is_warned = False
            if line is None:
                if self._is_terminal:
                    self._say("")
                return
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/reset":
                    conversation.reset()
                case "/help":
                    self._say(HELP)
                case command if command.startswith("/"):
                    self._say(f"unknown command {command.split()[0]}: {HELP}")
                case _:
                    await self._answer(llm, conversation, line)

    async def _answer(self, llm: AsyncLLM, conversation: Conversation, line: str) -> None:
        """Print the answer as it comes; a refusal is said and forgotten."""
        out = TextWriter(sys.stdout.fileno())
        text, end = "", ""
        try:
            with trio.CancelScope() as self._answering:
                token_ids, params, said = await conversation.ask(line)
                if said:
                    self._say(f"({said})")
                async with llm.generate(token_ids, params) as stream:
                    async for delta in stream:
                        text += delta.text
                        await out.send(delta.text)
                        if delta.error is not None:
                            end = f"(failed: {delta.error})"
                        elif delta.finish_reason is FinishReason.LENGTH:
                            end = f"(cut after {stream.usage.completion_tokens} tokens)"
        except RequestError as error:
            conversation.answer("")
            self._say(f"refused: {error}")
            return
        finally:
            was_stopped, self._answering = self._answering is not None and self._answering.cancelled_caught, None
        await out.send("\n")
        conversation.answer(text)
        if was_stopped:
            end = "(stopped)"
        if end:
            self._say(end)

    def _prompt(self) -> None:
        if self._is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
