"""Bodies are decoded strictly, and what is refused names the field, what it got and what it wants."""

from __future__ import annotations

import gc
import json

import pytest

from engine.errors import InvalidRequest
from web.chat_schemas import ChatCompletionRequest, decode_chat_completion
from web.errors import error_body
from web.schemas import convert, decode_completion, decode_object
from web.tool_schemas import Function, Tool

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return decode_chat_completion(json.dumps({"messages": MESSAGES} | fields).encode())


REFUSED = [
    ({"nonsense": 1}, "nonsense", "unknown field 'nonsense'"),
    ({"max_tokens": "5"}, "max_tokens", "got `str`"),
    ({"max_tokens": 1.5}, "max_tokens", "got `float`"),
    ({"temperature": "hot"}, "temperature", "got `str`"),
    ({"temperature": -1}, "temperature", "from 0 to 2, got -1"),
    ({"temperature": 2.5}, "temperature", "from 0 to 2, got 2.5"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.5}, "top_p", "greater than 0"),
    (
        {"repetition_detection": {"max_pattern_size": -1}},
        "repetition_detection",
        "repetition_detection: max_pattern_size",
    ),
    ({"top_k": -2}, "top_k", "from -1 to 2147483647, got -2"),
    ({"min_p": 1.1}, "min_p", "from 0 to 1, got 1.1"),
    ({"n": 0}, "n", "from 1 to 128, got 0"),
    ({"n": 129}, "n", "from 1 to 128, got 129"),
    ({"n": True}, "n", "got `bool`"),
    ({"seed": 2**70}, "seed", "got 1180591620717411303424"),
    ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "at most max_tokens, which is 3, got 4"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "contradicts max_tokens 3"),
    ({"stop": ["a", ""]}, "stop", "empty string"),
    ({"stop": "x" * 1025}, "stop", "at most 1024 characters, got 1025"),
    ({"stop": [1]}, "stop[0]", "got `int`"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "got -1"),
    ({"priority": 2**40}, "priority", "priority"),
    ({"stream": "yes"}, "stream", "got `str`"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"hm": 1}}, "stream_options.hm", "unknown field"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "got `str`"),
    ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "king"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing required field"),
    ({"messages": [{"role": "user", "content": "", "mood": 1}]}, "messages[0].mood", "unknown field"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "image_url"),
    ({"logprobs": 1}, "logprobs", "got `int`"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20, got 21"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "from 0 to 20, got -1"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20, got 21"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "needs stream to be false"),
    ({"tools": [{}]}, "tools[0].type", "missing required field"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "of type json_schema needs json_schema"),
    ({"response_format": {"type": "text", "triggers": []}}, "response_format", "of type text has no use for triggers"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "",
    ),
    ({"structured_outputs": {"json": 5}}, "structured_outputs", "json must be a JSON object, got 5"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got regex and choice"),
    ({"structured_outputs": {"guided_json": {}}}, "structured_outputs", "unknown field 'guided_json'"),
    ({"guided_json": {}}, "guided_json", "unknown field"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "give one of them",
    ),
    ({"logit_bias": {"5": 101}}, "logit_bias", "of token 5 must be from -100 to 100, got 101"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids from 0 to 2147483647 as keys, got 'x'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "got '-1'"),
    ({"logit_bias": {"5": "a"}}, "logit_bias[...]", "got `str`"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024 token ids, got 1025"),
    ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2, got 2.5"),
    ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2, got -3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100, got 0"),
    ({"repetition_penalty": 101}, "repetition_penalty", "from 0.01 to 100, got 101"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token id, got none"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "got -1"),
    ({"allowed_token_ids": [1] * 16385}, "allowed_token_ids", "at most 16384 values, got 16385"),
    ({"bad_words": ["a", " "]}, "bad_words", "not all of them spaces, got ' '"),
    ({"bad_words": ["a" * 257]}, "bad_words", "1 to 256 characters, not all of them spaces, got a word of 257"),
    ({"bad_words": ["a"] * 129}, "bad_words", "at most 128 values, got 129"),
    ({"top_logprobs": False}, "top_logprobs", "got `bool`"),
    ({"echo": True}, "echo", "not supported yet"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].id",
        "missing required field",
    ),
]


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED, ids=[f"{param}-{says}" for _, param, says in REFUSED])
def test_wrong_field_is_refused_by_name_with_value_and_limit(fields, param, says):
    with pytest.raises(InvalidRequest) as refusal:
        _ = chat(**fields).sampling_params(max_tokens=None), chat(**fields).prompt
    assert refusal.value.param == param
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"{}x",
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"user": "\\ud800"}',
        b'{"user": "\xff"}',
        b"\xff",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_not_a_json_object_in_utf8_is_refused(body):
    with pytest.raises(InvalidRequest):
        decode_chat_completion(body)


def test_null_means_the_default_in_every_field():
    nothing = dict.fromkeys(chat().__struct_fields__) | {"messages": MESSAGES}
    assert chat(**nothing).sampling_params() == chat().sampling_params()


def test_sampling_fields_reach_the_parameters():
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 1,
        "repetition_penalty": 1.2,
        "seed": 7,
        "min_tokens": 1,
        "stop": "x",
        "stop_token_ids": [4],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    params = chat(**fields, max_completion_tokens=9).sampling_params()
    assert params.max_tokens == 9
    assert params.stop == ("x",)
    assert params.stop_token_ids == (4,)
    for name in fields.keys() - {"stop", "stop_token_ids"}:
        assert getattr(params, name) == fields[name]


def test_developer_is_a_system_turn_and_text_parts_are_lines():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts, "name": "me"}]
    assert chat(messages=messages).prompt.messages == [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "a\nb", "name": "me"},
    ]


@pytest.mark.parametrize(
    ("prompt", "param", "says"),
    [
        (5, "prompt", "got `int`"),
        ([], "prompt", "empty list"),
        (["a", 5], "prompt[1]", "got int"),
        ([[1, "a"]], "prompt[0]", "got list"),
        ([1.5], "prompt[0]", "got float"),
        ([True], "prompt[0]", "got bool"),
        (["a"] * 129, "prompt", "at most 128 prompts, got 129"),
    ],
)
def test_wrong_prompt_is_refused(prompt, param, says):
    with pytest.raises(InvalidRequest, match=says.replace("[", r"\[")) as refusal:
        _ = decode_completion(json.dumps({"prompt": prompt}).encode()).prompts
    assert refusal.value.param == param


def test_what_a_text_must_match_is_said_in_openais_way_or_in_vllms():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tag = {"structures": [{"begin": "<f>", "schema": schema, "end": ""}], "triggers": ["<f"]}
    named = {"name": "x", "schema": schema, "strict": True, "description": "y"}
    asked = {
        "json": ({"type": "json_schema", "json_schema": named}, schema),
        "json_object": ({"type": "json_object"}, True),
        "structural_tag": ({"type": "structural_tag"} | tag, tag),
    }
    for kind, (response_format, value) in asked.items():
        params = chat(response_format=response_format).sampling_params()
        assert params == chat(structured_outputs={kind: value}).sampling_params()
        assert params.structured_outputs.kind == kind
    assert chat(response_format={"type": "text"}).sampling_params().structured_outputs is None
    assert (
        chat(response_format={"type": "text"}, structured_outputs={"regex": "a"}).sampling_params().structured_outputs
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "xml"}}, "'xml'; known are text, json_object, json_schema, structural_tag"),
        (
            {"tool_choice": "sometimes"},
            "'sometimes'; known are none, auto, required, and an object that names a function",
        ),
        ({"tools": [{"type": "retrieval"}]}, "'retrieval'; known are function"),
        ({"reasoning_effort": "huge"}, "'huge'; known are none, minimal, low, medium, high, xhigh"),
    ],
)
def test_of_a_field_that_has_a_few_words_they_are_told(fields, says):
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert str(refused.value).endswith(says)


def test_a_large_body_is_read_without_looking_for_garbage_meanwhile_for_everybody_waits() -> None:
    passes: list[str] = []
    lists = [[]] * 100_000
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": lists})}}
    body = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}], "bad": lists}).encode()
    gc.collect()
    gc.callbacks.append(lambda phase, _: passes.append(phase))
    try:
        fields = decode_object(body)
        assert len(passes) <= 2, "one pass begins and ends, when all is made"
        del fields["bad"]
        request = convert(fields, ChatCompletionRequest)
        gc.collect()
        passes.clear()
        told = request.messages[0].as_template_wants("messages[0]")
        assert len(passes) <= 2
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()
    assert len(told["tool_calls"][0]["function"]["arguments"]["x"]) == 100_000


def test_who_looks_for_no_garbage_does_not_do_so_after_a_body() -> None:
    gc.disable()
    try:
        decode_object(b"{}")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_a_template_is_told_of_a_tool_holds_its_schema_and_no_copy() -> None:
    schema = {"type": "object"}
    function = Function(name="f", parameters=schema)
    told = Tool(type="function", function=function).as_template_wants()
    assert told == {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert told["function"]["parameters"] is schema


LONG = "x" * 1_000_000
ECHOED = [
    ({LONG: 1}, LONG[:200], "unknown field 'xxx"),
    ({"stream_options": {LONG: 1}}, f"stream_options.{LONG[:200]}", "unknown field 'stream_options.xxx"),
    ({"messages": [{"role": LONG, "content": ""}]}, "messages[0].role", "; known are system, developer, user"),
    ({"messages": [{"role": "` - at `$.a`", "content": ""}]}, "messages[0].role", "value '` - at `$.a`'; known are"),
    ({"messages": [{"role": " - at `$.\n" * 9_000, "content": ""}]}, "messages[0].role", "value ' - at `$."),
    ({"messages": [{"role": "user", "content": [{"type": LONG}]}]}, "messages[0].content[0]", "one of type 'xxx"),
    ({"messages": [{"role": "user", "content": [{LONG: 1}]}]}, "messages[0].content[0]", "with fields ['xxx"),
    ({"tool_choice": LONG}, "tool_choice", "known are none, auto"),
    ({"logit_bias": {LONG: 1}}, "logit_bias", "got 'xxx"),
    ({"structured_outputs": {LONG: 1}}, "structured_outputs", "unknown field 'xxx"),
    ({"structured_outputs": {"structural_tag": {LONG[:60_000]: 1}}}, "structured_outputs", "alone, got ['xxx"),
]


@pytest.mark.parametrize(("fields", "param", "says"), ECHOED, ids=range(len(ECHOED)))
def test_however_long_what_is_wrong_is_the_answer_is_short_and_names_the_field(fields, param, says):
    def ask() -> None:
        request = chat(**fields)
        request.sampling_params()
        assert request.prompt

    with pytest.raises(InvalidRequest) as refused:
        ask()
    assert refused.value.param == param
    assert says in str(refused.value)
    assert len(str(refused.value)) < 500


def test_an_answer_is_short_whatever_the_message() -> None:
    answer = json.loads(error_body(400, "é" * 1_000_000, param=LONG))["error"]
    assert answer["message"].endswith("é... and 996000 more characters")
    assert len(answer["param"]) == 200
