"""Bench `throughput`: all prompts at once through `LLM`, in this process, as fast as they go."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import msgspec

from engine.bench.profile import TRACE_VIEWERS, StepProfile
from engine.bench.report import Report
from engine.bench.workload import Workload
from engine.config import EngineConfig
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.verbs import StartProfile, StopProfile


def throughput(
    config: EngineConfig, workload: Workload, *, is_profiled: bool, num_logprobs: int | None = None
) -> Report:
    """Complete the workload and report tokens a second and, if profiled, the split of a step.

    A profile is also written as a Chrome trace into the folder `config.profile_dir`.

    With `num_logprobs` each token is told with the logprobs of that many likeliest ones; what that costs is measured
    by further runs with and without, in turn.

    Raises:
        RequestError: Prompt and answer do not fit the context, or so many logprobs are not told.
    """
    params = msgspec.structs.replace(workload.params(), logprobs=num_logprobs)
    llm = LLM(**msgspec.structs.asdict(config))
    profile = StepProfile()
    trace: str | None = None
    prompts = workload.prompts(llm.ready.vocab_size)
    if is_profiled:
        llm.client.call(StartProfile())
    began_s = time.perf_counter()
    with profile.measure(llm) if is_profiled else nullcontext():
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    duration_s = time.perf_counter() - began_s
    if is_profiled:
        trace = llm.client.call(StopProfile())
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    settings = {"model": llm.model_name, "max_num_seqs": config.max_num_seqs} | workload.settings()
    settings |= {} if num_logprobs is None else {"logprobs": num_logprobs}
    report = Report("throughput", settings | {"prefix_caching": config.enable_prefix_caching})
    report.add("duration", duration_s, "s")
    report.add("request_throughput", workload.num_prompts / duration_s, "requests/s")
    report.add("output_throughput", num_output / duration_s, "tokens/s")
    report.add("total_throughput", (num_input + num_output) / duration_s, "tokens/s")
    report.add("preemptions", llm.stats().num_preemptions)
    if num_logprobs is not None:
        report.add("logprobs_in_processor_time", _cost_of_logprobs(llm, prompts, params), "%")
    if trace is not None:
        report.add("python_outside_the_forward", profile.python_share(), "%")
        report.add_table("step", profile.table())
        report.add_file("trace", trace, TRACE_VIEWERS)
    return report


def _cost_of_logprobs(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Return how much more processor time the prompts take with the logprobs of `params` than without, in percent."""
    plain = msgspec.structs.replace(params, logprobs=None)
    spent_s = {True: 0.0, False: 0.0}
    for with_logprobs in (False, True, True, False):
        llm.reset_prefix_cache()
        began_s = time.process_time()
        llm.generate(prompts, params if with_logprobs else plain, use_tqdm=False)
        spent_s[with_logprobs] += time.process_time() - began_s
    return 100 * (spent_s[True] / spent_s[False] - 1)
