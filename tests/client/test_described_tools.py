"""Tools, calls and results as text, for templates that know none."""

from __future__ import annotations

import json
from typing import Any

from engine.client.parsers.hermes import HermesParser
from engine.client.parsers.pieces import CallArguments, CallBegun, merged
from engine.client.tokenizer import load_tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "clock", "description": "The {time}.", "parameters": {"type": "object"}},
}
USER = {"role": "user", "content": "When?"}
CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
TOKENIZER = load_tokenizer("null")


def render(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> str:
    return TOKENIZER.apply_chat_template(list(messages), tools=tools)


def test_tools_are_described_in_the_system_message() -> None:
    text = render(USER, tools=[TOOL])
    assert text.startswith("system: You may call functions")
    assert json.dumps(TOOL["function"]) in text
    assert text.endswith("user: When?\nassistant: ")
    joined = render({"role": "system", "content": "Be brief."}, USER, tools=[TOOL])
    assert joined.startswith("system: Be brief.\n\nYou may call functions")
    assert render(USER, tools=None) == render(USER, tools=[]) == "user: When?\nassistant: "


def test_what_the_model_is_told_to_write_is_what_is_read() -> None:
    text = render(USER, tools=[TOOL])
    example = text[text.index("<tool_call>") : text.index("</tool_call>") + len("</tool_call>")]
    pieces = merged(HermesParser().feed(example))
    assert pieces == [CallBegun(0, "function"), CallArguments(0, '{"argument": "value"}')]


def test_earlier_calls_and_results_are_text() -> None:
    call = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]}
    text = render(USER, call, {"role": "tool", "tool_call_id": "1", "content": "12:00"})
    assert (
        "assistant: Let me see.\n"
        + "\n".join(['<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'] * 2)
        in text
    )
    assert "user: <tool_response>\n12:00\n</tool_response>" in text
    assert "tool_calls" not in text
