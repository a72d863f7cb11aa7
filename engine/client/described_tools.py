"""Tools for a model whose chat template knows none: described in the system message, called as Hermes' models do.

Earlier calls and their results become text of the conversation likewise. A template that shows tools never comes here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.client.parsers.hermes import END, START

Message = Mapping[str, Any]

_INSTRUCTIONS = f"""You may call functions to answer. Their names, descriptions and arguments as JSON schemas:
<tools>
{{tools}}
</tools>
To call one, write its name and its arguments as JSON between tags, like this:
{START}{{{{"name": "function", "arguments": {{{{"argument": "value"}}}}}}}}{END}"""


def speaks_of_tools(messages: Any) -> bool:
    """Whether earlier messages hold calls or results."""
    if not isinstance(messages, list | tuple):
        return False
    return any(
        isinstance(each, Mapping) and (each.get("tool_calls") or each.get("role") == "tool") for each in messages
    )


def with_described_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return `messages` with all that concerns tools as text."""
    turns = [_as_text(message) for message in messages]
    if not tools:
        return turns
    shown = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=shown)
    if turns and turns[0].get("role") == "system" and isinstance(turns[0].get("content"), str):
        return [turns[0] | {"content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _as_text(message: Message) -> dict[str, Any]:
    turn = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message.get("role") == "tool":
        return turn | {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple) and calls:
        texts = [f"{START}{_call_text(call)}{END}" for call in calls]
        turn["content"] = "\n".join([*filter(None, [message.get("content")]), *texts])
    return turn


def _call_text(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    return json.dumps({"name": function.get("name"), "arguments": function.get("arguments")}, ensure_ascii=False)
