"""What a chat request may say of tools: functions the model may call, and whether it must."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engine.client.parsers.forced import grammar_of_arguments, grammar_of_calls
from engine.errors import InvalidGrammar, InvalidRequest
from engine.sampling_params import MAX_GRAMMAR_CHARS, StructuredOutputsParams, structured_outputs_params
from web.schemas import uncollected

MAX_TOOLS = 128
"""Most functions in one request."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function: its name, and a JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """What its arguments must be."""
        return {"type": "object"} | self.parameters if self.parameters else _NO_ARGUMENTS


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; functions are all there is."""

    type: Literal["function"]
    function: Function

    def as_template_wants(self) -> dict[str, Any]:
        """Return the tool as chat templates want it; its schema is the very object, not a copy."""
        function = msgspec.structs.asdict(self.function)
        told = {name: value for name, value in function.items() if value is not None}
        return {"type": self.type, "function": told}


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which function."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of an earlier turn; `arguments` is JSON as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of an earlier turn, with the id that its result refers to."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None

    def as_template_wants(self, where: str) -> dict[str, Any]:
        """Return the call with its arguments as an object; raises InvalidRequest."""
        try:
            with uncollected():
                arguments = msgspec.json.decode(self.function.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            field = f"{where}.function.arguments"
            raise InvalidRequest(f"{field} must be a JSON object as text: {error}", param=field) from None
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Check what spans tools and their choice; raises InvalidRequest."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools may hold at most {MAX_TOOLS} functions, got {len(tools)}", param="tools")
    names = [tool.function.name for tool in tools]
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function"
        if _NAME.fullmatch(tool.function.name) is None:
            message = f"{where}.name must be 1 to 64 of letters, digits, _, . and -, got {tool.function.name!r:.80}"
            raise InvalidRequest(message, param=f"{where}.name")
        if tool.function.name in names[:index]:
            raise InvalidRequest(f"{where}.name {tool.function.name!r} is given twice", param=f"{where}.name")
        if tool.function.schema.get("type") != "object":
            message = (
                f"{where}.parameters must be a schema of type object, got {tool.function.schema.get('type')!r:.80}"
            )
            raise InvalidRequest(message, param=f"{where}.parameters")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        message = f"tool_choice names {choice.function.name!r:.80}, and tools are {', '.join(names) or 'none'}"
        raise InvalidRequest(message, param="tool_choice")
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice required needs tools, got none", param="tool_choice")


def schemas_of(tools: Sequence[Tool]) -> list[tuple[str, dict[str, Any]]]:
    """Return names and schemas of functions whose calls are held to them; raises InvalidRequest.

    Their one form holds them all, so that what comes after too many characters is not looked at.
    """
    num_chars = 0
    for index in range(len(tools)):
        num_chars += check_schema(tools, index)
        if num_chars > MAX_GRAMMAR_CHARS:
            message = f"tools: calls of {len(tools)} functions cannot be enforced, for their schemas have more than"
            message += f" {MAX_GRAMMAR_CHARS} characters, {num_chars} up to tools[{index}]: give fewer or simpler ones"
            raise InvalidRequest(message, param="tools")
    return [(tool.function.name, tool.function.schema) for tool in tools]


def check_schema(tools: Sequence[Tool], index: int) -> int:
    """Check one function's schema as far as that takes no compiler; return how many characters it has.

    Raises:
        InvalidRequest: It is wrong, which names the function; the caller's fault.
    """
    function = tools[index].function
    try:
        return len(structured_outputs_params({"json": function.schema}).json or "")
    except InvalidGrammar as error:
        param = f"tools[{index}].function.parameters"
        fault = str(error).removeprefix(f"{error.param}: json ")
        raise InvalidRequest(f"{param} of {function.name}: the schema {fault}", param=param) from None


def form_of_calls(
    tools: Sequence[Tool], choice: ToolChoice | None, at_most_one: bool
) -> StructuredOutputsParams | None:
    """Return the form of a text that must be a call, None where it may be anything; raises InvalidRequest."""
    if isinstance(choice, NamedTool):
        index = [tool.function.name for tool in tools].index(choice.function.name)
        check_schema(tools, index)
        return structured_outputs_params(
            {"grammar": grammar_of_arguments(choice.function.name, tools[index].function.schema)}
        )
    if choice != "required":
        return None
    schemas = schemas_of(tools)
    return structured_outputs_params({"grammar": grammar_of_calls(schemas, at_most_one=at_most_one)})
