"""Sampling parameters over HTTP, on a real model of 256 byte tokens; the integer model refuses what it cannot obey."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from engine.client.detokenizer import Detokenizer
from engine.client.tokenizer import load_tokenizer
from engine.sampling_params import SamplingParams
from web.logprobs import TextPlace

GREEDY = {"prompt": "once upon", "max_tokens": 24, "temperature": 0, "seed": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("allowed_token_ids", [5]),
        ("bad_words", ["a"]),
        ("logprobs", True),
        ("prompt_logprobs", 0),
    ],
)
async def test_the_integer_model_refuses_by_name_what_needs_logits(served, name, value):
    answer = await served.post(served.chat(**{name: value}))
    assert (answer.status, answer.error["param"]) == (400, name)
    assert "needs a model with logits" in answer.error["message"]


async def test_penalties_and_bans_decide_what_comes(open_served, byte_llama: Path):
    async with open_served(model=str(byte_llama), num_threads=1, num_gpu_blocks_override=64) as served:

        async def text(**fields):
            answer = await served.post(GREEDY | fields, "/v1/completions")
            assert answer.status == 200, answer.body
            return answer.json()["choices"][0]["text"]

        assert set(await text(allowed_token_ids=[97, 98], temperature=1)) == {"a", "b"}
        assert await text(logit_bias={"65": 100}) == "A" * 24
        ab = {"allowed_token_ids": [97, 98, 32], "logit_bias": {"97": 50, "98": 40}}
        assert await text(**ab) == "a" * 24
        assert await text(**ab, bad_words=["aaa"]) == "aab" * 8
        assert await text(**ab, bad_words=["a"]) == "b" * 24
        plain = await text()
        penalised = await text(frequency_penalty=2, presence_penalty=2, repetition_penalty=5)
        assert len(set(penalised)) > len(set(plain))

        for name, value in (("allowed_token_ids", [256]), ("logit_bias", {"256": 1}), ("stop_token_ids", [256])):
            answer = await served.post(GREEDY | {name: value}, "/v1/completions")
            assert (answer.status, answer.error["param"]) == (400, name)
            assert "token id 256, which is outside the vocabulary: ids are from 0 to 255" in answer.error["message"]
        answer = await served.post(GREEDY | {"allowed_token_ids": [97], "bad_words": ["a"]}, "/v1/completions")
        assert answer.status == 400
        assert "no token is allowed" in answer.error["message"]


async def test_logprobs_in_every_form_of_answer_agree(open_served, byte_llama: Path):
    async with open_served(model=str(byte_llama), num_threads=1, num_gpu_blocks_override=64) as served:
        chat = served.chat(logprobs=True, top_logprobs=3, temperature=0, max_tokens=20)
        whole = (await served.post(chat)).json()["choices"][0]
        entries = whole["logprobs"]["content"]
        assert len(entries) == 20
        assert (
            bytes(byte for entry in entries for byte in entry["bytes"]).decode(errors="replace")
            == (whole["message"]["content"])
        )
        for entry in entries:
            assert len(entry["top_logprobs"]) == 3
            assert entry["logprob"] == max(top["logprob"] for top in entry["top_logprobs"]) < 0
        events = (await served.post(chat | {"stream": True})).events[:-1]
        choices = [event["choices"][0] for event in events]
        assert [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]] == entries

        text = {"prompt": "hi", "logprobs": 2, "temperature": 0, "max_tokens": 20, "prompt_logprobs": 1}
        (choice,) = (await served.post(text, "/v1/completions")).json()["choices"]
        told = choice["logprobs"]
        assert told["token_logprobs"] == [entry["logprob"] for entry in entries]
        assert told["tokens"] == [entry["token"] for entry in entries]
        begun = [bytes(byte for entry in entries[:i] for byte in entry["bytes"]) for i in range(20)]
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in begun]
        assert told["text_offset"] == [len(each.decode(text)) for each, text in zip(decoders, begun, strict=True)]
        assert all(1 <= len(top) <= 3 for top in told["top_logprobs"])
        first, second = choice["prompt_logprobs"]
        assert first is None
        assert second[str(ord("i"))]["decoded_token"] == "i"
        assert {entry["rank"] for entry in second.values()} >= {1}
        del text["prompt_logprobs"]
        events = (await served.post(text | {"stream": True}, "/v1/completions")).events[:-1]
        streamed = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
        assert {name: [value for part in streamed for value in part[name]] for name in told} == told

        body = served.chat(prompt_logprobs=0, max_tokens=1)
        answer = (await served.post(body)).json()
        assert [len(entry or ()) for entry in answer["prompt_logprobs"]] == [0, 1]
        assert answer["choices"][0]["logprobs"] is None


async def test_the_openai_client_reads_logprobs(open_served, byte_llama: Path):
    async with open_served(model=str(byte_llama), num_threads=1, num_gpu_blocks_override=64) as served:
        messages = [{"role": "user", "content": "hi"}]
        settings = {
            "model": byte_llama.name,
            "messages": messages,
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 4,
        }
        answer = await served.with_client(lambda client: client.chat.completions.create(**settings))
        content = answer.choices[0].logprobs.content
        assert [len(entry.top_logprobs) for entry in content] == [2] * 4


async def test_named_tokens_are_told_in_every_form_of_answer(open_served, byte_llama: Path):
    async with open_served(model=str(byte_llama), num_threads=1, num_gpu_blocks_override=64) as served:
        chat = served.chat(logprobs=True, logprob_token_ids=[65, 66], temperature=0)
        (choice,) = (await served.post(chat)).json()["choices"]
        for entry in choice["logprobs"]["content"]:
            assert [top["token"] for top in entry["top_logprobs"]] == ["A", "B"]
        text = {"prompt": "hi", "logprob_token_ids": [65], "max_tokens": 3, "ignore_eos": True}
        (choice,) = (await served.post(text, "/v1/completions")).json()["choices"]
        assert all("A" in top for top in choice["logprobs"]["top_logprobs"])
        for fields, param in (
            ({"logprobs": False}, "logprob_token_ids"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"logprob_token_ids": [256]}, "logprob_token_ids"),
        ):
            answer = await served.post(chat | fields)
            assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_stream_tells_in_intervals_and_a_long_prompt_is_truncated(served):
    answer = await served.post(served.chat(stream=True, stream_interval=3, max_tokens=11, temperature=0))
    pieces = [event["choices"][0]["delta"].get("content") for event in answer.events[:-1]]
    whole = (await served.post(served.chat(max_tokens=11, temperature=0))).json()["choices"][0]["message"]["content"]
    assert "".join(filter(None, pieces)) == whole
    assert len([piece for piece in pieces if piece]) <= 5
    long = {"prompt": "a" * 9000, "max_tokens": 2}
    assert (await served.post(long, "/v1/completions")).status == 400
    answer = await served.post(long | {"truncate_prompt_tokens": 7}, "/v1/completions")
    assert answer.json()["usage"]["prompt_tokens"] == 7
    answer = await served.post(long | {"truncate_prompt_tokens": -1}, "/v1/completions")
    assert answer.json()["usage"]["prompt_tokens"] == 8190
    answer = await served.post(served.chat(temperature=10**400))
    assert (answer.status, answer.error["param"]) == (400, "temperature")


@pytest.mark.parametrize("name", ["logits_processors", "extra_args"])
async def test_processors_of_programs_are_refused_over_http_by_name(served, name):
    answer = await served.post(served.chat(**{name: {}}))
    assert (answer.status, answer.error["param"]) == (400, name)


def test_a_tokens_place_is_counted_in_characters_also_where_one_is_spelled_in_several_tokens():
    place = TextPlace(load_tokenizer("null"), SamplingParams())
    text = "aé😀b".encode() + b"\xffc"
    assert [place.take(byte) for byte in text] == [0, 1, 1, 2, 2, 2, 2, 3, 4, 5]


@pytest.mark.parametrize("skips", [True, False])
def test_a_tokens_place_leaves_out_what_the_text_does(smollm2_folder, skips):
    tokenizer = load_tokenizer(smollm2_folder)
    params = SamplingParams(skip_special_tokens=skips, shown_token_ids=(1,))
    ids = tokenizer.encode("The<|im_end|>The<|im_start|><|endoftext|>The")
    assert {0, 1, 2} <= {*ids}
    place, detokenizer, text = TextPlace(tokenizer, params), Detokenizer(tokenizer, [], params), ""
    for token_id in ids:
        assert place.take(token_id) == len(text)
        text += detokenizer.update([token_id], False).text
