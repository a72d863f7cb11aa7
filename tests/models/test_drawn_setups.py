"""Requests in drawn set-ups through core and runner, on the operations in C: in each the bits they get alone.

A set-up is a choice of requests and of the steps in which they come, a budget of tokens a step, a pool of blocks, a
number of threads, and what the core is asked for. What the draws must have brought is counted. METRONOME_NUM_SETUPS=50
draws 100 in each storage form (50 a checkpoint) in place of 26.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_cache.spec import max_blocks_for
from engine.model_runner.model_runner import ModelRunner
from engine.outputs import Logprobs, RequestId
from engine.protocol import EngineCoreRequest
from engine.sampling_params import SamplingParams

MAX_MODEL_LEN = 1200
MAX_BUDGET = 2048
BLOCK_SIZE = 16
NUM_SETUPS = int(os.environ.get("METRONOME_NUM_SETUPS", "13"))
"""Of each checkpoint and form; those of a larger number begin with those of a smaller one."""
SIZES = {"vocab_size": 199, "hidden_size": 96, "intermediate_size": 160, "max_position_embeddings": 2048}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows, heads of 32": (
        "ministral with chosen windows",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 40},
    ),
    "windows and soft caps, heads of 64": (
        "gemma 2",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 2}
        | {"sliding_window": 21},
    ),
}
FORMS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
PAGES = {"float32": "int8", "bfloat16": "int8", "int8": "bfloat16", "int4": "bfloat16"}
"""What keys and values are in in every second set-up, in place of the form's default."""


class Asked(NamedTuple):
    """One request: its prompt, and how it is answered."""

    prompt: list[int]
    params: SamplingParams


class Answer(NamedTuple):
    """What a request got, as bits."""

    token_ids: tuple[int, ...]
    logprobs: tuple[bytes, ...]


class Setup(NamedTuple):
    """How requests, by their numbers, are run: each comes in a step of its own choice."""

    arrivals: list[tuple[int, int]]
    budget: int
    num_threads: int
    pool: float
    settings: dict[str, Any]


@functools.cache
def all_requests() -> list[Asked]:
    """Return the requests that all set-ups draw from: of all lengths, half of them begin as another does."""
    draw = random.Random(11)
    lengths = [1, 14, 16, 17, 31, 47, 64, 81, 96, 150, 260, 1030]
    prompts = [draw.choices(range(199), k=length) for length in lengths]
    shared = {5: 32, 6: 50, 7: 64, 8: 80, 9: 144, 10: 200, 11: 560}
    prompts += [prompts[i][:length] + draw.choices(range(199), k=15) for i, length in shared.items()]
    params = [
        SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            seed=i,
            max_tokens=draw.choice([2, 20, 40]) if len(prompt) < 100 else 3,
            logprobs=draw.choice([0, 4]),
            prompt_logprobs=2 if i % 6 == 5 else None,
            ignore_eos=True,
        )
        for i, prompt in enumerate(prompts)
    ]
    return [Asked(*both) for both in zip(prompts, params, strict=True)]


def draw_setup(draw: random.Random) -> Setup:
    """Draw a set-up. A budget of few tokens gets short prompts alone: it takes a step for each."""
    budget = min(MAX_BUDGET, int(2 ** draw.uniform(0, 11.1)))
    longest = min(30 * budget, draw.choice([50, 100, 300, MAX_MODEL_LEN]))
    suited = [i for i, asked in enumerate(all_requests()) if len(asked.prompt) <= longest]
    chosen = draw.sample(suited, min(len(suited), draw.randint(3, 12)))
    arrivals = [(index, draw.choice([0, 0, 3, 20])) for index in chosen]
    settings = {
        "max_num_seqs": min(budget, draw.choice([3, 16])),
        "long_prefill_token_threshold": draw.choice([0, 0, 7, 100]),
        "enable_prefix_caching": draw.random() < 0.85,
    }
    return Setup(arrivals, budget, draw.choice([1, 2]), draw.choice([0.0, 0.0, 0.3, 4.0]), settings)


class Runners:
    """The runners of one checkpoint in one form, for both numbers of threads, and what was seen of their steps."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.seen: Counter[str] = Counter()
        self._runners = {}
        for num_threads in (1, 2):
            config = EngineConfig(
                kernels="compiled",
                num_threads=num_threads,
                num_gpu_blocks_override=400,
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=MAX_BUDGET,
                **settings,
            )
            self._runners[num_threads] = ModelRunner(config, folder)
            self._runners[num_threads].start(lambda *call: None)

    @functools.cache  # noqa: B019 -- lives as long as its test
    def alone(self, index: int) -> Answer:
        """Answer one request with the whole machine for itself, its prompt in one step."""
        return self.run(Setup([(index, 0)], MAX_BUDGET, 1, 3.0, {"enable_prefix_caching": False}))[index]

    def run(self, setup: Setup) -> dict[int, Answer]:
        """Run a set-up to its end."""
        core = self._core(setup)
        runner = self._runners[setup.num_threads]
        awaited = sorted(setup.arrivals, key=lambda arrival: arrival[1], reverse=True)
        tokens: dict[int, list[int]] = {index: [] for index, _ in setup.arrivals}
        bits: dict[int, list[bytes]] = {index: [] for index, _ in setup.arrivals}
        num_steps = 0
        while awaited or core.has_work:
            while awaited and (awaited[-1][1] <= num_steps or not core.has_work):
                self._add(core, awaited.pop()[0])
            num_steps += 1
            plan = core.plan(0.0)
            assert plan is not None
            self.seen["steps of several requests"] += len(plan.requests) > 1
            self.seen["chunks"] += sum(row.num_tokens > 1 and not row.samples for row in plan.requests)
            runner.execute(plan)
            core.commit(plan, runner.sample(), 0.0)
            for output in core.take_outputs():
                index = int(output.request_id)
                tokens[index] += output.new_token_ids
                bits[index] += [_bits(each) for each in (output.prompt_logprobs, output.logprobs) if each is not None]
                assert output.error is None
        core.check_invariants()
        assert all(len(bits[index]) >= len(tokens[index]) > 0 for index in tokens)
        self.seen["preemptions"] += core.stats().num_preemptions
        self.seen["hits"] += core.stats().prefix_cache_hits
        return {index: Answer(tuple(tokens[index]), tuple(bits[index])) for index in tokens}

    def _core(self, setup: Setup) -> EngineCore:
        fields = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": setup.budget, "max_num_seqs": 1}
        capacity = self._runners[setup.num_threads].capacity
        most = max(map(_num_tokens, (all_requests()[index] for index, _ in setup.arrivals)))
        least = max_blocks_for(capacity.kv_cache_groups, most, BLOCK_SIZE, setup.budget)
        num_blocks = min(capacity.num_kv_blocks, 1 + int(least * (1 + setup.pool)))
        capacity = msgspec.structs.replace(capacity, num_kv_blocks=num_blocks)
        return EngineCore(EngineConfig(**(fields | setup.settings)), capacity)

    def _add(self, core: EngineCore, index: int) -> None:
        prompt, params = all_requests()[index]
        core.add(EngineCoreRequest(RequestId(str(index)), "", prompt, params, arrival_time=0.0), now=0.0)


def _num_tokens(asked: Asked) -> int:
    assert asked.params.max_tokens is not None
    return len(asked.prompt) + asked.params.max_tokens


def _bits(logprobs: Logprobs) -> bytes:
    assert np.isfinite(logprobs.logprobs).all()
    return b"".join(part.tobytes() for part in (logprobs.token_ids, logprobs.logprobs, logprobs.ranks))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("form", FORMS)
def test_each_request_gets_the_bits_it_gets_alone(form: str, checkpoint: str, make_checkpoint: Any) -> None:
    family, changes = CHECKPOINTS[checkpoint]
    folder, _ = make_checkpoint(family, **(SIZES | changes))
    draw = random.Random(f"{form}, {checkpoint}")
    kinds = [Runners(folder, FORMS[form] | {"kv_cache_dtype": pages}) for pages in ("auto", PAGES[form])]
    for number in range(NUM_SETUPS):
        setup, runners = draw_setup(draw), kinds[number % 2]
        for index, answer in runners.run(setup).items():
            assert answer == runners.alone(index), (number, index, setup)
    seen = kinds[0].seen + kinds[1].seen
    assert seen["steps of several requests"] > 100
    assert seen["chunks"] > 100
    assert seen["preemptions"] > 2
    assert seen["hits"] > 0
