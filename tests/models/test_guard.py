"""What would be wrong without a word is refused, by the check that it fails; what only looks odd is not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.models import guard, transformers_backend
from engine.models.checkpoint import read_config
from engine.models.guard import inspect, tolerance
from engine.models.registry import build_model, choose
from engine.models.transformers_backend import ATTENTION_NAME, AttentionCall, Body, TransformersShape

FULL = {"layer_types": ["full_attention"] * 4}
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a bias of the scores by position": ("bloom", {}, "call a layer"),
    "the same, made elsewhere": ("mpt", {}, "probe forward"),
    "attention in chunks": ("llama4_text", {}, "layer types"),
    "a temperature by the number of the row": ("llama4_text", FULL, "positions"),
    "linear attention between full": ("qwen3_next", {}, "layer types"),
    "lightning attention": ("minimax", {}, "layer types"),
    "convolutions": ("lfm2", {}, "layer types"),
    "state space beside attention": ("bamba", {}, "layer types"),
    "state space between attention": ("jamba", {}, "layer types"),
    "state space alone": ("mamba2", {}, "layer types"),
    "a recurrent net": ("rwkv", {}, "call a layer"),
    "positions by the number of the row": (
        "bart",
        {},
        "positions",
    ),
    "positions that begin elsewhere": ("roberta", {}, "eager"),
    "windows that attention is not told": ("phimoe", {"sliding_window": 7}, "eager"),
    "a mask computed from values": ("doge", {}, "eager"),
    "two attentions a layer": ("diffllama", {}, "call a layer"),
    "layers that run several times": ("hrm_text", {}, "call a layer"),
    "layers of different K/V heads": ("mimo_v2_flash", {}, "call a layer"),
    "attention both ways": ("bert", {"is_decoder": False}, "eager"),
    "attention of its own": ("xglm", {}, "call a layer"),
    "two sets of frequencies by the longest request": (
        "arcee",
        {
            "rope_parameters": ROPE
            | {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        },
        "last position",
    ),
}
"""What is wrong → (model_type, changes, the check that finds it)."""
FORETOLD = {"the same, made elsewhere": "call a layer"}
"""Where a likeness fails in another check than the model when it is loaded."""


def quiet(done: int, total: int) -> None:
    """Tell nobody."""


def inspected(model: Any, max_positions: int = 128) -> TransformersShape:
    model.set_attn_implementation(ATTENTION_NAME)
    return inspect(Body(model), max_positions)


@pytest.mark.parametrize("fault", REFUSED)
def test_what_would_be_wrong_without_a_word_is_refused_by_the_failed_check(
    draw_model: Any, tmp_path: Path, fault: str
) -> None:
    model_type, changes, check = REFUSED[fault]
    draw_model(model_type, **changes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"check '{check}' failed"):
        build_model(tmp_path, EngineConfig(max_model_len=128), quiet)
    with pytest.raises(UnsupportedModel, match=f"check '{FORETOLD.get(fault, check)}' failed"):
        choose(read_config(tmp_path), None, quiet)


@pytest.mark.parametrize("model_type", ["falcon", "gpt_neo"])
def test_a_class_that_knows_only_its_own_attention_is_refused(draw_model: Any, tmp_path: Path, model_type: str) -> None:
    draw_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="check 'call a layer' failed"):
        build_model(tmp_path, EngineConfig(), quiet)
    with pytest.raises(UnsupportedModel, match="check 'call a layer' failed"):
        choose(read_config(tmp_path), None, quiet)


DYNAMIC = {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32}
LONG = REFUSED["two sets of frequencies by the longest request"][1]


@pytest.mark.parametrize("changes", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_frequencies_that_the_longest_request_sets_are_wrong_only_where_it_can(draw_model: Any, changes: Any) -> None:
    model = draw_model("arcee", **changes)
    with pytest.raises(UnsupportedModel, match=r"check 'last position' failed: .*smaller --max-model-len"):
        inspected(model, max_positions=128)
    assert inspected(draw_model("arcee", **changes), max_positions=32).max_positions == 32


def test_the_shape_is_what_the_layers_ask_for(draw_model: Any) -> None:
    shape = inspected(draw_model("cohere2", sliding_window=40))
    assert shape == TransformersShape(
        num_layers=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=199,
        max_positions=128,
        windows=(40, None, 40, None),
    )


def test_heads_of_different_sizes_take_the_largest(draw_model: Any) -> None:
    assert inspected(draw_model("deepseek_v3")).head_dim == 12


def shifted(model: Any, starts_anew: bool) -> Any:
    """Add to each row of a gpt2 half of the one before: a state beside attention, which flat rows run together.

    With `starts_anew` the state is empty at position 0, so that only what a chunk leaves behind is missing.
    """
    positions: list[torch.Tensor] = []

    def shift(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        before = torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]
        if starts_anew:
            before = before * (positions[-1].view(1, -1, 1) > 0)
        return output + before / 2

    model.transformer.wpe.register_forward_pre_hook(lambda module, arguments: positions.append(arguments[0]))
    model.transformer.drop.register_forward_hook(shift)
    return model


@pytest.mark.parametrize(("starts_anew", "check"), [(False, "two sequences"), (True, "chunks")])
def test_a_state_beside_attention_is_found_whatever_config_json_says(
    draw_model: Any, starts_anew: bool, check: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"check '{check}' failed"):
        inspected(shifted(draw_model("gpt2"), starts_anew))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("hunyuan_v1_moe", {"moe_topk": 1}),
        ("granitemoe", {"num_experts_per_tok": 1}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("qwen2_moe", {"num_experts_per_tok": 1}),
        ("gpt_oss", {"num_experts_per_tok": 1}),
    ],
)
def test_experts_of_which_each_row_has_one_are_not_taken_for_positions(
    draw_model: Any, model_type: str, changes: dict[str, Any]
) -> None:
    model = draw_model(model_type, **changes)
    chosen = model.get_experts_implementation()
    inspected(model)
    assert model.get_experts_implementation() == chosen


def test_one_unlucky_draw_is_no_fault(draw_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a router, by rounding, takes another expert for one prompt."""
    verdicts = iter([False, True, True, True, True])
    monkeypatch.setattr("engine.models.guard._Draw.equal", lambda draw, logits, expected: next(verdicts, True))
    inspected(draw_model("gpt2"))


def test_windows_longer_than_any_probe_are_found_wrong_on_a_short_prompt(draw_model: Any) -> None:
    model = draw_model("phimoe", sliding_window=100)
    with pytest.raises(UnsupportedModel, match="check 'eager' failed"):
        inspected(model)
    assert model.config.sliding_window == 100


def test_a_window_that_no_position_reaches_beyond_may_be_one_that_attention_is_not_told(draw_model: Any) -> None:
    assert inspected(draw_model("phimoe", sliding_window=100), max_positions=100).max_positions == 100
    with pytest.raises(UnsupportedModel, match="check 'eager' failed"):
        inspected(draw_model("phimoe", sliding_window=100), max_positions=101)


def test_caps_of_the_scores_that_attention_is_told_are_right(draw_model: Any) -> None:
    inspected(draw_model("gemma2", attn_logit_softcapping=0.5))


def test_caps_of_the_scores_that_attention_is_not_told_are_found(
    draw_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = draw_model("gemma2", attn_logit_softcapping=0.5)
    model.model.layers[2].self_attn.attn_logit_softcapping = None
    run_eager = guard._eager

    @contextlib.contextmanager
    def capped(body: Body) -> Iterator[None]:
        with run_eager(body):
            model.model.layers[2].self_attn.attn_logit_softcapping = 0.5
            yield
            model.model.layers[2].self_attn.attn_logit_softcapping = None

    monkeypatch.setattr(guard, "_eager", capped)
    with pytest.raises(UnsupportedModel, match="check 'eager' failed"):
        inspected(model)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(draw_model: Any, number: float) -> None:
    model = draw_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[3, 5] = number
    words = r"check 'eager' failed: its logits are not finite: transformer\.h\.1\.mlp\.c_fc\.weight holds NaN or inf"
    with pytest.raises(UnsupportedModel, match=words):
        inspected(model)


def test_logits_beyond_the_type_of_finite_weights_are_said_to_be(draw_model: Any) -> None:
    model = draw_model("gpt2").to(torch.float16)
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(60000)
    with pytest.raises(UnsupportedModel, match="not finite: its weights are, so it exceeds float16; another --dtype"):
        inspected(model)


def test_a_window_that_config_json_does_not_have_is_refused(draw_model: Any) -> None:
    model = draw_model("exaone4")
    model.config.sliding_window = 11
    with pytest.raises(UnsupportedModel, match="check 'windows' failed: layer 0 sees 7 positions"):
        inspected(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["gpt2", "qwen2_moe", "deepseek_v3", "starcoder2"])
def test_right_models_pass_in_16_bits(draw_model: Any, dtype: torch.dtype, model_type: str) -> None:
    inspected(draw_model(model_type).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fault", ["windows that attention is not told", "a mask computed from values"])
def test_wrong_models_fail_in_16_bits(draw_model: Any, dtype: torch.dtype, fault: str) -> None:
    model_type, changes, check = REFUSED[fault]
    with pytest.raises(UnsupportedModel, match=f"check '{check}' failed"):
        inspected(draw_model(model_type, **changes).to(dtype))


def test_the_tolerance_follows_from_type_and_depth() -> None:
    assert tolerance(torch.float32, 4) < 1e-4 < tolerance(torch.float16, 4) < tolerance(torch.bfloat16, 4) < 0.1
    assert tolerance(torch.float32, 32) > tolerance(torch.float32, 4)


def test_what_differs_on_this_path_is_said_at_the_start(
    draw_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw_model("gpt2").save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="engine"):
        build_model(tmp_path, EngineConfig(), quiet)
    assert "GPT2LMHeadModel runs through transformers" in caplog.text
    assert "last bits of a request's logits may depend on its neighbours" in caplog.text


def run_twice(model: Any) -> None:
    once = model.forward

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **options: Any) -> Any:
        model.transformer(input_ids=input_ids, position_ids=position_ids, **options)
        return once(input_ids=input_ids, position_ids=position_ids, **options)

    model.forward = forward


def score_more(model: Any) -> None:
    model.lm_head = torch.nn.Linear(48, 210)


@pytest.mark.parametrize(
    ("bend", "words"),
    [(run_twice, "runs its body 2 times, not once"), (score_more, "scores 210 tokens and embeds 199")],
)
def test_a_model_that_is_more_than_its_body_and_a_head_is_refused(
    draw_model: Any, bend: Callable[[Any], None], words: str
) -> None:
    model = draw_model("gpt2")
    bend(model)
    with pytest.raises(UnsupportedModel, match=f"check 'probe forward' failed: .*{words}"):
        inspected(model)


def called(layer: int | None = None, rows: int = 29, heads: int = 4, keys: int = 2, values: int = 2) -> AttentionCall:
    q, k, v = (torch.zeros(rows, num_heads, 8) for num_heads in (heads, keys, values))
    return AttentionCall(layer, q, k, v, scale=1.0, window=None, softcap=None, sinks=None)


@pytest.mark.parametrize(
    "calls",
    [
        [called(1), called(0)],
        [called(0), called(0)],
        [called()],
        [called(rows=28), called(rows=28)],
        [called(), called(heads=8)],
        [called(values=1), called(values=1)],
        [called(heads=3), called(heads=3)],
    ],
    ids=["order", "twice", "too few", "rows", "heads", "values", "groups"],
)
def test_calls_that_are_not_one_a_layer_in_order_with_heads_of_one_shape_are_refused(
    draw_model: Any, calls: list[AttentionCall]
) -> None:
    body = Body(draw_model("gpt2", num_hidden_layers=2))
    assert guard._check_calls(body, body.module.config, [called(0), called(1)], 29) == (4, 2)
    with pytest.raises(UnsupportedModel, match="check 'call a layer' failed"):
        guard._check_calls(body, body.module.config, calls, 29)


@pytest.mark.parametrize(("asked", "seen"), [(7, 8), (None, 7), (0, 0), (7.5, 7.5)])
def test_windows_that_are_not_whole_numbers_of_config_json_are_refused(draw_model: Any, asked: Any, seen: Any) -> None:
    body = Body(draw_model("gpt2"))
    config = SimpleNamespace(sliding_window=asked)
    guard._check_windows(body, config, (None,))
    with pytest.raises(UnsupportedModel, match="check 'windows' failed"):
        guard._check_windows(body, config, (None, seen))


def test_layers_are_refused_by_their_kind_before_they_are_run(draw_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="check 'layer types' failed: conv is"):
        inspected(draw_model("lfm2"))


@pytest.mark.parametrize(("batch", "num_keys"), [(2, 3), (1, 4)])
def test_attention_that_is_not_row_for_row_is_refused(batch: int, num_keys: int) -> None:
    q, k = torch.zeros(batch, 2, 3, 8), torch.zeros(batch, 2, num_keys, 8)
    with pytest.raises(UnsupportedModel, match="not row for row"):
        transformers_backend._attention_function(None, q, k, k, None)


def test_a_model_that_is_all_body_is_refused(draw_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="GPT2Model has no body"):
        Body(draw_model("gpt2").transformer)


def test_what_a_model_raises_is_the_detail_of_the_check(draw_model: Any) -> None:
    body = Body(draw_model("gpt2"))
    for error, words in ((UnsupportedModel("words"), "words"), (KeyError("x"), "KeyError: 'x'")):
        with pytest.raises(UnsupportedModel, match=f"check 'probe' failed: {words}$"), guard._named(body, "probe"):
            raise error
