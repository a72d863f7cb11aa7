"""Bench `serve`: concurrent streams over real sockets, each slot asking again when its stream has ended."""

from __future__ import annotations

import secrets
from collections import deque
from typing import Any

import msgspec
import trio
from tqdm import tqdm

from engine.bench.http_client import check, open_answer
from engine.bench.report import Report
from engine.bench.server import Server, open_server
from engine.bench.workload import StreamTimes, Workload
from engine.config import EngineConfig
from engine.errors import Cause, EngineDeadError


async def serve(config: EngineConfig, url: str | None, num_streams: int, workload: Workload) -> Report:
    """Complete the workload over `num_streams` sockets at once and report the times their tokens came."""
    async with open_server(config, url) as server:
        times = StreamTimes()
        waiting = deque(completion_body(server, prompt, workload) for prompt in workload.prompts(server.vocab_size))
        began_s = trio.current_time()
        with tqdm(total=len(waiting), desc="Streams", unit="stream", disable=None) as bar:
            async with trio.open_nursery() as nursery:
                for _ in range(num_streams):
                    nursery.start_soon(_ask_all, server, waiting, times, bar)
        duration_s = trio.current_time() - began_s
        report = Report("serve", {"model": server.model, "num_streams": num_streams} | workload.settings())
        report.add("duration", duration_s, "s")
        report.add("request_throughput", workload.num_prompts / duration_s, "requests/s")
        report.add("output_throughput", times.num_tokens / duration_s, "tokens/s")
        report.add(
            "total_throughput", (times.num_tokens + workload.num_prompts * workload.input_len) / duration_s, "tokens/s"
        )
        times.describe(report)
        return report


def completion_body(server: Server, prompt: list[int], workload: Workload) -> dict[str, Any]:
    """Return the body of a streamed completion; its salt keeps it from hitting an earlier run's prefixes."""
    return {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": workload.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": secrets.token_hex(8),
    }


async def read_stream(server: Server, body: dict[str, Any], times: StreamTimes) -> None:
    """Ask for one stream and read it to its end.

    Raises:
        ConfigError: The server refused it.
        EngineDeadError: The stream ended by an error.
    """
    stream_times = times.open(trio.current_time())
    async with open_answer(server.address, "/v1/completions", body) as answer:
        if answer.status != 200:
            check(answer.status, await answer.body())
        while (data := await answer.next_event()) is not None:
            now_s = trio.current_time()
            event = msgspec.json.decode(data)
            if "error" in event:
                raise EngineDeadError(Cause("StreamFailed", str(event["error"].get("message"))))
            if event["choices"]:
                stream_times.add(now_s)
            if event.get("usage"):
                stream_times.close(event["usage"]["completion_tokens"])


async def _ask_all(server: Server, waiting: deque[dict[str, Any]], times: StreamTimes, bar: tqdm) -> None:
    while waiting:
        await read_stream(server, waiting.popleft(), times)
        bar.update()
