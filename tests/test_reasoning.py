"""A form that holds after the reasoning, with a model that has tokens of its own around it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine
from engine.client.input_processor import Conversation
from engine.errors import InvalidRequest
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams

START, END = 256, 257
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking %}<think>{% else %}</think>{% endif %}"


@pytest.fixture(scope="module")
def thinker(byte_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of bytes, with two more tokens: <think> and </think>."""
    import tokenizers

    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(byte_llama, folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 258}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = torch.cat((weights[name], weights[name][:2])).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("<think>"), tokenizers.AddedToken("</think>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def test_the_form_holds_for_what_follows_the_reasoning_and_for_all_where_there_is_none(thinker: Path) -> None:
    settings = {"max_model_len": 128, "num_gpu_blocks_override": 40, "num_threads": 1}
    with engine.LLM(str(thinker), reasoning_parser="think", **settings) as llm:
        messages = [{"role": "user", "content": "hi"}]
        thinking = Conversation(messages=messages, template_variables={"thinking": True})
        form = {"structured_outputs": {"regex": "[a-c]{3}"}, "max_tokens": 30, "temperature": 1.0}
        for seed in range(4):
            params = SamplingParams(seed=seed, logit_bias={END: 4.0}, **form)  # type: ignore[arg-type]
            (output,) = llm.generate(thinking, params, use_tqdm=False)[0].outputs
            assert output.finish_reason is FinishReason.STOP
            _, _, text = output.text.partition("</think>")
            assert len(text) == 3
            assert {*text} <= {*"abc"}
            assert len(output.token_ids) >= 4
            (output,) = llm.generate(Conversation(messages=messages), params, use_tqdm=False)[0].outputs
            assert len(output.text) == 3
        never = SamplingParams(logit_bias={END: -100}, **form)  # type: ignore[arg-type]
        (output,) = llm.generate(thinking, never, use_tqdm=False)[0].outputs
        assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 30)


def test_a_form_after_reasoning_without_tokens_of_its_own_is_refused_by_name() -> None:
    with (
        engine.LLM("null", reasoning_parser="think") as llm,
        pytest.raises(InvalidRequest, match="</think>") as refused,
    ):
        llm.chat([{"role": "user", "content": "hi"}], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)
    assert refused.value.param == "structured_outputs"
