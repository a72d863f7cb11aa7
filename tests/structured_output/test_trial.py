"""What the trial of a grammar finds out that the compiler's own limits do not."""

from __future__ import annotations

import pytest

from engine.bench.forms import FORMS
from engine.grammar_trial import _in_a_fork
from engine.structured_output.params import structured_outputs_params
from engine.structured_output.vocabulary import Vocabulary

BYTES = Vocabulary([bytes([byte]) for byte in range(256)])


@pytest.mark.parametrize("rule", ["e e | /a/", "e e e | e e | /a/", 'e e | "a" | "b"'])
def test_rules_whose_steps_take_ever_longer_are_refused(rule: str) -> None:
    """The 128th step takes 46 times as long as the first ones, and more; 600 steps take seconds."""
    answer = _in_a_fork(structured_outputs_params({"grammar": f"start: e\ne: {rule}"}), BYTES, 0.25)
    assert answer.takes_longer
    assert "seconds of processor time" in (answer.refusal or "")


@pytest.mark.parametrize("name", FORMS)
def test_usual_forms_are_found_sound(name: str) -> None:
    for asked in FORMS[name]:
        answer = _in_a_fork(structured_outputs_params(asked), BYTES, 10)
        assert answer.refusal is None
        assert answer.lark
