"""Bench `latency`: one stream at a time, as a program that opens an engine sees it."""

from __future__ import annotations

from pathlib import Path

import trio
from tqdm import tqdm

from engine.bench.profile import TRACE_VIEWERS, table_of_trace
from engine.bench.report import Report
from engine.bench.workload import StreamTimes, Workload
from engine.client.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.program import until_stopped, with_engine


async def latency(config: EngineConfig, workload: Workload, is_profiled: bool, stop: trio.Event) -> Report | None:
    """Stream the workload's prompts one after the other; None where `stop` was set before the end.

    If profiled, the split of a step is told too, and written as a Chrome trace into the folder `config.profile_dir`.
    """
    report: Report | None = None

    async def measure(llm: AsyncLLM) -> None:
        nonlocal report
        times = StreamTimes()
        *prompts, other = workload._replace(num_prompts=workload.num_prompts + 1).prompts(llm.ready.vocab_size)
        await _stream(llm, other, workload._replace(output_len=2), StreamTimes())  # not counted: all is cold
        if is_profiled:
            await llm.start_profile()
        for prompt in tqdm(prompts, desc="Streams", unit="stream", disable=None):
            await _stream(llm, prompt, workload, times)
        report = Report("latency", {"model": llm.model_name} | workload.settings())
        report.add("output_throughput", times.num_tokens / sum(times.whole_s), "tokens/s")
        times.describe(report)
        if is_profiled:
            trace = await llm.stop_profile()
            report.add_table("step", table_of_trace(Path(trace)))
            report.add_file("trace", trace, TRACE_VIEWERS)

    await with_engine(config, stop, lambda llm: until_stopped(stop, lambda: measure(llm)))
    return report


async def _stream(llm: AsyncLLM, prompt: list[int], workload: Workload, times: StreamTimes) -> None:
    stream_times = times.open(trio.current_time())
    async with llm.generate(prompt, workload.params()) as stream:
        async for delta in stream:
            if delta.token_ids:
                stream_times.add(trio.current_time())
        stream_times.close(stream.usage.completion_tokens)
