"""A form that holds after the reasoning, with a model that has tokens of its own around it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine
from engine.client.input_processor import Conversation
from engine.errors import InvalidRequest
from engine.outputs import FinishReason
from engine.sampling.sampler import SamplingRow
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
            text = output.text.partition("</think>")[2].lstrip()
            assert len(text) == 3
            assert {*text} <= {*"abc"}
            assert len(output.token_ids) >= 4
            (output,) = llm.generate(Conversation(messages=messages), params, use_tqdm=False)[0].outputs
            assert len(output.text) == 3
        never = SamplingParams(logit_bias={END: -100}, **form)  # type: ignore[arg-type]
        (output,) = llm.generate(thinking, never, use_tqdm=False)[0].outputs
        assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 30)


class Says:
    """Makes a model of bytes begin its answers with a text, as far as it may."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        for i, row in enumerate(rows):
            if row.num_output_tokens < len(self._text):
                logits[i, self._text[row.num_output_tokens]] += 1000


@pytest.mark.parametrize("thinking", [True, False])
def test_a_form_holds_also_behind_markers_of_many_tokens(byte_llama: Path, tmp_path: Path, thinking: bool) -> None:
    template = tmp_path / "template"
    template.write_text(TEMPLATE if thinking else TEMPLATE.replace("</think>", ":"))
    thought = "hm" * 20 + "</think>" if thinking else "<think>so</think>"
    settings = {"max_model_len": 128, "num_gpu_blocks_override": 40, "num_threads": 1, "chat_template": str(template)}
    params = SamplingParams(structured_outputs={"regex": "[a-c]{3}"}, max_tokens=60, seed=1)
    conversation = Conversation(messages=[{"role": "user", "content": "hi"}], template_variables={"thinking": thinking})
    with engine.LLM(str(byte_llama), reasoning_parser="think", logits_processors=[Says(thought)], **settings) as llm:
        (output,) = llm.generate(conversation, params, use_tqdm=False)[0].outputs
    assert output.finish_reason is FinishReason.STOP
    assert output.text.startswith(thought)
    assert re.fullmatch("[a-c]{3}", output.text.removeprefix(thought).lstrip())


def test_markers_of_which_one_is_special_are_refused_by_name(thinker: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(thinker, folder)
    backend = json.loads((thinker / "tokenizer.json").read_text())
    backend["added_tokens"] = [backend["added_tokens"][1] | {"special": True, "id": START}]
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    messages = [{"role": "user", "content": "hi"}]
    thinking = Conversation(messages=messages, template_variables={"thinking": True})
    params = SamplingParams(structured_outputs={"regex": "a"})
    with (
        engine.LLM(str(folder), reasoning_parser="think", max_model_len=128, num_gpu_blocks_override=40) as llm,
        pytest.raises(InvalidRequest, match="</think> to be both special tokens or neither") as refused,
    ):
        llm.generate(thinking, params, use_tqdm=False)
    assert refused.value.param == "structured_outputs"
