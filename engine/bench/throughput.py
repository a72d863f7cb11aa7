"""Bench `throughput`: all prompts at once through `LLM`, in this process, as fast as they go."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import msgspec

from engine.bench.profile import StepProfile
from engine.bench.report import Report
from engine.bench.workload import Workload
from engine.config import EngineConfig
from engine.llm import LLM


def throughput(config: EngineConfig, workload: Workload, *, is_profiled: bool) -> Report:
    """Complete the workload and report tokens a second and, if profiled, the split of a step.

    Raises:
        RequestError: Prompt and answer do not fit the context.
    """
    llm = LLM(**msgspec.structs.asdict(config))
    profile = StepProfile()
    prompts, params = workload.prompts(llm.ready.vocab_size), workload.params()
    began_s = time.perf_counter()
    with profile.measure(llm) if is_profiled else nullcontext():
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    duration_s = time.perf_counter() - began_s
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    settings = {"model": llm.model_name, "max_num_seqs": config.max_num_seqs} | workload.settings()
    report = Report("throughput", settings | {"prefix_caching": config.enable_prefix_caching})
    report.add("duration", duration_s, "s")
    report.add("request_throughput", workload.num_prompts / duration_s, "requests/s")
    report.add("output_throughput", num_output / duration_s, "tokens/s")
    report.add("total_throughput", (num_input + num_output) / duration_s, "tokens/s")
    report.add("preemptions", llm.stats().num_preemptions)
    if is_profiled:
        report.add("python_outside_the_forward", profile.python_share(), "%")
        report.add_table("step", profile.table())
    return report
