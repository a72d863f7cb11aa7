"""Where the time of a step goes: timers laid around an engine's calls for a block, and taken off after it.

Off, they cost nothing, for they are not there. The runner's own timings (flatten, operations by kind, the rest of the
forward, logits, sample) are read from the results of its steps. Of an engine in a process of its own those are read
from the trace that it has written.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from engine.bench.report import Table
from engine.client.inproc import InprocClient
from engine.errors import ConfigError
from engine.llm import LLM
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.protocol import EngineCoreOutputs
from transport.codec import Encoder

TRACE_VIEWERS = "chrome://tracing or ui.perfetto.dev"
OUTSIDE_THE_MODEL = {"flatten", "sample"}
"""Parts of the runner's half of a step that are not the model itself; nor is what is not the runner's."""


class StepProfile:
    """Seconds by part of a step, summed over the steps of `measure`."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._runner: defaultdict[str, float] = defaultdict(float)
        self._num_steps = 0
        self._encode = Encoder().encode

    @contextmanager
    def measure(self, llm: LLM) -> Iterator[None]:
        """Time the steps that `llm`, whose engine runs in this thread, takes in the block."""
        client = llm.client
        assert isinstance(client, InprocClient)
        with ExitStack() as stack:
            stack.enter_context(_wrapped(client.core, "plan", self._timing("plan")))
            stack.enter_context(_wrapped(client.core, "commit", self._timing("commit", self._take_timings)))
            stack.enter_context(_wrapped(client, "peek_output", self._timing("step", self._encode_outputs)))
            attention = getattr(client.runner, "attention", None)
            if attention is None:  # the integer model: all of its step is forward
                stack.enter_context(_wrapped(client.runner, "execute", self._timing("forward")))
            elif hasattr(attention, "attend"):  # operations in C tell their times themselves
                stack.enter_context(_wrapped(attention, "attend", self._timing("attend")))
            began = time.perf_counter()
            yield
            self._seconds["all"] += time.perf_counter() - began

    def python_share(self) -> float:
        """Return the share of a step, in percent, that is not the model itself."""
        model = sum(seconds for part, seconds in self._runner_parts().items() if part not in OUTSIDE_THE_MODEL)
        return 100 - 100 * model / (sum(self._parts().values()) or 1.0)

    def table(self) -> Table:
        """Return milliseconds a step and percent, by part; `send` comes beside the total."""
        parts = self._parts()
        total = sum(parts.values()) or 1.0
        table = Table(["ms_a_step", "percent"])
        for name, seconds in [*parts.items(), ("total", total), ("beside: send, encoded", self._seconds["send"])]:
            table.rows[name] = [1000 * seconds / max(1, self._num_steps), 100 * seconds / total]
        return table

    def _runner_parts(self) -> dict[str, float]:
        """Return what the runner says of its half, attention apart from the rest of the forward."""
        parts = dict(self._runner)
        parts["forward"] = parts.get("forward", 0.0) + self._seconds["forward"]
        if self._seconds["attend"]:
            parts |= {"attend": self._seconds["attend"], "forward": parts["forward"] - self._seconds["attend"]}
        return parts

    def _parts(self) -> dict[str, float]:
        seconds = self._seconds
        parts = {"plan": seconds["plan"], **self._runner_parts(), "commit": seconds["commit"]}
        parts["rest of the step"] = seconds["step"] - sum(parts.values())
        parts["text and bookkeeping"] = seconds["all"] - seconds["step"] - seconds["send"]
        return parts

    def _timing(self, part: str, look: Callable[..., None] | None = None) -> Callable[..., Any]:
        """Return what calls a method, adds its time to `part`, and lets `look` see arguments and result."""

        def call(method: Callable[..., Any], *arguments: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments)
            self._seconds[part] += time.perf_counter() - began
            if look is not None:
                look(result, *arguments)
            return result

        return call

    def _take_timings(self, _: None, plan: SchedulerOutput, output: ModelRunnerOutput, now: float) -> None:
        self._num_steps += bool(plan.requests)
        for part, seconds in output.timings.items():
            self._runner[part] += seconds

    def _encode_outputs(self, message: EngineCoreOutputs) -> None:
        """Encode a step's outputs as a served engine does when it sends them."""
        began = time.perf_counter()
        self._encode(message)
        self._seconds["send"] += time.perf_counter() - began


def check_profile_dir(folder: Path) -> None:
    """Make the folder of traces, before anything is measured; raises ConfigError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--profile-dir {folder} cannot be written: {error.strerror}") from error


def table_of_trace(path: Path) -> Table:
    """Return milliseconds a step and percent, by part, from a trace of steps none of which overlap."""
    events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X" and event["cat"] == "steps"]
    parts: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X" and event["cat"] == "runner":
            parts[event["name"]] += event["dur"]
    total = steps[-1]["ts"] + steps[-1]["dur"] - steps[0]["ts"]
    num_steps = sum(step["args"]["num_requests"] > 0 for step in steps)
    in_steps = sum(step["dur"] for step in steps)
    rows = {**parts, "rest of the step": in_steps - sum(parts.values()), "between steps": total - in_steps}
    table = Table(["ms_a_step", "percent"])
    for name, time_us in [*rows.items(), ("total", total)]:
        table.rows[name] = [time_us / 1000 / num_steps, 100 * time_us / total]
    return table


@contextmanager
def _wrapped(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Put `call(method, ...)` in the place of one object's method for the block."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *arguments: call(method, *arguments))
    try:
        yield
    finally:
        delattr(owner, name)
