"""What Python programs may add to sampling: a function of all rows of a step.

::

    class Repeat:
        def __call__(self, logits, rows):
            for i, row in enumerate(rows):
                if row.params.extra_args and len(row.output):
                    logits[i, row.output[-1]] += row.params.extra_args["repeat"]

    llm = engine.LLM(logits_processors=[Repeat()])
    llm.generate("a", engine.SamplingParams(extra_args={"repeat": 2.5}))

It is given to `LLM` and `LLMEngine` in the caller's thread; other processes and HTTP know none. What it does to a row
must depend on that row alone, or requests change each other's tokens. It is never asked to undo anything: a row that
comes again after a preemption has the tokens it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from engine.sampling.sampler import SamplingRow


class LogitsProcessor(Protocol):
    """Changes logits in place, after all parameters but temperature, top_k, top_p and min_p have been applied."""

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Change `logits`, float32 `[n, vocab_size]`; row i is that of `rows[i]`, which has all its tokens.

        They hold until this returns: copy what is to be kept.

        A token that is forbidden stays so, whatever its logit becomes: forms, allowed tokens and `min_tokens` hold. An
        exception fails the step: its requests end with the cause, and the second in a row ends the engine.
        """
