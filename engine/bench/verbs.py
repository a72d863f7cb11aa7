"""The verb `bench`: from flags to a printed report."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from engine.bench.abort import Cuts, abort
from engine.bench.latency import latency
from engine.bench.perplexity import perplexity
from engine.bench.plot import draw
from engine.bench.profile import check_profile_dir
from engine.bench.report import Report, open_output
from engine.bench.scheduler import Sizes, scheduler
from engine.bench.serve import serve
from engine.bench.steps import add_steps
from engine.bench.structured import structured
from engine.bench.throughput import throughput
from engine.bench.transport import transport
from engine.bench.workload import Workload, check_count
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.flags import settings_from
from engine.program import EXIT_INTERRUPTED, EXIT_OK, until_stopped
from engine.signals import run_until_stopped
from engine.terminal import show


def run_throughput(options: argparse.Namespace) -> int:
    """Measure in this process; a KeyboardInterrupt passes through."""
    config, workload = _config(options), _workload(options)
    if options.structured is not None:
        if options.profile or options.plot is not None or options.logprobs is not None:
            raise ConfigError("--structured is a measurement of its own: leave out --profile, --plot and --logprobs")
        with open_output("--json", options.json) as write:
            _tell(structured(config, workload, options.structured), write)
        return EXIT_OK
    with open_output("--json", options.json) as write, open_output("--plot", options.plot) as write_plot:
        report = throughput(config, workload, is_profiled=options.profile, num_logprobs=options.logprobs)
        if options.plot is not None:
            panels = add_steps(report, config, workload)
            form = "" if config.quantization == "none" else f" in {config.quantization}"
            write_plot(draw(f"{config.model}{form}: a step that decodes, median", panels))
        _tell(report, write)
    return EXIT_OK


def run_latency(options: argparse.Namespace) -> int:
    """Measure an engine's single stream."""
    config, workload = _config(options), _workload(options)
    if options.profile and config.data_parallel_size > 1:
        raise ConfigError(
            f"--profile is of one engine: --data-parallel-size is {config.data_parallel_size}, leave it out"
        )
    return _run(options.json, partial(latency, config, workload, options.profile))


def run_serve(options: argparse.Namespace) -> int:
    """Measure a server's concurrent streams."""
    check_count("--num-streams", options.num_streams)
    config, workload = settings_from(options, EngineConfig), _workload(options)
    return _run(options.json, _until(partial(serve, config, options.url, options.num_streams, workload)))


def run_abort(options: argparse.Namespace) -> int:
    """Measure how long a server holds what was cut."""
    for flag in ("num_streams", "rounds", "input_len", "output_len"):
        check_count(f"--{flag.replace('_', '-')}", getattr(options, flag))
    if not options.within_ms >= 0:
        raise ConfigError(f"--within-ms must be at least 0, got {options.within_ms}")
    config = settings_from(options, EngineConfig)
    cuts = Cuts(options.num_streams, options.rounds, options.within_ms / 1000, options.seed)
    body = partial(abort, config, options.url, cuts, options.input_len, options.output_len)
    return _run(options.json, _until(body))


def run_perplexity(options: argparse.Namespace) -> int:
    """Measure in this process; a KeyboardInterrupt passes through."""
    check_count("--num-tokens", options.num_tokens)
    config = settings_from(options, EngineConfig)
    with open_output("--json", options.json) as write:
        _tell(perplexity(config, options.text, options.num_tokens), write)
    return EXIT_OK


def run_scheduler(options: argparse.Namespace) -> int:
    """Measure the core alone, in this process; a KeyboardInterrupt passes through."""
    for flag in ("num_running", "num_waiting", "num_blocks", "rounds"):
        check_count(f"--{flag.replace('_', '-')}", getattr(options, flag))
    sizes = Sizes(options.num_running, options.num_waiting, options.num_blocks, options.rounds)
    if sizes.num_blocks < sizes.least_blocks:
        raise ConfigError(
            f"--num-blocks {sizes.num_blocks} is too few for --num-running {sizes.num_running} and --rounds "
            f"{sizes.num_rounds}: it must be at least {sizes.least_blocks}"
        )
    with open_output("--json", options.json) as write:
        _tell(scheduler(options.scheduling_policy, sizes), write)
    return EXIT_OK


def run_transport(options: argparse.Namespace) -> int:
    """Measure messages between two processes."""
    if options.num_messages < 2:
        raise ConfigError(f"--num-messages must be at least 2, got {options.num_messages}")
    return _run(options.json, _until(partial(transport, options.num_messages)))


def _config(options: argparse.Namespace) -> EngineConfig:
    config = settings_from(options, EngineConfig)
    if options.profile and config.profile_dir is not None:
        check_profile_dir(Path(config.profile_dir))
    return config


def _workload(options: argparse.Namespace) -> Workload:
    for flag in ("num_prompts", "input_len", "output_len"):
        check_count(f"--{flag.replace('_', '-')}", getattr(options, flag))
    return Workload(options.num_prompts, options.input_len, options.output_len, options.seed)


def _until(body: Callable[[], Awaitable[Report]]) -> Callable[[trio.Event], Awaitable[Report | None]]:
    """Return what runs `body` and cancels it, then gives None, once `stop` is set."""

    async def run(stop: trio.Event) -> Report | None:
        report: Report | None = None

        async def keep_report() -> None:
            nonlocal report
            report = await body()

        await until_stopped(stop, keep_report)
        return report

    return run


def _run(json: Path | None, body: Callable[[trio.Event], Awaitable[Report | None]]) -> int:
    """Run `body` under Trio, a signal ends it, and tell its report."""

    async def run(stop: trio.Event) -> int:
        report = await body(stop)
        if report is None:
            return EXIT_INTERRUPTED
        _tell(report, write)
        return EXIT_OK

    with open_output("--json", json) as write:
        return trio.run(run_until_stopped, run)


def _tell(report: Report, write: Callable[[str], None]) -> None:
    show(report.render())
    write(report.as_text())


BENCHES = {
    "throughput": run_throughput,
    "latency": run_latency,
    "serve": run_serve,
    "abort": run_abort,
    "perplexity": run_perplexity,
    "scheduler": run_scheduler,
    "transport": run_transport,
}
"""By the name that follows `bench`."""
