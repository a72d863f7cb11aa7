"""The executor: whatever runs a plan. One contract for a thread, processes, nodes and the null model.

A step has two halves, so that grammar masks can be computed while the forward runs: `execute` launches the forward and
`Execution.sample` gives the masks; both return at once, and `Execution.result` waits. Plans are run in the order given,
each sampled before the next is executed: a later plan may need its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from engine.config import EngineConfig
from engine.outputs import Capacity, GrammarMasks, ModelRunnerOutput, SchedulerOutput
from engine.verbs import SleepTag, Verb

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total) in the Trio thread while an executor starts; total 0 means unknown."""


class Execution(Protocol):
    """A plan that was launched."""

    def sample(self, grammar_masks: GrammarMasks | None) -> None:
        """Give the masks of the plan's `grammar_rows`, None where it has none, and return at once.

        To be called once, before another plan is launched.
        """
        ...

    async def result(self) -> ModelRunnerOutput:
        """Wait for the step's end.

        A step cannot be cancelled: the wait is shielded, a cancellation is seen at the next checkpoint.

        Raises:
            ExecutorDead: The worker was lost; no further step can run.
            Exception: The step itself failed; the executor still runs.
        """
        ...


class Executor(Protocol):
    """Runs plans; owned by one `async with` of the engine, which awaits `start` first and `aclose` last."""

    async def start(self, config: EngineConfig, progress: Progress) -> Capacity:
        """Load and warm up. Phases in order: weights, kv_specs, profile, kv_pages, warm_up.

        Raises:
            ConfigError: The configuration cannot be had on this machine.
            ModelError: The model cannot be served.
        """
        ...

    def execute(self, plan: SchedulerOutput) -> Execution:
        """Launch `plan` and return at once; an empty plan is legal and only carries finished ids."""
        ...

    async def call(self, verb: Verb) -> Any:
        """Run one utility verb between steps, see `runner_verbs.call_runner`; raises what the verb raises.

        Shielded, as a step is.

        Raises:
            ExecutorDead: The worker was lost.
        """
        ...

    def abandon(self) -> None:
        """Count the worker as lost: who waits for it learns at once, and `aclose` does not wait for it."""
        ...

    async def aclose(self) -> None:
        """End the worker and free everything; idempotent, shielded, also after a failed start."""
        ...


class Runner(Protocol):
    """The synchronous twin of an executor: a step in two halves, as plain calls."""

    @property
    def capacity(self) -> Capacity:
        """What `start` returned."""
        ...

    def start(self, progress: Progress) -> Capacity:
        """Load and warm up; phases as in `Executor.start`."""
        ...

    def execute(self, plan: SchedulerOutput) -> None:
        """Run the forward of `plan`."""
        ...

    def sample(self, grammar_masks: GrammarMasks | None = None) -> ModelRunnerOutput:
        """Sample for the plan executed last; to be called before the next is executed."""
        ...

    def sleep(self, level: int) -> None:
        """Give back keys and values (level 1) and the weights too (2); no plan is in flight. Idempotent."""
        ...

    def wake_up(self, tags: Iterable[SleepTag]) -> None:
        """Take back what `tags` name and sleeps; pages come back empty."""
        ...

    def save_sharded_state(self, path: Path, max_size_bytes: int) -> list[str]:
        """Write the model into the new folder `path` in shards of at most `max_size_bytes`; return their names."""
        ...

    def memory(self) -> dict[str, int]:
        """Return the bytes held now, by what holds them: kv_cache, weights, and the process as a whole."""
        ...
