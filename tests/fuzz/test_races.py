"""A part of `python -m fuzz races`, which people run for minutes."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from engine.core import EngineCore
from engine.executor.null import NullModelRunner
from engine.outputs import FinishReason, ModelRunnerOutput
from engine.protocol import EngineCoreOutput
from fuzz.races import race_in_core, race_in_server, races


@pytest.mark.slow
def test_aborts_that_race_with_the_end_of_their_request_give_it_one_terminal_output() -> None:
    ends = races(4000, seed=1)
    assert ends.total() >= 4000
    assert min(ends[FinishReason.ABORT], ends[FinishReason.LENGTH]) > 500


@pytest.mark.parametrize("race", [race_in_core, race_in_server])
def test_a_wrong_token_is_found(race: Callable[[random.Random], object], monkeypatch: pytest.MonkeyPatch) -> None:
    sample = NullModelRunner.sample

    def wrong(self: NullModelRunner, masks: object = None) -> ModelRunnerOutput:
        output = sample(self, masks)
        for token_ids in output.sampled_token_ids:
            token_ids[:] = [65 for _ in token_ids]
        return output

    monkeypatch.setattr(NullModelRunner, "sample", wrong)
    with pytest.RaisesGroup(AssertionError, allow_unwrapped=True, flatten_subgroups=True):
        race(random.Random(1))


@pytest.mark.parametrize("race", [race_in_core, race_in_server])
def test_a_lost_last_token_is_found(race: Callable[[random.Random], object], monkeypatch: pytest.MonkeyPatch) -> None:
    take_outputs = EngineCore.take_outputs

    def lossy(self: EngineCore) -> list[EngineCoreOutput]:
        return [
            msgspec.structs.replace(output, new_token_ids=[]) if output.finish_reason is FinishReason.LENGTH else output
            for output in take_outputs(self)
        ]

    monkeypatch.setattr(EngineCore, "take_outputs", lossy)
    with pytest.RaisesGroup(AssertionError, allow_unwrapped=True, flatten_subgroups=True):
        race(random.Random(1))
