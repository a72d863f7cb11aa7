"""Forms of the text over HTTP: OpenAI's way, vLLM's way, and refusals that keep their status."""

from __future__ import annotations

import json

import pytest
import trio

from engine.errors import Cause
from web.errors import GenerationFailed

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
MULTIPLE_OF_A_PRIME = {"json": {"type": "integer", "multipleOf": 999_983}}
"""Nine seconds of a compiler's time, were it allowed."""


async def test_the_openai_client_gets_json_by_its_schema_whole_and_streamed(served):
    def ask(client):
        settings = {
            "model": "null",
            "messages": [{"role": "user", "content": "hi"}],
            "seed": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        }
        whole = client.chat.completions.create(**settings)
        return whole, list(client.chat.completions.create(**settings, stream=True))

    whole, chunks = await served.with_client(ask)
    (choice,) = whole.choices
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content).keys() == {"a"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


@pytest.mark.parametrize("stream", [False, True])
async def test_a_form_that_is_wrong_is_400_also_where_only_the_compiler_finds_out(served, stream):
    for asked in ({"regex": "a", "choice": ["b"]}, {"regex": "["}, MULTIPLE_OF_A_PRIME):
        answer = await served.post(served.chat(structured_outputs=asked, stream=stream))
        assert answer.status == 400
        assert answer.error["param"] == "structured_outputs"
        assert answer.error["message"].startswith("structured_outputs: ")
        assert answer.error["type"] == "invalid_request_error"
    assert (await served.post(served.chat())).status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_is_wrong_with_a_response_format_is_told_of_it(served, path):
    for schema, says in ({"type": "foo"}, "Invalid type: foo"), (MULTIPLE_OF_A_PRIME["json"], "json '{"):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = served.chat(response_format=wanted) if "chat" in path else {"prompt": "x", "response_format": wanted}
        answer = await served.post(body, path)
        assert (answer.status, answer.error["param"]) == (400, "response_format")
        assert answer.error["message"].startswith(f"response_format: {says}")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("schema", [{"const": "a" * 70_000}, {"items": {"x-guidance": {}}}], ids=["front", "engine"])
async def test_who_refuses_it_makes_no_difference_to_the_field_that_is_named(served, path, schema):
    formats = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, {"type": "text"}
    for wanted, form, field in zip(formats, ({}, {"structured_outputs": {"json": schema}}), FIELDS, strict=True):
        body = {"response_format": wanted} | form
        answer = await served.post(served.chat(**body) if "chat" in path else {"prompt": "x"} | body, path)
        assert (answer.status, answer.error["param"]) == (400, field)
        assert answer.error["message"].startswith(f"{field}: ")


FIELDS = ["response_format", "structured_outputs"]


@pytest.mark.parametrize("field", [*FIELDS, "tools"])
def test_a_form_that_goes_on_no_further_is_told_of_its_field_as_one_that_is_refused(field):
    failed = GenerationFailed(Cause("GrammarFailed", "the grammar cannot go on: no"), field)
    assert (str(failed), failed.param, failed.status_hint) == (f"{field}: the grammar cannot go on: no", field, 400)


async def test_completions_take_a_form_too(served):
    body = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}, "n": 3, "seed": 1}
    answer = await served.post(body, "/v1/completions")
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert {choice["text"] for choice in choices} <= {"yes", "no"}


async def test_a_stream_beside_a_hostile_form_goes_on(served):
    async with await served.open_stream(max_tokens=4000) as stream:
        await stream.receive_some()
        with trio.fail_after(20):
            answer = await served.post(served.chat(structured_outputs=MULTIPLE_OF_A_PRIME))
        assert answer.status == 400
        assert served.counts()[0] <= 1
