"""What forms of the text cost: the processor time of masks and of accepting tokens, as parts of one run."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec
from tqdm import tqdm

from engine.bench.forms import ALL, FORMS, MIX, forms_of
from engine.bench.report import Report, Table
from engine.bench.workload import Workload
from engine.client.inproc import InprocClient
from engine.config import EngineConfig
from engine.errors import Cause
from engine.llm_engine import LLMEngine
from engine.outputs import RequestId
from engine.sampling_params import SamplingParams
from engine.structured_output.grammar import Grammar
from engine.structured_output.params import structured_outputs_params
from engine.structured_output.timed import TimedGrammar


def structured(config: EngineConfig, workload: Workload, name: str) -> Report:
    """Complete the workload in the form `name`, or in each, drawn at temperature 1, and report what the forms cost."""
    names = [*FORMS, MIX] if name == ALL else [name]
    engine = LLMEngine(**msgspec.structs.asdict(config))
    settings = {"model": engine.model_name, "max_num_seqs": config.max_num_seqs} | workload.settings()
    report = Report("throughput", settings | {"structured": name})
    table = Table(["mask_us", "accept_us", "of_steps_%", "of_process_%", "tokens", "rows_a_step"])
    for each in names:
        table.rows[each] = Measured(engine, workload, forms_of(each)).row()
    report.add_table("structured", table)
    return report


class Measured:
    """One run of a workload in some forms, and what it took.

    Attributes:
        mask_s: Processor time of masks, `accept_s` that of accepting tokens, `steps_s` that of all steps, in seconds.
        num_masks: How many, as `num_accepts` and `num_steps`.
        process_s: Processor time of the whole run, compiling included.
    """

    def __init__(self, engine: LLMEngine, workload: Workload, forms: Sequence[dict[str, Any]]) -> None:
        """Complete `workload` in `forms`, in turn, with an engine in this thread."""
        self.mask_s = self.accept_s = self.steps_s = 0.0
        self.num_masks = self.num_accepts = self.num_steps = 0
        self._prompts = workload.prompts(engine.client.ready.vocab_size)
        self._params = [
            SamplingParams(
                max_tokens=workload.output_len,
                seed=workload.seed + index,
                structured_outputs=structured_outputs_params(forms[index % len(forms)]),
            )
            for index in range(workload.num_prompts)
        ]
        began_s = time.process_time()
        with self._measured(engine):
            self._run(engine)
        self.process_s = time.process_time() - began_s

    def row(self) -> list[float]:
        """Return the figures of a row."""
        spent_s = self.mask_s + self.accept_s
        return [
            1e6 * self.mask_s / max(1, self.num_masks),
            1e6 * self.accept_s / max(1, self.num_accepts),
            100 * spent_s / self.steps_s,
            100 * spent_s / self.process_s,
            self.num_accepts,
            self.num_masks / max(1, self.num_steps),
        ]

    def _run(self, engine: LLMEngine) -> None:
        """Keep as many requests live as run at once, until all have ended."""
        waiting = iter(enumerate(zip(self._prompts, self._params, strict=True)))
        with tqdm(total=len(self._prompts), unit="prompt", disable=not sys.stderr.isatty()) as bar:
            while True:
                room = engine.config.max_num_seqs - engine.num_unfinished_requests
                for index, (prompt, params) in itertools.islice(waiting, room):
                    engine.add_request(str(index), prompt, params)
                if not engine.has_unfinished_requests():
                    return
                bar.update(sum(output.finished for output in engine.step()))

    def _tell_mask(self, took_s: float) -> None:
        self.mask_s += took_s
        self.num_masks += 1

    def _tell_accepted(self, took_s: float, num_tokens: int) -> None:
        self.accept_s += took_s
        self.num_accepts += num_tokens

    @contextmanager
    def _measured(self, engine: LLMEngine) -> Iterator[None]:
        """Time what is done in `engine`, which is in this thread, for the block."""
        client = cast(InprocClient, engine.client)
        take_step, set_grammar = client.peek_output, client.core.set_grammar

        def timed_step() -> Any:
            began_s = time.process_time()
            output = take_step()
            self.steps_s += time.process_time() - began_s
            self.num_steps += 1
            return output

        def set_timed(request_id: RequestId, grammar: Grammar | Cause) -> None:
            if not isinstance(grammar, Cause):
                grammar = TimedGrammar(grammar, self._tell_mask, self._tell_accepted)
            set_grammar(request_id, grammar)

        client.peek_output = timed_step  # type: ignore[method-assign]
        client.core.set_grammar = set_timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            del client.peek_output, client.core.set_grammar
