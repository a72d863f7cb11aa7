"""How long a step takes that decodes: by the context of one request, and by the number of requests at one context.

The engine runs in this thread. Prompts are computed once and stay in the prefix cache but for their last token, so that
all requests of a measurement begin in one step, and decode in every further one. Points are visited in a drawn order,
round after round, so that what else the machine does for a while does not meet neighbours alone.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from tqdm import tqdm

from engine.bench.plot import Panel
from engine.bench.report import Report, Table
from engine.bench.workload import Workload
from engine.client.inproc import InprocClient
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache.spec import max_blocks_for
from engine.llm_engine import LLMEngine
from engine.sampling_params import OutputKind, SamplingParams

MAX_POINTS = 33
"""Contexts, and numbers of requests, that are measured."""
NUM_ROUNDS = 3
NUM_STEPS = 8
"""Timed steps of each point and round."""


class Curve(NamedTuple):
    """Times of a step against one quantity.

    Attributes:
        xs: Of that quantity, ascending.
        times_s: Of each, the median step.
    """

    xs: Sequence[int]
    times_s: Sequence[float]

    def line(self) -> tuple[float, float]:
        """Return the line nearest to the points, all by their share: its height at 0, its slope; flat for one point."""
        if len(self.xs) == 1:
            return self.times_s[0], 0.0
        slope, base = np.polyfit(self.xs, self.times_s, 1, w=1 / np.array(self.times_s))
        return float(base), float(slope)

    def table(self, unit: str) -> Table:
        """Return each point beside the line; how far it is off is a share of the point."""
        base, slope = self.line()
        table = Table(["median_ms", "line_ms", "off_percent"])
        for x, time_s in zip(self.xs, self.times_s, strict=True):
            line_s = base + slope * x
            table.rows[f"{x}_{unit}s"] = [1000 * time_s, 1000 * line_s, 100 * (1 - line_s / time_s)]
        return table


def add_steps(report: Report, config: EngineConfig, workload: Workload) -> list[Panel]:
    """Measure with an engine of its own, add tables and lines to `report`, and return what to draw.

    Args:
        report: Of the bench.
        config: Of the engine, but for the prefix cache, which is on.
        workload: Its prompts' length, in whole blocks, is the context at which the numbers of requests are compared.

    Raises:
        ConfigError: The context is too short to measure anything.
    """
    with LLMEngine(**msgspec.structs.asdict(config) | {"enable_prefix_caching": True}) as engine:
        bench = _StepBench(engine, workload)
        by_context, by_requests = bench.by_context(), bench.by_requests()
        context = bench.context
    panels = []
    for name, unit, curve, title in (
        ("step_by_context", "token", by_context, "1 request, by its context"),
        ("step_by_requests", "request", by_requests, f"{context} tokens of context, by requests"),
    ):
        base, slope = curve.line()
        table = curve.table(unit)
        report.add(f"{name}_base", 1000 * base, "ms")
        report.add(f"{name}_for_each_{unit}", 1e6 * slope, "us")
        report.add(f"{name}_farthest_off_the_line", max(abs(off) for _, _, off in table.rows.values()), "%")
        report.add_table(name, table)
        points = [(x, 1000 * time_s) for x, time_s in zip(curve.xs, curve.times_s, strict=True)]
        panels.append(Panel(title, unit, points, (1000 * base, 1000 * slope)))
    return panels


class _StepBench:
    """Decodes with `engine`, which has nothing else to do.

    Attributes:
        context: At which numbers of requests are compared, in tokens.
    """

    def __init__(self, engine: LLMEngine, workload: Workload) -> None:
        self._engine = engine
        self._workload = workload
        self._num_requests = 0
        block_size, longest = engine.client.ready.block_size, engine.client.ready.max_model_len - NUM_STEPS - 2
        # All but the last token of whole blocks and one more come from the cache.
        self._contexts = range(block_size + 1, longest + 1, block_size)
        if not self._contexts:
            raise ConfigError(
                f"--plot needs a context of {block_size + 1 + NUM_STEPS + 2} tokens, --max-model-len is "
                f"{engine.client.ready.max_model_len}: raise it or lower --block-size {block_size}"
            )
        self.context = self._contexts[min(max(1, workload.input_len // block_size), len(self._contexts)) - 1]

    def by_context(self) -> Curve:
        """Time steps of one request."""
        contexts = [length for length in self._contexts if self._fits(1, length)]
        (prompt,) = self._prompts(1, contexts[-1])
        return self._measure("Contexts", {length: [prompt[:length]] for length in _spread(contexts)})

    def by_requests(self) -> Curve:
        """Time steps of one request up to as many as a step may have, or as the KV blocks hold."""
        counts = [n for n in range(1, self._engine.config.max_num_seqs + 1) if self._fits(n, self.context)]
        prompts = self._prompts(counts[-1], self.context)
        return self._measure("Requests", {n: prompts[:n] for n in _spread(counts)})

    def _prompts(self, number: int, length: int) -> list[list[int]]:
        workload = self._workload._replace(num_prompts=number, input_len=length)
        return workload.prompts(self._engine.client.ready.vocab_size)

    def _fits(self, number: int, length: int) -> bool:
        client, config = self._engine.client, self._engine.config
        assert isinstance(client, InprocClient)
        groups, num_tokens = client.core.capacity.kv_cache_groups, length + NUM_STEPS + 1
        num_blocks = max_blocks_for(groups, num_tokens, client.ready.block_size, config.max_num_batched_tokens)
        return number == 1 or number * num_blocks <= (1 - config.watermark) * client.ready.num_kv_blocks

    def _measure(self, name: str, points: dict[int, list[list[int]]]) -> Curve:
        """Return the median step that decodes a point's prompts, all together; points without any are left out."""
        times_s: defaultdict[int, list[float]] = defaultdict(list)
        self._decode(max(points.values(), key=lambda prompts: sum(map(len, prompts))), num_tokens=1)
        draw = random.Random(self._workload.seed)
        order = [x for _ in range(NUM_ROUNDS) for x in draw.sample(list(points), len(points))]
        for x in tqdm(order, desc=name, unit="point", disable=not sys.stderr.isatty()):
            times_s[x] += self._decode(points[x], num_tokens=1 + NUM_STEPS)
        xs = [x for x in points if times_s[x]]
        return Curve(xs, [statistics.median(times_s[x]) for x in xs])

    def _decode(self, prompts: list[list[int]], num_tokens: int) -> list[float]:
        """Answer all prompts with `num_tokens`; return the times of the steps that gave each a further token."""
        engine, times_s, decodes = self._engine, [], False
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, output_kind=OutputKind.DELTA
        )
        for prompt in prompts:
            self._num_requests += 1
            engine.add_request(f"{self._num_requests}", prompt, params)
        while engine.has_unfinished_requests():
            began_s = time.perf_counter()
            num_told = len(engine.step())
            if decodes and num_told == len(prompts):
                times_s.append(time.perf_counter() - began_s)
            decodes = num_told == len(prompts)
        return times_s


def _spread(values: Sequence[int]) -> list[int]:
    """Return at most `MAX_POINTS` of ascending values, the first and the last among them, evenly spread."""
    if len(values) <= MAX_POINTS:
        return list(values)
    return [values[round(i)] for i in np.linspace(0, len(values) - 1, MAX_POINTS)]
