"""A likeness has the structure of what it stands for, and little else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from engine.errors import UnsupportedModel
from engine.models import likeness
from engine.models.likeness import MAX_NUMBERS, NoLikeness, draw, judge

torch.set_num_threads(1)

ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
FACTORS = {"short_factor": [1.0] * 64, "long_factor": [3.0] * 64}


def test_layers_windows_heads_experts_and_rotary_parameters_are_kept_and_widths_are_small() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"] * 4
    config = transformers.Qwen2MoeConfig(
        num_hidden_layers=12,
        layer_types=kinds,
        use_sliding_window=True,
        sliding_window=1000,
        num_attention_heads=32,
        num_key_value_heads=8,
        hidden_size=4096,
        num_experts=64,
        num_experts_per_tok=6,
        rope_parameters=ROPE | FACTORS,
        eos_token_id=151643,
    )
    before = config.to_dict()
    small: Any = draw(config).config
    assert config.to_dict() == before
    assert (small.num_hidden_layers, small.layer_types, small.sliding_window) == (12, kinds, 1000)
    assert small.rope_parameters["long_factor"] == FACTORS["long_factor"]
    assert (small.num_attention_heads, small.num_key_value_heads, small.hidden_size) == (4, 2, 4 * 128)
    assert (small.vocab_size, small.eos_token_id, small.intermediate_size) == (256, 255, 32)
    assert (small.num_experts, small.num_experts_per_tok) == (8, 2)


@pytest.mark.parametrize(("groups", "small"), [(1, (2, 1)), (2, (4, 2)), (16, (2, 2))])
def test_heads_stay_grouped_as_they_are(groups: int, small: tuple[int, int]) -> None:
    config = transformers.CohereConfig(num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=groups)
    found: Any = draw(config).config
    assert (found.num_attention_heads, found.num_key_value_heads) == small


def test_norms_and_biases_are_not_what_they_start_as() -> None:
    module = draw(transformers.GPT2Config(n_layer=1))
    for parameter in module.parameters():
        assert len(parameter.unique()) > 1


def test_what_is_not_small_is_not_drawn() -> None:
    with pytest.raises(NoLikeness, match=rf"has \d{{{len(str(MAX_NUMBERS))},}} numbers"):
        draw(transformers.GPT2Config(n_layer=1, n_positions=2**26))
    with pytest.raises(NoLikeness, match="1000 layers is not small"):
        draw(transformers.GPT2Config(n_layer=1000))


def test_what_cannot_be_made_is_no_likeness() -> None:
    with pytest.raises(NoLikeness, match=r"cannot be made: .*Error"):
        draw(transformers.GPT2Config(n_layer=1, activation_function="no such function"))


GRANITE = transformers.GraniteConfig(num_hidden_layers=16, num_attention_heads=2, hidden_size=64)


def test_a_likeness_that_magnifies_rounding_is_drawn_in_float64_and_judged_as_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert draw(GRANITE).dtype == torch.float32
    monkeypatch.setattr(likeness, "_MATRIX_SPREAD", 1.5)
    assert draw(GRANITE).dtype == torch.float64
    judge(GRANITE, 64, quiet)
    verdicts = iter([False, True])
    monkeypatch.setattr(likeness, "are_equal", lambda *_: next(verdicts))
    wrong = transformers.PhimoeConfig(num_hidden_layers=2, sliding_window=9, max_position_embeddings=64)
    with pytest.raises(UnsupportedModel, match="check 'eager' failed"):
        judge(wrong, 64, quiet)


@pytest.mark.parametrize("softmax", [torch.softmax, torch.nn.functional.softmax])
def test_what_is_judged_in_float64_is_so_within_softmax_too(softmax: Any) -> None:
    scores = torch.randn(3, 5, dtype=torch.float64)
    with likeness._WideSoftmax():
        found = softmax(scores, dim=-1, dtype=torch.float32)
    assert torch.equal(found, scores.softmax(-1))


def test_a_likeness_that_magnifies_rounding_in_float64_too_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "are_equal", lambda *_: False)
    with pytest.raises(NoLikeness, match="magnifies what rounding does"):
        draw(GRANITE)


def quiet(done: int, total: int) -> None:
    """Tell nobody."""
