"""Every family through the model runner, on plans made by hand: greedy tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.kv_cache.spec import NULL_BLOCK, num_skipped_blocks
from engine.model_runner.model_runner import ModelRunner
from engine.outputs import RequestId, ScheduledRequest, SchedulerOutput
from engine.sampling_params import SamplingParams

BLOCK_SIZE = 4
BLOCKS_A_REQUEST = 16
MAX_MODEL_LEN = 64
MAX_TOKENS = 6
NUM_BLOCKS = 1500


def draw_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [draw_prompt(34 + 3 * i, seed=i) for i in range(8)]


class Driver:
    """Stands where the core will: keeps tokens and blocks, and takes back what no window reaches any more."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(
            num_threads=1, num_gpu_blocks_override=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN
        )
        self.runner = ModelRunner(config, folder)
        self.groups = self.runner.start(lambda *call: None).kv_cache_groups
        self.step_number = 0
        self.restart()

    def restart(self) -> None:
        self.free = list(range(NUM_BLOCKS, 0, -1))
        self.tokens: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}
        self.tables: dict[str, list[np.ndarray]] = {}

    def add(self, name: str, prompt: list[int], hit: tuple[str, int] | None = None) -> None:
        """Add a request; `hit`: another one with the same first tokens, and how many of them count as computed."""
        self.tokens[name] = list(prompt)
        self._take_blocks(name)
        if hit is not None:
            other, self.num_computed[name] = hit
            for mine, theirs in zip(self.tables[name], self.tables[other], strict=True):
                num_blocks = self.num_computed[name] // BLOCK_SIZE
                mine[:num_blocks] = theirs[:num_blocks]

    def preempt(self, name: str) -> None:
        self._take_blocks(name)

    def step(self, num_tokens: dict[str, int]) -> None:
        self.step_number += 1
        plan = SchedulerOutput(
            step=self.step_number, requests=tuple(self._row(name, num) for name, num in num_tokens.items())
        )
        self.runner.execute(plan)
        for name, sampled in zip(num_tokens, self.runner.sample().sampled_token_ids, strict=True):
            self.tokens[name] += sampled

    def generate(self, budget: int = 1000) -> dict[str, list[int]]:
        """Run every request to its end, at most `budget` tokens of each a step; returns what each generated."""
        ends = {name: len(PROMPTS[int(name)]) + MAX_TOKENS for name in self.tokens}
        while running := [name for name, end in ends.items() if len(self.tokens[name]) < end]:
            self.step({name: min(budget, len(self.tokens[name]) - self.num_computed[name]) for name in running})
        return {name: tokens[-MAX_TOKENS:] for name, tokens in self.tokens.items()}

    def _take_blocks(self, name: str) -> None:
        self.num_computed[name] = 0
        self.tables[name] = [
            np.array([self.free.pop() for _ in range(BLOCKS_A_REQUEST)], dtype=np.int32) for _ in self.groups
        ]

    def _row(self, name: str, num_tokens: int) -> ScheduledRequest:
        start = self.num_computed[name]
        self.num_computed[name] += num_tokens
        for group, table in zip(self.groups, self.tables[name], strict=True):
            table[: num_skipped_blocks(group, start, BLOCK_SIZE)] = NULL_BLOCK
        return ScheduledRequest(
            request_id=RequestId(name),
            tokens=np.array(self.tokens[name], dtype=np.int32),
            start=start,
            num_tokens=num_tokens,
            block_tables=tuple(table.copy() for table in self.tables[name]),
            samples=start + num_tokens == len(self.tokens[name]),
            sampling_params=SamplingParams(temperature=0),
        )


@torch.inference_mode()
def is_greedy(model: Any, prompt: list[int], generated: list[int]) -> bool:
    """Tell whether transformers, given each beginning, would go on with the next generated token."""
    logits = model(torch.tensor([prompt + generated]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist() == generated


def test_greedy_tokens_are_those_of_transformers_however_the_steps_are_cut(family: str, make_checkpoint: Any) -> None:
    folder, model = make_checkpoint(family)
    driver = Driver(folder)
    alone = {}
    for i, prompt in enumerate(PROMPTS):
        driver.restart()
        driver.add(str(i), prompt)
        alone |= driver.generate()
    assert all(is_greedy(model, prompt, alone[str(i)]) for i, prompt in enumerate(PROMPTS))

    driver.restart()
    for i, prompt in enumerate(PROMPTS):
        driver.add(str(i), prompt)
    assert driver.generate() == alone

    driver.restart()
    for i, prompt in enumerate(PROMPTS):
        driver.add(str(i), prompt)
    for num_steps in range(1, 9):
        driver.step(dict.fromkeys(driver.tokens, 4))
        if num_steps % 3 == 0:
            driver.preempt(str(num_steps // 3))
    assert driver.generate(budget=5) == alone


def test_a_request_that_hits_another_s_beginning_gets_the_tokens_it_gets_alone(
    family: str, make_checkpoint: Any
) -> None:
    driver = Driver(make_checkpoint(family)[0])
    driver.add("3", PROMPTS[3])
    alone = driver.generate()["3"]
    driver.restart()
    driver.add("first", [*PROMPTS[3][:28], 7, 8, 9])
    driver.step({"first": 28})
    driver.add("3", PROMPTS[3], hit=("first", 28))
    while len(driver.tokens["3"]) < len(PROMPTS[3]) + MAX_TOKENS:
        driver.step({"first": 1, "3": min(5, len(driver.tokens["3"]) - driver.num_computed["3"])})
    assert driver.tokens["3"][-MAX_TOKENS:] == alone
