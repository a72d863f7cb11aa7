"""Tools and reasoning over HTTP: calls and reasoning are told in OpenAI's shape, whole and streamed alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from engine.client.input_processor import InputProcessor
from engine.errors import InvalidGrammar, InvalidRequest
from engine.sampling_params import structured_outputs_params
from tests.structured_output.conftest import accepts
from web.chat_schemas import decode_chat_completion

TEMPLATE = """{% if tools %}Call as <tool_call>{{ tools | tojson }}{% endif %}{% for message in messages %}
{{- message.role }}: {{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}
{% endfor %}{% if thinking %}<think>{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a day.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}</tool_call>'


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the model write a text of the test's, by a form that allows nothing else."""

    def write(text: str) -> None:
        form = structured_outputs_params({"choice": [text]})
        monkeypatch.setattr("web.chat_schemas.form_of_calls", lambda *_: form)
        monkeypatch.setattr(InputProcessor, "_with_reasoning", lambda self, params, opening: params)

    return write


def ask(served: Any, **fields: Any) -> dict[str, Any]:
    return served.chat(**{"max_tokens": 400, "ignore_eos": False} | fields)


async def both(served: Any, **fields: Any) -> tuple[dict[str, Any], str]:
    """Return message and finish reason of a whole answer, which streams must give too, in whichever intervals."""
    answer = await served.post(ask(served, **fields))
    assert answer.status == 200, answer.body
    (choice,) = answer.json()["choices"]
    for interval in (1, 50):
        streamed = await served.post(ask(served, stream=True, stream_interval=interval, **fields))
        told, reason = joined(streamed.events[:-1])
        expected = {name: value for name, value in choice["message"].items() if name != "refusal"}
        for call in [*told.get("tool_calls", []), *expected.get("tool_calls", [])]:
            assert len(call.pop("id", "123456789")) == 9
        assert (told, reason) == (expected, choice["finish_reason"])
    return choice["message"], choice["finish_reason"]


def joined(events: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Put a stream's deltas together as OpenAI's clients do."""
    message: dict[str, Any] = {"role": None, "content": None}
    calls: dict[int, dict[str, Any]] = {}
    reasons = []
    for event in events:
        (choice,) = event["choices"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        delta = choice["delta"]
        message["role"] = delta.get("role") or message["role"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"function": {"arguments": ""}})
            known["function"]["arguments"] += call["function"]["arguments"]
            if "id" in call:
                known |= {"id": call["id"], "type": call["type"]}
                known["function"]["name"] = call["function"]["name"]
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    elif message["content"] is None:
        message["content"] = ""
    (reason,) = reasons
    return message, reason


async def test_calls_are_read_from_a_text_whole_and_streamed(open_served, template, written):
    async with open_served(chat_template=template) as served:
        written(f"Let me see.\n{CALL}\n{CALL.replace('Bern', 'Rome')}")
        message, reason = await both(served, tools=[WEATHER, CLOCK])
        assert (message["content"], reason) == ("Let me see.", "tool_calls")
        functions = [call["function"] for call in message["tool_calls"]]
        assert [json.loads(function["arguments"])["city"] for function in functions] == ["Bern", "Rome"]
        message, reason = await both(served, tools=[WEATHER], parallel_tool_calls=False)
        assert (len(message["tool_calls"]), reason) == (1, "tool_calls")
        written(CALL)
        message, _ = await both(served, tools=[WEATHER])
        assert message["content"] is None
        message, reason = await both(served, tools=[WEATHER], max_tokens=70)
        assert (message["tool_calls"][0]["function"]["arguments"], reason) == ('{"city": "Bern", "days', "length")
        written("No call.")
        message, reason = await both(served, tools=[WEATHER])
        assert (message["content"], "tool_calls" in message, reason) == ("No call.", False, "stop")
        written(CALL)
        message, reason = await both(served, tools=[WEATHER], tool_choice="none")
        assert (message["content"], reason) == (CALL, "stop")


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Bern", "days": 2}}'),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}]'),
        ("pythonic", "[get_weather(city='Bern', days=2)]"),
    ],
)
async def test_a_family_may_be_named(open_served, template, written, parser, text):
    async with open_served(chat_template=template, tool_call_parser=parser) as served:
        written(text)
        message, reason = await both(served, tools=[WEATHER])
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], reason) == ("get_weather", "tool_calls")
        assert json.loads(call["function"]["arguments"]) == {"city": "Bern", "days": 2}


async def test_a_call_that_must_come_comes_in_its_form_whatever_the_model(open_served, template):
    async with open_served(chat_template=template, tool_call_parser="none") as served:
        for seed in range(2):
            message, reason = await both(served, tools=[WEATHER, CLOCK], tool_choice="required", seed=seed)
            assert (message["content"], reason) == (None, "tool_calls")
            for call in message["tool_calls"]:
                if call["function"]["name"] == "get_weather":
                    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])
                else:
                    assert (call["function"]["name"], call["function"]["arguments"]) == ("clock", "{}")
            fields = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
            message, _ = await both(served, seed=seed, **fields)
            assert len(message["tool_calls"]) == 1
            named = {"type": "function", "function": {"name": "get_weather"}}
            message, reason = await both(served, tools=[WEATHER, CLOCK], tool_choice=named, seed=seed)
            (call,) = message["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])
            assert (call["function"]["name"], reason) == ("get_weather", "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "a"}}])
def test_a_function_that_must_be_called_has_arguments_in_an_object_by_its_own_options(choice):
    parameters = {"properties": {"x": {"const": 1}}, "required": ["x"], "x-guidance": {"item_separator": " ,"}}
    tools = [{"type": "function", "function": {"name": "a", "parameters": parameters}}]
    params, _ = decoded({"tools": tools, "tool_choice": choice})
    form = msgspec.structs.asdict(params.structured_outputs)
    before, after = ('[{"name": "a", "arguments": ', "}]") if choice == "required" else ("", "")
    assert accepts(form, f'{before}{{"x":1 ,"y":2}}{after}')
    assert not accepts(form, f'{before}{{"x":1,"y":2}}{after}')
    assert not accepts(form, f"{before}1{after}")
    parameters["x-guidance"] = {"lenient": True}
    params, _ = decoded({"tools": tools, "tool_choice": choice})
    with pytest.raises(InvalidGrammar, match="x-guidance: lenient"):
        accepts(msgspec.structs.asdict(params.structured_outputs), "")


@pytest.mark.parametrize(
    ("parser", "text", "cuts"),
    [
        ("none", '[{"name": "get_weather", "arguments": {"city":"Bern","days":2}}]', ["city", '"days', ":2"]),
        ("hermes", CALL, ["city", ": 2"]),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Bern", "days": 2}}', ["city", ": 2"]),
        ("mistral", '[TOOL_CALLS]get_weather{"city": "Bern", "days": 2}', ["city", ": 2"]),
    ],
)
async def test_a_call_that_a_stop_string_cut_is_not_told_as_a_whole_one(
    open_served, template, written, parser, text, cuts
):
    async with open_served(chat_template=template, tool_call_parser=parser) as served:
        written(text)
        fields = {"tools": [WEATHER]} | ({"tool_choice": "required"} if parser == "none" else {})
        for cut in cuts:
            message, reason = await both(served, stop=[cut], **fields)
            assert (message["tool_calls"][0]["function"]["name"], reason) == ("get_weather", "stop")
        message, reason = await both(served, stop=["}}", "2}"], include_stop_str_in_output=True, **fields)
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Bern", "days": 2}
        assert reason == "tool_calls"


async def test_calls_whose_form_takes_too_much_are_refused_by_the_names_of_their_functions(open_served, template):
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999_983}}}
    tools = [CLOCK, {"type": "function", "function": {"name": "book", "parameters": parameters}}]
    async with open_served(chat_template=template) as served:
        answer = await served.post(ask(served, tools=tools, tool_choice="required"))
        assert (answer.status, answer.error["param"]) == (400, "tools"), answer.body
        assert answer.error["message"].startswith("tools: the form of calls of clock, book takes more than")


DEEP: dict[str, Any] = {}
for _ in range(140):
    DEEP = {"items": DEEP}
WRONG_SCHEMAS = {
    "nested at most 128 levels deep": DEEP,
    "x-guidance holds for a whole schema": {"properties": {"a": {"x-guidance": {}}}},
    "minimum holds 9007199254740993": {"properties": {"a": {"type": "integer", "minimum": 2**53 + 1}}},
    "minProperties 3 needs": {"minProperties": 3},
    "Invalid type: nonsense": {"properties": {"a": {"type": "nonsense"}}},
    "Unimplemented keys": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("parser", ["none", "hermes", "mistral", "llama3_json"])
async def test_whatever_is_wrong_with_the_schema_of_a_function_is_told_with_its_name(open_served, template, parser):
    named = {"type": "function", "function": {"name": "book_a_flight"}}
    async with open_served(chat_template=template, tool_call_parser=parser) as served:
        for choice in ("required", named) if parser == "none" else ("auto",):
            for says, schema in WRONG_SCHEMAS.items():
                wrong = {"name": "book_a_flight", "strict": True, "parameters": {"type": "object"} | schema}
                tools = [WEATHER, CLOCK, {"type": "function", "function": wrong}]
                answer = await served.post(ask(served, tools=tools, tool_choice=choice))
                assert (answer.status, says in answer.error["message"]) == (400, True), answer.body
                assert "book_a_flight" in answer.error["message"]
                assert answer.error["message"].startswith(("tools: schema of book", "tools[2].function.parameters of"))
                assert answer.error["message"].startswith(answer.error["param"])
                assert "structur" not in answer.error["message"]


async def test_the_openai_client_reads_calls(open_served, template):
    async with open_served(chat_template=template) as served:
        settings = {"model": "null", "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER], "seed": 1}
        settings |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
        whole = await served.with_client(lambda client: client.chat.completions.create(**settings))
        (call,) = whole.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        with_calls = whole.choices[0].message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        settings["messages"] = [*settings["messages"], with_calls, result]
        settings["tool_choice"] = "none"
        settings["max_tokens"] = 5
        answer = await served.with_client(lambda client: client.chat.completions.create(**settings))
        assert answer.choices[0].message.content


async def test_reasoning_is_told_apart_and_may_be_switched_off(open_served, template, written):
    async with open_served(chat_template=template, reasoning_parser="think") as served:
        inside = {"chat_template_kwargs": {"thinking": True}}
        written(f"Rain?\n</think>\n\nYes. {CALL}")
        message, reason = await both(served, tools=[WEATHER], **inside)
        assert (message["reasoning_content"], message["content"], reason) == ("Rain?", "Yes.", "tool_calls")
        message, _ = await both(served, **inside)
        assert (message["reasoning_content"], message["content"]) == ("Rain?", f"Yes. {CALL}")
        written("<think>\nhm\n</think>So")
        message, _ = await both(served)
        assert (message["reasoning_content"], message["content"]) == ("hm", "So")
        message, reason = await both(served, max_tokens=9)
        assert (message["reasoning_content"], message["content"], reason) == ("h", "", "length")
        message, reason = await both(served, stop="</th")
        assert (message["reasoning_content"], message["content"], reason) == ("hm", "", "stop")
    async with open_served(chat_template=template, reasoning_parser="none") as served:
        message, _ = await both(served)
        assert message["content"] == "<think>\nhm\n</think>So"


async def test_reasoning_effort_reaches_a_template_that_reads_it_and_is_refused_elsewhere(open_served, tmp_path):
    path = tmp_path / "with_effort.jinja"
    path.write_text(TEMPLATE + "{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}{% endif %}")
    async with open_served(chat_template=str(path)) as served:
        asked = [{}, {"reasoning_effort": None}, {"reasoning_effort": "low"}, {"reasoning_effort": "medium"}]
        asked.append({"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "low"})
        answers = [await served.post(ask(served, max_tokens=1, **fields)) for fields in asked]
        plain, *sizes = [answer.json()["usage"]["prompt_tokens"] for answer in answers]
        assert [size - plain for size in sizes] == [0, len("Reasoning: low"), len("Reasoning: medium"), 14]
    async with open_served() as served:
        answer = await served.post(ask(served, reasoning_effort="low"))
        assert (answer.status, answer.error["param"]) == (400, "reasoning_effort")
        assert "chat template reads no reasoning_effort" in answer.error["message"]


async def test_logprobs_of_what_is_held_back_are_told_too(open_served, template, byte_llama):
    async with open_served(model=str(byte_llama), num_threads=1, num_gpu_blocks_override=64, max_model_len=256,
                           chat_template=template) as served:  # fmt: skip
        fields = {"tools": [CLOCK], "logprobs": True, "temperature": 0, "max_tokens": 20, "tool_choice": "required"}
        whole = (await served.post(ask(served, **fields))).json()["choices"][0]
        events = (await served.post(ask(served, stream=True, **fields))).events[:-1]
        told = [event["choices"][0]["logprobs"] for event in events]
        assert [entry for part in told for entry in (part or {"content": []})["content"]] == (
            whole["logprobs"]["content"]
        )
        assert len(whole["logprobs"]["content"]) == 20


def earlier(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}


def decoded(fields: dict[str, Any]) -> Any:
    request = decode_chat_completion(json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode())
    return request.sampling_params(), request.prompt


NAMED = {"type": "function", "function": {"name": "other"}}
REFUSED = [
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
    ({"tools": [CLOCK] * 129}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters",
    ),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": [CLOCK], "response_format": {"type": "json_object"}}, "tools"),
    ({"tools": [CLOCK], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tools"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "", "tool_calls": [earlier("{}")]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [earlier("[")]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "user", "content": "", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_wrong_of_tools_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        decoded(fields)
    assert refused.value.param == param


async def test_tools_are_described_to_a_model_whose_template_knows_none(open_served, written):
    async with open_served() as served:
        written(CALL)
        message, reason = await both(served, tools=[WEATHER])
        assert (message["tool_calls"][0]["function"]["name"], reason) == ("get_weather", "tool_calls")
        plain, shown = [
            (await served.post(ask(served, max_tokens=1, **fields))).json()["usage"]["prompt_tokens"]
            for fields in ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": [WEATHER]})
        ]
        assert shown > plain + 300


async def test_tools_that_the_model_does_not_call_are_refused(open_served, template):
    async with open_served(chat_template=template, tool_call_parser="none") as served:
        answer = await served.post(ask(served, chat_template_kwargs={"tools": 1}))
        assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")
        answer = await served.post(ask(served, tools=[CLOCK]))
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "--tool-call-parser hermes" in answer.error["message"]
        bad = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "nonsense"}}}}}
        answer = await served.post(ask(served, tools=[bad], tool_choice="required"))
        assert (answer.status, answer.error["param"]) == (400, "tools")


async def test_a_strict_function_is_called_in_its_form_or_refused(open_served, template):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    async with open_served(chat_template=template) as served:
        fields = {"tools": [strict, CLOCK], "max_tokens": 300, "temperature": 1}
        answer = await served.post(ask(served, **fields))
        assert answer.status == 200
    for parser in ("mistral", "llama3_json"):
        async with open_served(chat_template=template, tool_call_parser=parser) as served:
            assert (await served.post(ask(served, **fields))).status == 200
    async with open_served(chat_template=template, tool_call_parser="pythonic") as served:
        answer = await served.post(ask(served, tools=[CLOCK, strict]))
        assert (answer.status, answer.error["param"]) == (400, "tools[1].function.strict")
