"""Chat completions as the real `openai` client sees them."""

from __future__ import annotations

MESSAGES = [{"role": "user", "content": "hi"}]
EXTRA = {"ignore_eos": True}


async def test_openai_client_gets_a_whole_answer(served):
    def ask(client):
        return client.chat.completions.create(
            model="null", messages=MESSAGES, max_tokens=4, temperature=0, extra_body=EXTRA
        )

    answer = await served.with_client(ask)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (answer.model, answer.system_fingerprint) == ("null", None)
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


async def test_openai_client_streams_the_same_text_as_it_gets_whole(served):
    def ask(client):
        settings = {"model": "null", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "extra_body": EXTRA}
        whole = client.chat.completions.create(**settings)
        streamed = client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
        return whole, list(streamed)

    whole, chunks = await served.with_client(ask)
    *parts, ending, usage = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert (parts[0].choices[0].delta.role, parts[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in parts) == whole.choices[0].message.content
    assert all(chunk.choices[0].finish_reason is None for chunk in parts)
    assert ending.choices[0].finish_reason == "length"
    assert ending.choices[0].delta.content is None
    assert all(chunk.usage is None for chunk in [*parts, ending])
    assert usage.choices == []
    assert usage.usage.completion_tokens == 12


async def test_stream_is_written_as_openai_writes_it(served):
    answer = await served.post(served.chat(stream=True))
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert answer.body.count(b"[DONE]") == 1
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all("usage" not in chunk for chunk in chunks)


async def test_several_choices_come_whole_and_streamed(served):
    def ask(client):
        settings = {"model": "null", "messages": MESSAGES, "n": 3, "max_tokens": 4, "seed": 7, "extra_body": EXTRA}
        whole = client.chat.completions.create(**settings)
        return whole, list(client.chat.completions.create(**settings, stream=True))

    whole, chunks = await served.with_client(ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == 12
    for index in range(3):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["length"]
        assert mine[0].delta.role == "assistant"


async def test_text_parts_and_an_earlier_answer_are_taken_as_the_client_sends_them(served):
    earlier = {"role": "assistant", "content": "yes?", "refusal": None, "tool_calls": None, "audio": None}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, *MESSAGES, earlier, {"role": "user", "content": parts}]
    answer = await served.post(served.chat(messages=messages))
    assert answer.status == 200


async def test_conversation_that_exceeds_the_context_is_refused_with_the_numbers(served):
    answer = await served.post(served.chat(messages=[{"role": "user", "content": "a" * 9000}]))
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "8192" in answer.error["message"]


async def test_fields_that_ask_for_nothing_are_accepted(served):
    nothing = {
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "top_logprobs": None,
        "user": "someone",
        "stop": None,
        "n": 1,
    }
    assert (await served.post(served.chat(**nothing))).status == 200
