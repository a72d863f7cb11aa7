"""Sampling parameters over HTTP, on a real model of 256 byte tokens; the integer model refuses what it cannot obey."""

from __future__ import annotations

from pathlib import Path

import pytest

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

        for name, value in (("allowed_token_ids", [256]), ("logit_bias", {"256": 1})):
            answer = await served.post(GREEDY | {name: value}, "/v1/completions")
            assert (answer.status, answer.error["param"]) == (400, name)
            assert "token id 256, which is outside the vocabulary: ids are from 0 to 255" in answer.error["message"]
        answer = await served.post(GREEDY | {"allowed_token_ids": [97], "bad_words": ["a"]}, "/v1/completions")
        assert answer.status == 500
        assert "no token is allowed" in answer.error["message"]
