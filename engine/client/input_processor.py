"""Prompt or messages → `EngineCoreRequest`. Every refusal that needs no engine happens here, with value and limit."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from engine.client.parsers.reasoning import END as REASONING_END
from engine.client.parsers.reasoning import START as REASONING_START
from engine.client.parsers.reasoning import Opening, opening_after
from engine.client.parsers.registry import writes_reasoning
from engine.client.tokenizer import Tokenizer
from engine.config import EngineConfig
from engine.errors import InvalidRequest, PromptTooLong
from engine.outputs import RequestId
from engine.parameter_checks import check_text
from engine.protocol import EngineCoreRequest, EngineReady, SessionPart
from engine.sampling_params import ReasoningBefore, SamplingParams

Messages = Sequence[Mapping[str, Any]]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Chat messages with what else their template is shown.

    Attributes:
        messages: The turns, each with role and content.
        tools: Functions the model may call, as OpenAI describes them.
        template_variables: What the template reads beside, such as `enable_thinking`.
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None = None
    template_variables: Mapping[str, Any] = {}


PromptInput = str | Sequence[int] | Messages | Conversation
"""Text, token ids, chat messages, or those with tools."""

_BASE_36 = "0123456789abcdefghijklmnopqrstuvwxyz"
_SEED_BITS = 64
_NEEDS_LOGITS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
)
"""Parameters that the integer model, which has no logits, cannot obey."""
_NEUTRAL = SamplingParams()
MAX_PRIORITY = 2**31 - 1
"""Priorities are from minus this to this; lower is more urgent."""


class Prompt(NamedTuple):
    """A tokenized prompt; `opening` says how the answer begins, of a model that writes reasoning."""

    text: str | None
    token_ids: list[int]
    opening: Opening | None = None


class RequestOptions(NamedTuple):
    """What a caller may say of a request beside prompt and sampling."""

    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    client_key: str | None = None
    data_parallel_rank: int | None = None


class InputProcessor:
    """Makes requests for one engine. `tokenize` may run in any thread; the rest belongs to the client's."""

    def __init__(
        self,
        config: EngineConfig,
        ready: EngineReady,
        tokenizer: Tokenizer,
        client_index: int = 0,
        *,
        has_logits_processors: bool = False,
    ) -> None:
        """Draw request seeds from `config.seed` on; ids are unique for this client's life."""
        self._has_logits_processors = has_logits_processors
        self._max_model_len = ready.max_model_len
        self._vocab_size = ready.vocab_size
        self._tokenizer = tokenizer
        self._client_index = client_index
        self._has_logits = config.model != "null"
        self._policy = config.scheduling_policy
        self._stream_interval = config.stream_interval
        self._writes_reasoning = writes_reasoning(config.reasoning_parser, tokenizer.template_source)
        self._seeds = random.Random(config.seed)
        self._num_requests = 0

    def tokenize(self, prompt: PromptInput, params: SamplingParams = _NEUTRAL, is_first: bool = True) -> Prompt:
        """Turn a prompt into token ids, truncated as `params` ask; text is None where ids were given, else the whole.

        A part of a session that is not its first begins no text: it is given no special tokens and is no conversation.

        Raises:
            PromptTooLong: The text cannot fit the context, and is not to be truncated; the caller's fault.
            InvalidRequest: The prompt is empty, of no known form, or the template refuses it; the caller's fault.
        """
        opening = None
        if isinstance(prompt, Sequence) and prompt and all(isinstance(part, Mapping) for part in prompt):
            prompt = Conversation(messages=cast("Messages", prompt))
        if isinstance(prompt, str):
            text: str | None = prompt
            self._check_length(prompt, params)
            ids = self._tokenizer.encode(prompt, add_special_tokens=is_first)
        elif isinstance(prompt, Conversation):
            if not is_first:
                raise InvalidRequest("a later part of a session is text or token ids, got messages", param="prompt")
            text = self._render(prompt)
            opening = opening_after(text) if self._writes_reasoning else None
            self._check_length(text, params)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        elif isinstance(prompt, Sequence) and all(type(part) is int for part in prompt):
            text, ids = None, list(cast("Sequence[int]", prompt))
        else:
            kind = type(prompt).__name__
            raise InvalidRequest(
                f"a prompt is text, a list of token ids, or a list of chat messages; got {kind}", param="prompt"
            )
        if not ids:
            raise InvalidRequest("the prompt is empty: at least one token is needed", param="prompt")
        self._check_ids(ids)
        return Prompt(text, self._truncated(ids, params), opening)

    def _render(self, conversation: Conversation) -> str:
        variables = conversation.template_variables
        if reserved := {"tools", "add_generation_prompt", "messages"} & variables.keys():
            raise InvalidRequest(f"{min(reserved)} cannot be set as a template variable", param="chat_template_kwargs")
        tools = None if conversation.tools is None else [dict(tool) for tool in conversation.tools]
        return self._tokenizer.apply_chat_template(conversation.messages, tools=tools, **variables)

    def make_requests(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> tuple[str, list[EngineCoreRequest]]:
        """Return the label and one request a completion, with EOS ids, `max_tokens` and seeds resolved in.

        Raises:
            PromptTooLong: Prompt and asked tokens exceed the context, with the numbers.
            InvalidRequest: An option or a parameter cannot be obeyed by this model; the caller's fault.
        """
        num_prompt_tokens = len(prompt.token_ids)
        room = self._max_model_len - num_prompt_tokens
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens, but the context holds {self._max_model_len} with at least "
                f"one generated: shorten it by {1 - room}",
                param="prompt",
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {params.max_tokens}, but the context "
                f"holds {self._max_model_len}: lower max_tokens to {room} or shorten the prompt",
                param="max_tokens",
            )
        if params.min_tokens > room:
            raise PromptTooLong(
                f"min_tokens is {params.min_tokens}, but only {room} fit the context", param="min_tokens"
            )
        self._check_options(options)
        params = self._with_reasoning(self._with_token_ids(params), prompt.opening)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(_SEED_BITS)
        label = options.request_id or f"request-{_base_36(self._num_requests)}"
        others = msgspec.structs.replace(params, prompt_logprobs=None)  # the first completion tells the prompt's
        return label, [
            self._make_request(label, prompt, others if i else params, options, seed + i, room) for i in range(params.n)
        ]

    def make_session(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> EngineCoreRequest:
        """Return the request of a session that begins with `prompt`; raises as `make_requests`."""
        _, (request,) = self.make_requests(prompt, params, options)
        return msgspec.structs.replace(request, extras={"session": True})

    def make_part(self, session_id: RequestId, prompt: Prompt, params: SamplingParams) -> SessionPart:
        """Return a later part of a session; what it exceeds together with the parts before is the engine's to say.

        Raises:
            PromptTooLong: It would not even fit alone; the caller's fault.
            InvalidRequest: A parameter cannot be obeyed by this model; the caller's fault.
        """
        wanted = len(prompt.token_ids) + (params.max_tokens or 1)
        if wanted > self._max_model_len:
            message = f"the part of {len(prompt.token_ids)} tokens and max_tokens {params.max_tokens or 1} exceed"
            raise PromptTooLong(f"{message} the context of {self._max_model_len}: shorten one of them", param="prompt")
        params = self._with_token_ids(params)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(_SEED_BITS)
        return SessionPart(session_id, prompt.token_ids, self._resolved(params, seed, params.max_tokens))

    def _resolved(self, params: SamplingParams, seed: int, max_tokens: int | None) -> SamplingParams:
        return msgspec.structs.replace(
            params,
            n=1,
            seed=seed % 2**_SEED_BITS,
            max_tokens=max_tokens,
            eos_token_ids=tuple(self._tokenizer.eos_token_ids),
            stream_interval=max(self._stream_interval, params.stream_interval or 1),
        )

    def _make_request(
        self, label: str, prompt: Prompt, params: SamplingParams, options: RequestOptions, seed: int, room: int
    ) -> EngineCoreRequest:
        internal_id = f"{label}-{self._client_index}.{_base_36(self._num_requests)}"
        self._num_requests += 1
        resolved = self._resolved(params, seed, room if params.max_tokens is None else params.max_tokens)
        return EngineCoreRequest(
            request_id=RequestId(internal_id),
            external_id=label,
            prompt_token_ids=prompt.token_ids,
            sampling_params=resolved,
            arrival_time=time.time(),
            priority=options.priority,
            client_key=options.client_key,
            cache_salt=options.cache_salt,
            data_parallel_rank=options.data_parallel_rank,
        )

    def _with_reasoning(self, params: SamplingParams, opening: Opening | None) -> SamplingParams:
        """Have the form of the text hold for what follows the reasoning only, if there is any."""
        if params.structured_outputs is None or opening in (None, Opening.ANSWER):
            return params
        start, end = map(self._tokenizer.token_id, (REASONING_START, REASONING_END))
        is_special = not self._tokenizer.special_token_ids.isdisjoint({start, end})
        if is_special and (start is None or end is None):
            message = (
                f"the form of a text that follows reasoning needs {REASONING_START} and {REASONING_END} to be both "
            )
            message += "special tokens or neither, and of this model one is: switch reasoning off"
            raise InvalidRequest(message, param="structured_outputs")
        markers = None if start is None or end is None else (start, end)
        before = ReasoningBefore(is_begun=opening is Opening.INSIDE, markers=markers)
        return msgspec.structs.replace(params, reasoning=before)

    def _with_token_ids(self, params: SamplingParams) -> SamplingParams:
        """Check what `params` say of token ids, and resolve bad words into them."""
        if params.extra_args is not None and not self._has_logits_processors:
            message = (
                "extra_args are for logits processors, and this engine has none: give some to LLM, or leave them out"
            )
            raise InvalidRequest(message, param="extra_args")
        if not self._has_logits:
            for name in _NEEDS_LOGITS:
                if getattr(params, name) != getattr(_NEUTRAL, name):
                    message = f"{name} needs a model with logits, and the integer model has none: leave it out"
                    raise InvalidRequest(message, param=name)
            return params
        for name in ("allowed_token_ids", "logit_bias", "logprob_token_ids", "stop_token_ids"):
            token_ids = getattr(params, name)
            if token_ids and max(token_ids) >= self._vocab_size:
                raise InvalidRequest(
                    f"{name} holds token id {max(token_ids)}, which is outside the vocabulary: ids are from 0 to "
                    f"{self._vocab_size - 1}",
                    param=name,
                )
        if not params.bad_words:
            return params
        spellings = [self._spellings(word) for word in params.bad_words]
        return msgspec.structs.replace(
            params, bad_words_token_ids=tuple(dict.fromkeys(itertools.chain.from_iterable(spellings)))
        )

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return a bad word in tokens as it would stand at the start of a text and after a space."""
        word = word.lstrip()
        texts = (word, f" {word}")
        return [ids for text in texts if (ids := tuple(self._tokenizer.encode(text, add_special_tokens=False)))]

    def _truncated(self, ids: list[int], params: SamplingParams) -> list[int]:
        """Return the last tokens of a prompt, as many as `params` allow."""
        most = params.truncate_prompt_tokens
        if most is None:
            return ids
        if most == -1:
            most = max(1, self._max_model_len - (params.max_tokens or 1))
        return ids[-most:]

    def _check_length(self, text: str, params: SamplingParams) -> None:
        """Refuse, before the work of tokenizing it, a text that cannot fit however it is tokenized."""
        max_chars = self._max_model_len * self._tokenizer.max_token_chars
        if len(text) > max_chars and params.truncate_prompt_tokens is None:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, and at most {max_chars} can fit the context of "
                f"{self._max_model_len} tokens: shorten it, or set truncate_prompt_tokens",
                param="prompt",
            )

    def _check_options(self, options: RequestOptions) -> None:
        if not -MAX_PRIORITY <= options.priority <= MAX_PRIORITY:
            message = f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {options.priority}"
            raise InvalidRequest(message, param="priority")
        if options.priority and self._policy != "priority":
            message = f"priority {options.priority} has no effect with --scheduling-policy {self._policy}"
            raise InvalidRequest(f"{message}: leave it out, or start the engine with priority", param="priority")
        for name in ("request_id", "cache_salt", "client_key"):
            check_text(name, getattr(options, name))

    def _check_ids(self, ids: list[int]) -> None:
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(
                f"token id {wrong} is outside the vocabulary: ids are from 0 to {self._vocab_size - 1}", param="prompt"
            )


def _base_36(number: int) -> str:
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _BASE_36[digit] + digits
        if not number:
            return digits
