"""Verbs without any loop: the same generators, driven by plain calls."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import NotEnabled
from engine.executor.null import NullModelRunner
from engine.executor.runner_verbs import call_runner
from engine.operations import PAUSED, OnRunner, Operations
from engine.verbs import (
    CollectiveRpc,
    DumpTasks,
    GetStats,
    IsPaused,
    IsSleeping,
    ListLoras,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)


class Engine:
    """A core, its runner and its operations."""

    def __init__(self) -> None:
        config = EngineConfig(model="null", num_gpu_blocks_override=64)
        self.runner = NullModelRunner(config)
        self.core = EngineCore(config, self.runner.start(lambda phase, done, total: None))
        self.operations = Operations(self.core)

    def ask(self, verb: Any) -> Any:
        operation, answer = self.operations.run(verb), None
        while True:
            try:
                wait = operation.send(answer)
            except StopIteration as end:
                return end.value
            answer = call_runner(self.runner, wait.verb) if isinstance(wait, OnRunner) else None


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_every_verb_is_answered_at_once_where_nothing_runs(engine: Engine) -> None:
    assert engine.ask(ResetPrefixCache()) is True
    assert engine.ask(IsPaused()) is False
    for mode in PauseMode:
        engine.ask(Pause(mode))
        assert engine.ask(IsPaused()) is True
        engine.ask(Resume())
    engine.ask(Sleep(2))
    assert engine.runner.memory()["kv_cache"] == 0
    engine.ask(WakeUp())
    assert engine.ask(IsSleeping()) is False
    assert engine.ask(GetStats()).num_running == 0
    assert engine.ask(CollectiveRpc("capacity")) == [engine.core.capacity]
    assert engine.ask(DumpTasks()) == "this engine has no tasks"
    with pytest.raises(NotEnabled, match="LoRA is not enabled"):
        engine.ask(ListLoras())


def test_an_operation_says_what_it_waits_for_in_order(engine: Engine) -> None:
    verb = Sleep(1)
    operation = engine.operations.run(verb)
    assert next(operation) == PAUSED
    assert engine.operations.asleep == frozenset()
    assert operation.send(None) == OnRunner(verb)
    assert engine.operations.asleep == {"kv_cache"}
    with pytest.raises(StopIteration) as end:
        operation.send(None)
    assert end.value.value is None


def test_a_runner_that_cannot_wake_up_leaves_the_engine_asleep_to_be_tried_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tags: object) -> None:
        raise MemoryError("no room for the pages")

    engine.ask(Sleep(1))
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "wake_up", fail)
        with pytest.raises(MemoryError):
            engine.ask(WakeUp())
    assert engine.ask(IsSleeping()) is True
    engine.ask(WakeUp())
    assert engine.ask(IsSleeping()) is False
