"""The body of `POST /v1/chat/completions`: a conversation, and the tools of which the answer may make use."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.client.input_processor import Conversation
from engine.errors import InvalidRequest
from engine.parameter_checks import shown
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from web.schemas import (
    NOT_BUILT,
    GenerationRequest,
    Neutral,
    ReasoningEffort,
    Role,
    convert,
    decode_object,
    drop_neutral,
)
from web.tool_schemas import Tool, ToolCall, ToolChoice, check_tools, form_of_calls

_NOT_BUILT_IN_CHAT: Neutral = NOT_BUILT | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
}
_NOT_BUILT_IN_MESSAGES: Neutral = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
}


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation; `content` is text or a list of text parts, and may lack where there are calls."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def as_template_wants(self, where: str) -> dict[str, Any]:
        """Return the turn as chat templates want it; raises InvalidRequest.

        Its content is one string, arguments of calls are objects, and `developer` is `system`'s new name.
        """
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise InvalidRequest(f"missing required field '{where}.content'", param=f"{where}.content")
        turn["content"] = None if self.content is None else _text_of(self.content, f"{where}.content")
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            turn["tool_calls"] = [call.as_template_wants(f"{where}.tool_calls[{i}]") for i, call in calls]
        for field, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, field) and self.role != role:
                message = f"{where}.{field} has its place in a message of the role {role}, not of {self.role}"
                raise InvalidRequest(message, param=f"{where}.{field}")
        more = {"name": self.name, "tool_call_id": self.tool_call_id}
        more["reasoning_content"] = self.reasoning_content or self.reasoning
        return turn | {name: value for name, value in more.items() if value is not None}


class ChatCompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell beside each token; None for no logprobs at all."""
        if self.logprob_token_ids is not None:
            return self.top_logprobs
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def at_most_one_call(self) -> bool:
        """Whether an answer may hold one call only."""
        return self.parallel_tool_calls is False

    @property
    def may_call(self) -> bool:
        """Whether an answer may hold calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def form_field(self) -> str:
        """The field that asks for a form of the text, if one does: calls have one too."""
        return "tools" if self.may_call else super().form_field

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the template is to read beside the messages."""
        given = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return (self.chat_template_kwargs or {}) | given

    @property
    def functions(self) -> list[Tool]:
        """The functions it tells of."""
        return self.tools or []

    def sampling_params(self, **defaults: Any) -> SamplingParams:
        """Return the sampling parameters, with the form of calls where there must be some; raises InvalidRequest."""
        params = super().sampling_params(**defaults)
        form = form_of_calls(self.functions, self.tool_choice, self.at_most_one_call)
        return params if form is None else msgspec.structs.replace(params, structured_outputs=form)

    def check(self) -> None:
        """Check what spans several fields; raises InvalidRequest."""
        super().check()
        if not self.messages:
            raise InvalidRequest("messages must hold at least one message, got none", param="messages")
        self._check_logprobs()
        self._check_reasoning_effort()
        check_tools(self.functions, self.tool_choice)
        if self.asks_for_form and self.may_call:
            message = "the form of a text and tools contradict each other: leave one out, or set tool_choice to none"
            raise InvalidRequest(message, param="tools")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest(
                f"max_completion_tokens {shown(self.max_completion_tokens)} contradicts max_tokens "
                f"{shown(self.max_tokens)}; give one of them",
                param="max_completion_tokens",
            )
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens

    def _check_logprobs(self) -> None:
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.logprobs:
                raise InvalidRequest(f"{name} needs logprobs to be true", param=name)
        if self.logprob_token_ids is not None and self.top_logprobs is not None:
            raise InvalidRequest("top_logprobs and logprob_token_ids contradict each other", param="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            message = f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {shown(self.top_logprobs)}"
            raise InvalidRequest(message, param="top_logprobs")

    def _check_reasoning_effort(self) -> None:
        other = (self.chat_template_kwargs or {}).get("reasoning_effort", self.reasoning_effort)
        if self.reasoning_effort is not None and other != self.reasoning_effort:
            message = f"reasoning_effort {self.reasoning_effort} contradicts that of chat_template_kwargs"
            raise InvalidRequest(f"{message}: give one of them", param="reasoning_effort")

    @property
    def prompt(self) -> Conversation:
        """The conversation; tools are left out of it where none may be called; raises InvalidRequest."""
        turns = [message.as_template_wants(f"messages[{index}]") for index, message in enumerate(self.messages)]
        return Conversation(
            messages=turns,
            tools=[tool.as_template_wants() for tool in self.functions] if self.may_call else None,
            template_variables=self.template_variables,
        )


def decode_chat_completion(body: bytes) -> ChatCompletionRequest:
    """Decode and check the body of a chat completion request; raises InvalidRequest naming the field at fault."""
    fields = decode_object(body)
    drop_neutral(fields, _NOT_BUILT_IN_CHAT, "")
    messages = fields.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            drop_neutral(message, _NOT_BUILT_IN_MESSAGES, f"messages[{index}].")
    return convert(fields, ChatCompletionRequest)


def _text_of(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.keys() != {"type", "text"} or part["type"] != "text" or not isinstance(part["text"], str):
            raise InvalidRequest(
                f'{where}[{index}] must be {{"type": "text", "text": "..."}}, got one of type '
                f"{shown(part.get('type'))} with fields {shown(sorted(part))}; other parts are not supported yet",
                param=f"{where}[{index}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)
