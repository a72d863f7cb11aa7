"""Text completions as the real `openai` client sees them."""

from __future__ import annotations

import pytest

EXTRA = {"ignore_eos": True}


async def test_openai_client_gets_a_whole_completion_of_sixteen_tokens_by_default(served):
    answer = await served.with_client(
        lambda client: client.completions.create(model="null", prompt="once", extra_body=EXTRA)
    )
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", ["once", ["once"], [5, 6, 7], [[5, 6, 7]]])
async def test_each_form_of_prompt_is_one_choice(served, prompt):
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    answer = await served.post(body, "/v1/completions")
    assert [choice["index"] for choice in answer.json()["choices"]] == [0]
    if isinstance(prompt[0], int | list):
        assert answer.json()["usage"]["prompt_tokens"] == 3


async def test_prompts_of_one_request_are_generated_together_and_numbered_in_order(served):
    def ask(client):
        settings = {
            "model": "null",
            "prompt": ["one", "two", "three"],
            "n": 2,
            "max_tokens": 3,
            "seed": 1,
            "extra_body": EXTRA,
        }
        return client.completions.create(**settings), list(client.completions.create(**settings, stream=True))

    whole, chunks = await served.with_client(ask)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert whole.usage.completion_tokens == 18
    texts = dict.fromkeys(range(6), "")
    endings = []
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        endings += [choice.index] if choice.finish_reason else []
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert sorted(endings) == list(range(6))


async def test_stream_ends_with_usage_and_one_done(served):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await served.post({"prompt": "once", "max_tokens": 3, "ignore_eos": True} | options, "/v1/completions")
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[-1]["choices"][0]["text"] == ""
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_one_refused_prompt_refuses_the_request_and_frees_the_others(served):
    answer = await served.post({"prompt": ["fine", [2**30]], "stream": True}, "/v1/completions")
    assert answer.status == 400
    await served.wait_counts(lambda running, waiting, used: running == waiting == used == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_models_own_defaults_of_sampling_hold_where_a_request_says_nothing(served, path):
    asked = {"prompt": "once"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "once"}]}

    async def choice(**fields):
        body = {**asked, "max_tokens": 8, "ignore_eos": True, "seed": 3, **fields}
        return (await served.post(body, path)).json()["choices"]

    greedy, drawn = await choice(temperature=0), await choice()
    assert greedy != drawn
    served.engine.tokenizer.sampling_defaults["temperature"] = 0.0
    assert await choice() == greedy
    assert await choice(temperature=1) == drawn
