"""Whatever a model writes, an answer is JSON: bytes that are no text, characters that the limit cuts, odd logprobs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import numpy as np

from engine.client.output_processor import Logprobs
from engine.client.tokenizer import load_tokenizer
from engine.sampling_params import SamplingParams
from web.logprobs import LEAST, TextPlace, of_chat, of_completion, of_prompt


async def test_random_bytes_come_as_the_same_text_whole_and_streamed_and_never_break_an_event(
    open_served, byte_llama: Path
):
    async with open_served(model=str(byte_llama), num_threads=1, num_gpu_blocks_override=64) as served:
        for seed in range(6):
            body = {"prompt": "x", "temperature": 2, "seed": seed, "max_tokens": 30, "ignore_eos": True}
            body |= {"logprobs": 1, "allowed_token_ids": [*range(0x78, 0x100)]}
            whole = (await served.post(body, "/v1/completions")).json()["choices"][0]
            *events, done = (await served.post(body | {"stream": True}, "/v1/completions")).events
            assert done == "[DONE]"
            assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == whole["text"]
            assert whole["finish_reason"] == "length"
            assert "\ufffd" in whole["text"]
            assert json.loads(json.dumps(whole)) == whole


async def test_a_character_that_the_limit_cuts_is_replaced_at_the_end(open_served, byte_llama: Path):
    async with open_served(model=str(byte_llama), num_threads=1, num_gpu_blocks_override=64) as served:
        body = {"prompt": "x", "max_tokens": 5, "structured_outputs": {"choice": ["a日b"]}, "ignore_eos": True}
        for max_tokens, text in ((1, "a"), (2, "a\ufffd"), (3, "a\ufffd"), (4, "a日"), (5, "a日b")):
            for stream in (False, True):
                answer = await served.post(body | {"max_tokens": max_tokens, "stream": stream}, "/v1/completions")
                choices = [event["choices"][0] for event in answer.events[:-1]] if stream else answer.json()["choices"]
                assert "".join(choice["text"] for choice in choices) == text


def test_what_no_json_number_holds_is_told_as_the_least() -> None:
    tokenizer = load_tokenizer("null")
    values = np.array([[-math.inf, 0.0]], dtype=np.float32)
    told = Logprobs(np.array([[200, 65]], dtype=np.int32), values, np.array([3], dtype=np.int32))
    for form in (
        of_chat(told, tokenizer, 0),
        of_completion(told, tokenizer, TextPlace(tokenizer, SamplingParams())),
        of_prompt(told, tokenizer),
    ):
        assert str(LEAST) in msgspec.json.encode(form).decode()
