"""The default model, really: its answers, its tokens against transformers, and the same text on all three ways in."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import engine
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
NUM_NEW_TOKENS = 64

pytestmark = pytest.mark.slow


def drawn_prompts() -> list[list[int]]:
    """Twenty prompts of 1 to 600 tokens, of ids that are no control tokens."""
    rng = random.Random(1)
    lengths = [1, 2, 15, 16, 17, 31, 64, 65, 100, 600] + [rng.randint(1, 600) for _ in range(10)]
    return [[rng.randrange(100, 49000) for _ in range(length)] for length in lengths]


def assert_eager_is_greedy(folder: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Assert that each answer is what transformers' eager model gives greedily.

    One forward over prompt and answer shows it: where every token is the arg max of what stands before it, greedy
    generation takes the same path, token by token. Three prompts are generated as well, as a check of that.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_NEW_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    model.generation_config.eos_token_id = None
    for prompt, answer in list(zip(prompts, answers, strict=True))[:3]:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": NUM_NEW_TOKENS, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert out[0, len(prompt) :].tolist() == answer


def test_greedy_tokens_equal_transformers_eager_in_one_chunked_and_preempted_batch(smollm2_folder: Path) -> None:
    prompts = drawn_prompts()
    llm = engine.LLM(
        str(smollm2_folder),
        dtype="float32",
        max_num_seqs=20,
        max_num_batched_tokens=64,
        max_model_len=700,
        num_gpu_blocks_override=150,
        num_threads=2,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats().num_preemptions > 0
    assert_eager_is_greedy(smollm2_folder, prompts, [output.outputs[0].token_ids for output in outputs])


@pytest.fixture(scope="module")
def reference(smollm2_folder: Path) -> str:
    """What `LLM` says to the question all ways in are asked."""
    (output,) = engine.LLM(str(smollm2_folder), max_model_len=512, num_threads=1).chat(FRANCE, GREEDY, use_tqdm=False)
    return output.outputs[0].text


def test_the_capital_of_france_is_paris(reference: str) -> None:
    assert "Paris" in reference


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_every_isolation_gives_the_text_of_llm(smollm2_folder: Path, reference: str, isolation: str) -> None:
    async with engine.open_engine(str(smollm2_folder), isolation=isolation, max_model_len=512, num_threads=1) as llm:
        answer = await llm.chat(FRANCE, GREEDY)
    assert answer.outputs[0].text == reference


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_llm_engine_gives_the_text_of_llm_step_by_step(smollm2_folder: Path, reference: str, isolation: str) -> None:
    settings = {"max_model_len": 512, "num_threads": 1, "log_level": "warning"}
    with engine.LLMEngine(str(smollm2_folder), isolation=isolation, **settings) as llm_engine:
        llm_engine.add_request("france", FRANCE, GREEDY)
        texts = []
        while llm_engine.has_unfinished_requests():
            texts += [output.outputs[0].text for output in llm_engine.step()]
    assert texts[-1] == reference
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))


@pytest.mark.parametrize("stream", [False, True])
def test_served_text_is_that_of_llm(start_server: Any, smollm2_folder: Path, reference: str, stream: bool) -> None:
    server = start_server(str(smollm2_folder), "--max-model-len", "512", "--num-threads", "1")
    body = {"messages": FRANCE, "temperature": 0, "max_tokens": GREEDY.max_tokens, "stream": stream}
    response = server.post("/v1/chat/completions", body)
    if stream:
        *chunks, done = server.events(response)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert done == "[DONE]"
    else:
        text = json.loads(response.read())["choices"][0]["message"]["content"]
    assert text == reference
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_a_front_process_with_a_real_model_never_has_torch_or_transformers(smollm2_folder: Path) -> None:
    program = f"""
import json, sys, trio, engine, engine.cli, web.serve
async def main():
    async with engine.open_engine({str(smollm2_folder)!r}, max_model_len=512, num_threads=1) as llm:
        answer = await llm.chat({FRANCE!r}, engine.SamplingParams(temperature=0, max_tokens=8))
        return answer.outputs[0].text
text = trio.run(main)
print(json.dumps([text, sorted({{"torch", "transformers"}} & set(sys.modules))]))
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    text, modules = json.loads(run.stdout)
    assert "Paris" in text
    assert modules == []
