"""What the trial of a grammar finds out that the compiler's own limits do not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from engine.bench.forms import FORMS
from engine.grammar_trial import MAX_STEPS, NUM_STEPS, _in_a_fork, try_out
from engine.structured_output.params import structured_outputs_params
from engine.structured_output.vocabulary import Vocabulary

BYTES = Vocabulary([bytes([byte]) for byte in range(256)])


@pytest.mark.parametrize("rule", ["e e | /a/", "e e e | e e | /a/", 'e e | "a" | "b"'])
def test_rules_whose_steps_take_ever_longer_are_refused(rule: str) -> None:
    """The 128th step takes 46 times as long as the first ones, and more; 600 steps take seconds."""
    answer = _in_a_fork(structured_outputs_params({"grammar": f"start: e\ne: {rule}"}), BYTES, 0.25)
    assert answer.takes_longer
    assert "seconds of processor time" in (answer.refusal or "")


@pytest.mark.parametrize(("growth", "num_steps"), [(0.0, NUM_STEPS), (0.01, NUM_STEPS), (1.0, MAX_STEPS)])
def test_a_grammar_is_walked_on_while_its_steps_take_ever_longer(
    growth: float, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test's, whose steps take 1, 1 + growth, 1 + 2 growth and so on."""
    looks: list[int] = []

    def thread_time() -> float:
        looks.append(0)  # one before and one behind each step
        return sum(1 + growth * step for step in range(len(looks) // 2))

    monkeypatch.setattr("engine.grammar_trial.time", SimpleNamespace(thread_time=thread_time))
    assert try_out(structured_outputs_params({"regex": "a{1,4000}"}), BYTES).refusal is None
    assert len(looks) == 2 * num_steps


@pytest.mark.parametrize("name", FORMS)
def test_usual_forms_are_found_sound(name: str) -> None:
    for asked in FORMS[name]:
        answer = _in_a_fork(structured_outputs_params(asked), BYTES, 10)
        assert answer.refusal is None
        assert answer.lark


@pytest.mark.parametrize("is_in_grammar", [False, True], ids=["schema", "in a grammar"])
def test_what_is_wrong_with_a_large_schema_is_found_at_once(is_in_grammar: bool) -> None:
    """In 20 ms of processor time; whose schema it is was looked for over its one line for 2 s."""
    properties: dict[str, Any] = {f"property_{i}": {"type": "string", "description": "a text"} for i in range(950)}
    schema = {"type": "object", "properties": properties | {"x": {"type": "foo"}}}
    asked = {"grammar": f"start: %json {json.dumps(schema)}"} if is_in_grammar else {"json": schema}
    answer = _in_a_fork(structured_outputs_params(asked), BYTES, 1)
    assert "Invalid type: foo" in (answer.refusal or "")
