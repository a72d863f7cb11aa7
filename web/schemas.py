"""The bodies of generation requests: OpenAI's fields, vLLM's extras by the same names, decoded strictly.

Every field is obeyed or refused: an unknown one by name, a known one that is not built yet by name unless it has the
value that asks for nothing. `null` always means the default.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_args

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequest
from engine.sampling_params import (
    OutputKind,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputsParams,
    structured_outputs_params,
)

MAX_PROMPTS = 128
"""Most prompts in one completions request."""
MAX_SHOWN_CHARS = 200
"""Of a field's name or value that is told back."""

Role = Literal["system", "developer", "user", "assistant", "tool"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""What OpenAI's clients may ask for; what each means is the chat template's to say."""
ResponseFormatType = Literal["text", "json_object", "json_schema", "structural_tag"]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Prompt = str | list[int]
Neutral = dict[str, tuple[Any, ...]]
"""Field name → the values, beside null, that ask for nothing."""

NOT_BUILT: Neutral = {
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
}
_NOT_BUILT_IN_COMPLETIONS: Neutral = NOT_BUILT | {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream holds beside the text."""

    include_usage: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's envelope of a schema; it is always enforced, so `strict` changes nothing."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's way to ask for `structured_outputs`, with vLLM's structural tags."""

    type: ResponseFormatType
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """Return the same as a sampling parameter, None for plain text; raises InvalidRequest."""
        tag = {"structures": self.structures, "triggers": self.triggers}
        for name, kind in (
            ("json_schema", "json_schema"),
            ("structures", "structural_tag"),
            ("triggers", "structural_tag"),
        ):
            if (getattr(self, name) is not None) != (self.type == kind):
                need = "needs" if self.type == kind else "has no use for"
                raise InvalidRequest(f"response_format of type {self.type} {need} {name}", param="response_format")
        if self.json_schema is not None:
            return structured_outputs_params({"json": self.json_schema.schema})
        if self.type == "structural_tag":
            return structured_outputs_params({"structural_tag": tag})
        return structured_outputs_params({"json_object": True}) if self.type == "json_object" else None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat and text completions share; see `SamplingParams` for those it bears the names of."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool | None = None
    repetition_detection: RepetitionDetection | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream_interval: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    user: str | None = None

    @property
    def form_field(self) -> str:
        """The field that asks for a form of the text, if one does."""
        return "structured_outputs" if self._is_any_text else "response_format"

    @property
    def _is_any_text(self) -> bool:
        """Whether `response_format` asks for no form."""
        return self.response_format is None or self.response_format.type == "text"

    @property
    def asks_for_form(self) -> bool:
        """Whether a field asks for a form of the text."""
        return self.structured_outputs is not None or not self._is_any_text

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell beside each token; None for no logprobs at all."""
        return None

    def sampling_params(self, **defaults: Any) -> SamplingParams:
        """Return the sampling parameters; what the request leaves open is taken from `defaults`.

        Raises:
            InvalidRequest: A value is out of range; the caller's fault.
        """
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | {"logprobs": self.num_logprobs}
        if self.response_format is not None and self.structured_outputs is None:
            given["structured_outputs"] = self.response_format.structured_outputs()
        kind = OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY
        chosen = defaults | {name: value for name, value in given.items() if value is not None}
        return SamplingParams(output_kind=kind, **chosen)

    def check(self) -> None:
        """Check what spans several fields; raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs needs stream to be false", param="prompt_logprobs")
        if self.structured_outputs is not None and not self._is_any_text:
            message = "structured_outputs and response_format both say what is wanted: give one of them"
            raise InvalidRequest(message, param="structured_outputs")


_SAMPLING_FIELDS = tuple(
    name for name in SamplingParams.__struct_fields__ if name in GenerationRequest.__struct_fields__
)


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`; `prompt` is text, token ids, or a list of either."""

    prompt: str | list[Any]
    logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell beside each token; None for no logprobs at all."""
        return self.logprobs

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts one by one; raises InvalidRequest."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt must not be an empty list", param="prompt")
        if _is_token_ids(self.prompt):
            return [self.prompt]
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequest(
                f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(self.prompt)}", param="prompt"
            )
        for index, prompt in enumerate(self.prompt):
            if not isinstance(prompt, str) and not _is_token_ids(prompt):
                raise InvalidRequest(
                    f"prompt[{index}] must be a string or a list of token ids, got {type(prompt).__name__}",
                    param=f"prompt[{index}]",
                )
        return self.prompt


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _Checked(Protocol):
    def check(self) -> None: ...


RequestT = TypeVar("RequestT", bound=_Checked)


def decode_completion(body: bytes) -> CompletionRequest:
    """Decode and check the body of a completion request; raises InvalidRequest naming the field at fault."""
    fields = decode_object(body)
    drop_neutral(fields, _NOT_BUILT_IN_COMPLETIONS, "")
    return convert(fields, CompletionRequest)


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON object; raises InvalidRequest."""
    try:
        with uncollected():
            fields = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "; a lone surrogate, written as \\ud800 to \\udfff, is no text" if _SURROGATE.search(body) else ""
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}{hint}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(fields).__name__}")
    return fields


@contextmanager
def uncollected() -> Iterator[None]:
    """Make objects in the block without looking for garbage among them again and again, which costs ten times more."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def drop_neutral(fields: dict[str, Any], not_built: Neutral, where: str) -> None:
    """Take fields that are not built out of `fields`; raises InvalidRequest where one asks for something."""
    for name in not_built.keys() & fields.keys():
        value = fields.pop(name)
        neutral = not_built[name]
        if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
            raise InvalidRequest(f"{where}{name} is not supported yet; leave it out", param=where + name)


def decode_fields(body: bytes, kind: type[RequestT]) -> RequestT:
    """Decode and check a body of `kind`; raises InvalidRequest naming the field at fault."""
    return convert(decode_object(body), kind)


def convert(fields: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """Return `fields` as a checked body of `kind`; raises InvalidRequest naming the field at fault."""
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(error) from None
    request.check()
    return request


_WORDS = {
    ".role": get_args(Role),
    "response_format.type": get_args(ResponseFormatType),
    "tool_choice": ("none", "auto", "required", "and an object that names a function"),
    "reasoning_effort": get_args(ReasoningEffort),
    ".type": ("function",),
}
"""What a field may be that is one of a few words, by how its path ends: calls and tools are functions alone."""
_PLACE = re.compile(r" - at `\$\.?(?P<path>[\w.\[\]]*)`$")
"""Ends a message: the path holds our own names and numbers alone, whatever the value that is told before it."""
_UNNAMED = re.compile(r"Object (?P<fault>contains unknown|missing required) field `(?P<field>.*)`", re.DOTALL)


def _invalid_field(error: msgspec.ValidationError) -> InvalidRequest:
    told = str(error)
    found = _PLACE.search(told)
    fault, path = (told[: found.start()], found["path"]) if found else (told, "")
    unnamed = _UNNAMED.fullmatch(fault)
    if unnamed is not None:
        field = f"{path}.{unnamed['field']:.{MAX_SHOWN_CHARS}}".lstrip(".")
        kind = "unknown" if "unknown" in unnamed["fault"] else "missing required"
        return InvalidRequest(f"{kind} field {field!r}", param=field)
    fault = f"{fault:.{MAX_SHOWN_CHARS}}"
    if fault.startswith("Invalid enum value"):
        known = next((words for end, words in _WORDS.items() if path.endswith(end)), ())
        fault += f"; known are {', '.join(known)}" if known else ""
    is_named = not path or fault.startswith(f"{path}:")
    return InvalidRequest(fault if is_named else f"{path}: {fault}", param=path or None)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}
