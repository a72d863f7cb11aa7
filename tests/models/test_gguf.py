from __future__ import annotations

import contextlib
import json
import random
import struct
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import torch
from gguf import GGMLQuantizationType as Quantization
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from engine.client.tokenizer import load_tokenizer
from engine.errors import CheckpointError, ModelError, UnsupportedModel
from engine.models.convert import convert, to_bfloat16
from engine.models.gguf import GgufFile
from engine.models.gguf_tokenizer import read_tokenizer

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, CONTEXT = 64, 96, 4, 2, 2, 128
CONTROL = ["<|begin|>", "<|end|>", "<|turn|>"]
USER_DEFINED = ["<tool call>"]


def quiet(phase: str, done: int, total: int) -> None:
    pass


def trained_bpe() -> tuple[list[str], list[str]]:
    """Tokens and merges that run across spaces, digits and signs, so that ids depend on how text is split."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    text = "it's 1234 or 12 345, isn't it?\n\n  We'LL  see\t\tx=10.5;  // naïve café 20/20\r\n ABC Def"
    backend.train_from_iterator([text, *text.split("\n")] * 2, trainer)
    saved = json.loads(backend.to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].get)
    return tokens, [" ".join(merge) for merge in saved["merges"]]


BPE_TOKENS, BPE_MERGES = trained_bpe()
TOKENS = [*BPE_TOKENS, *CONTROL, *USER_DEFINED]


def llama_weights(vocab: int = len(TOKENS), tied: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """Random weights under GGUF names, with the rows of Q and K in the model's own order."""
    draw = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (vocab, HIDDEN)
    for index in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * head, HIDDEN),
            "attn_k": (KV_HEADS * head, HIDDEN),
            "attn_v": (KV_HEADS * head, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            shapes[f"blk.{index}.{name}.weight"] = shape
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def permuted(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """The rows as llama.cpp stores them."""
    half = len(weight) // num_heads // 2
    return np.ascontiguousarray(weight.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape))


def stored(name: str, weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    heads = HEADS if "attn_q" in name else KV_HEADS if "attn_k" in name else 0
    return permuted(weight, heads) if heads else weight


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray[Any, Any]],
    *,
    architecture: str = "llama",
    pre: str | None = "gpt-2",
    model: str = "gpt2",
    tokens: list[str] | None = None,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    quantization: Quantization = Quantization.F32,
    forms: Mapping[str, Quantization] = MappingProxyType({}),
) -> Path:
    tokens = TOKENS if tokens is None else tokens
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = [3 if token in CONTROL else 4 if token in USER_DEFINED else 1 for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges(BPE_MERGES)
    writer.add_bos_token_id(TOKENS.index("<|begin|>"))
    writer.add_eos_token_id(TOKENS.index("<|end|>"))
    edit(writer)
    for name, weight in weights.items():
        form = forms.get(name, quantization) if weight.ndim > 1 else Quantization.F32
        writer.add_tensor(name, gguf.quants.quantize(stored(name, weight), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path) -> Path:
    folder = path.parent / "converted"
    folder.mkdir()
    convert(path, folder, quiet)
    return folder


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor, by a table of its own."""
    table = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    parts = name.split(".")
    return f"model.layers.{parts[1]}.{table[parts[2]]}.weight" if parts[0] == "blk" else f"{table[parts[0]]}.weight"


@pytest.mark.parametrize(
    "quantization",
    [
        Quantization.F32,
        Quantization.F16,
        Quantization.BF16,
        Quantization.Q8_0,
        Quantization.Q4_0,
        Quantization.Q4_1,
        Quantization.Q5_0,
        Quantization.Q5_1,
    ],
    ids=lambda form: form.name,
)
def test_weights_are_dequantized_and_unpermuted_and_keep_their_type_or_become_bfloat16(
    tmp_path: Path, quantization: Quantization
) -> None:
    weights = llama_weights()
    folder = converted(write_gguf(tmp_path / "tiny.gguf", weights, quantization=quantization))
    tensors = load_file(folder / "model.safetensors")
    dtype = {Quantization.F32: torch.float32, Quantization.F16: torch.float16}.get(quantization, torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    assert f"torch.{config['dtype']}" == str(dtype)
    assert config["gguf_file_type"] == quantization.name
    assert tensors.keys() == {hf_name(name) for name in weights}
    for name, weight in weights.items():
        form = quantization if weight.ndim > 1 else Quantization.F32
        expected = gguf.quants.dequantize(gguf.quants.quantize(weight, form), form)
        assert torch.equal(tensors[hf_name(name)], torch.tensor(expected).to(dtype)), name


@pytest.mark.parametrize(
    "quantization", [Quantization.Q4_K, Quantization.Q5_K, Quantization.Q6_K], ids=lambda form: form.name
)
def test_k_quantized_rows_are_those_of_the_gguf_package(tmp_path: Path, quantization: Quantization) -> None:
    path = tmp_path / "k.gguf"
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    # Small bytes keep the half-precision scales finite.
    blocks = np.random.default_rng(1).integers(0, 0x30, size=(INNER, 1 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", blocks, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    order = np.arange(INNER)[::-1]
    rows = np.concatenate(list(file.rows(file.tensors["x"], order)))
    assert rows.shape == (INNER, block)
    assert np.array_equal(rows, gguf.quants.dequantize(blocks, quantization)[::-1])


def test_large_tensors_come_in_chunks_that_make_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.gguf._CHUNK_ELEMENTS", HIDDEN * 7)
    weights = llama_weights()
    tensors = load_file(converted(write_gguf(tmp_path / "tiny.gguf", weights)) / "model.safetensors")
    for name, weight in weights.items():
        assert torch.equal(tensors[hf_name(name)], torch.tensor(weight)), name


def test_bfloat16_rounding_is_that_of_torch_for_every_kind_of_number() -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, size=200_000, dtype=np.uint32)
    edges = [(high << 16) | low for high in (0, 1, 0x7F7F, 0x3F80, 0x8000) for low in (0, 1, 0x7FFF, 0x8000, 0x8001)]
    bits = np.concatenate([bits, np.array([*edges, 0x7F800000, 0xFF800000], np.uint32)])
    values = bits.view(np.float32)
    expected = torch.tensor(values).to(torch.bfloat16)
    ours = torch.tensor(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    finite = ~torch.isnan(expected)
    assert torch.equal(torch.isnan(ours), ~finite)
    assert torch.equal(ours[finite], expected[finite])


def test_configuration_comes_from_the_metadata(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "tiny.gguf", llama_weights(tied=True)))
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "tie_word_embeddings": True,
        "vocab_size": len(TOKENS),
        "dtype": "float32",
        "gguf_file_type": "F32",
        "pad_token_id": None,
        "bos_token_id": TOKENS.index("<|begin|>"),
        "eos_token_id": TOKENS.index("<|end|>"),
    }


def test_control_tokens_are_special_and_user_defined_ones_are_never_split(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(converted(write_gguf(tmp_path / "tiny.gguf", llama_weights())))
    assert tokenizer.special_token_ids == {TOKENS.index(token) for token in CONTROL}
    ids = tokenizer.encode("a<tool call><|turn|>")
    assert ids == [TOKENS.index("a"), TOKENS.index("<tool call>"), TOKENS.index("<|turn|>")]
    assert tokenizer.decode(ids) == "a<tool call>"


def test_every_end_token_of_the_file_ends_a_text(tmp_path: Path) -> None:
    turn = TOKENS.index("<|turn|>")
    path = write_gguf(tmp_path / "tiny.gguf", llama_weights(), edit=lambda writer: writer.add_eot_token_id(turn))
    assert load_tokenizer(converted(path)).eos_token_ids == (TOKENS.index("<|end|>"), turn)


def test_markers_known_to_end_a_turn_end_a_text_where_the_file_names_one_end_alone(tmp_path: Path) -> None:
    tokens = [*TOKENS[:-1], "<|im_end|>"]

    def edit(writer: gguf.GGUFWriter) -> None:
        for section in writer.kv_data:
            section.pop("tokenizer.ggml.token_type", None)
        writer.add_token_types([3 if token in {*CONTROL, "<|im_end|>"} else 1 for token in tokens])

    path = write_gguf(tmp_path / "tiny.gguf", llama_weights(), tokens=tokens, edit=edit)
    assert load_tokenizer(converted(path)).eos_token_ids == (TOKENS.index("<|end|>"), len(tokens) - 1)


def test_named_templates_of_the_file_are_all_kept(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    path = write_gguf(tmp_path / "tiny.gguf", llama_weights(), edit=lambda writer: writer.add_chat_template(templates))
    tokenizer = load_tokenizer(converted(path))
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "with tools"


def test_begin_and_end_tokens_are_added_as_the_file_asks(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    tokenizer = load_tokenizer(converted(write_gguf(tmp_path / "tiny.gguf", llama_weights(), edit=edit)))
    begin, end = TOKENS.index("<|begin|>"), TOKENS.index("<|end|>")
    assert tokenizer.encode("a") == [begin, TOKENS.index("a"), end]
    assert tokenizer.encode("a", add_special_tokens=False) == [TOKENS.index("a")]


def splitting_texts() -> list[str]:
    """Texts at whose seams the pre-tokenizers differ; of the special tokens only those that transformers knows too."""
    draw = random.Random(4)
    pieces = [
        "it's",
        "'LL",
        "1234",
        "12",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "ABC",
        "Def",
        "café",
        "x=10.5;",
        "//",
        "²½",
        "é",
    ]
    pieces += ["<|begin|>", "<|end|>", "日本", "١٢٣", "ß", "_", "..."]
    return ["".join(draw.choices(pieces, k=draw.randrange(1, 12))) for _ in range(300)]


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "tekken"])
def test_ids_of_each_pre_tokenizer_equal_those_of_transformers(tmp_path: Path, pre: str) -> None:
    from transformers import AutoTokenizer

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token(False)

    path = write_gguf(tmp_path / "tiny.gguf", llama_weights(), pre=pre, edit=edit)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    tokenizer = load_tokenizer(converted(path))
    for text in splitting_texts():
        assert tokenizer.encode(text) == oracle(text)["input_ids"], text


CONTRACTIONS = "'(?i:s|t|re|ve|m|ll|d)"
CL100K = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?:{CONTRACTIONS})?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?:{CONTRACTIONS})?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("pre", "patterns"),
    [
        ("dbrx", [CL100K]),
        ("smaug-bpe", [CL100K]),
        ("deepseek-r1-qwen", [CL100K.replace("{1,3}", "")]),
        ("gpt-4o", [O200K]),
        ("refact", [r"\p{N}|\P{N}+", GPT2]),
        ("starcoder", [r"\p{N}|\P{N}+", GPT2]),
    ],
)
def test_texts_are_split_as_the_published_patterns_split_them(tmp_path: Path, pre: str, patterns: list[str]) -> None:
    backend = read_tokenizer(GgufFile(write_gguf(tmp_path / "tiny.gguf", llama_weights(), pre=pre))).backend
    for text in splitting_texts():
        pieces = [text if pre != "deepseek-r1-qwen" else unicodedata.normalize("NFC", text)]
        for pattern in patterns:
            pieces = [part for piece in pieces for part in regex.findall(pattern, piece)]
        split = backend.pre_tokenizer.pre_tokenize_str("".join(pieces))
        assert [backend.decoder.decode([part]) for part, _ in split] == pieces, text


def test_smollm_splits_every_digit(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(converted(write_gguf(tmp_path / "tiny.gguf", llama_weights(), pre="smollm")))
    assert tokenizer.encode("1234") == [TOKENS.index(digit) for digit in "1234"]


def refusal(tmp_path: Path, kind: type[ModelError], weights: dict[str, Any] | None = None, **options: Any) -> str:
    path = write_gguf(tmp_path / "tiny.gguf", llama_weights() if weights is None else weights, **options)
    with pytest.raises(kind) as refused:
        converted(path)
    assert type(refused.value) is kind
    assert str(path) in str(refused.value)
    return str(refused.value)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    assert "'mamba'" in refusal(tmp_path, UnsupportedModel, architecture="mamba")


def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    assert "'viking'" in refusal(tmp_path, UnsupportedModel, pre="viking")


def test_file_without_a_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    assert "(none)" in refusal(tmp_path, UnsupportedModel, pre=None)


def test_unknown_tokenizer_model_is_refused_by_name(tmp_path: Path) -> None:
    assert "'rwkv'" in refusal(tmp_path, UnsupportedModel, model="rwkv")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda writer: writer.add_attention_scale(0.5), "llama.attention.scale"),
        (lambda writer: writer.add_rope_dimension_count(8), "rope.dimension_count"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "longrope"),
        (lambda writer: writer.add_uint16("split.count", 3), "one of several parts"),
        (lambda writer: writer.add_value_length(8), "value"),
        (lambda writer: writer.add_causal_attention(False), "attention.causal"),
    ],
    ids=["unread metadata", "partial rotary", "scaled rotary", "parts", "value width", "encoders"],
)
def test_variants_that_would_run_wrongly_are_refused(tmp_path: Path, edit: Any, named: str) -> None:
    assert named in refusal(tmp_path, UnsupportedModel, edit=edit)


def test_rotary_factors_that_are_not_those_of_llama_3_are_refused(tmp_path: Path) -> None:
    weights = {**llama_weights(), "rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    assert "rope_freqs" in refusal(tmp_path, UnsupportedModel, weights)


def test_unknown_quantization_is_refused_with_its_tensor(tmp_path: Path) -> None:
    weights = llama_weights()
    path = tmp_path / "tiny.gguf"

    def edit(writer: gguf.GGUFWriter) -> None:
        weight = weights.pop("blk.1.ffn_up.weight")
        writer.add_tensor("blk.1.ffn_up.weight", weight.astype(np.int8), raw_dtype=Quantization.I8)

    write_gguf(path, weights, edit=edit)
    with pytest.raises(UnsupportedModel, match=r"blk\.1\.ffn_up\.weight is stored as I8"):
        converted(path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    weights = llama_weights()
    del weights["blk.1.attn_k.weight"]
    assert "missing: blk.1.attn_k.weight" in refusal(tmp_path, CheckpointError, weights)


def test_missing_embedding_is_named(tmp_path: Path) -> None:
    weights = llama_weights()
    del weights["token_embd.weight"]
    assert "token_embd.weight is missing" in refusal(tmp_path, CheckpointError, weights)


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    weights = {**llama_weights(), "blk.0.attn_q_norm.weight": np.ones(HIDDEN, np.float32)}
    assert "1 unknown: blk.0.attn_q_norm.weight" in refusal(tmp_path, CheckpointError, weights)


def test_many_faults_are_counted_and_the_first_of_each_kind_named(tmp_path: Path) -> None:
    weights = llama_weights()
    renamed = {name.replace("blk.1.", "blk.9."): weight for name, weight in weights.items()}
    message = refusal(tmp_path, CheckpointError, renamed | {"blk.0.ffn_up.weight": np.ones((3, 3), np.float32)})
    assert "9 missing: blk.1.attn_k.weight, blk.1.attn_norm.weight, " in message
    assert message.count("blk.9.") == 5
    assert "and 4 more; 9 unknown: blk.9.attn_k.weight" in message
    assert "1 misshapen: blk.0.ffn_up.weight has shape [3, 3]" in message


def test_misshapen_tensors_are_named_with_both_shapes(tmp_path: Path) -> None:
    weights = {**llama_weights(), "blk.0.ffn_up.weight": np.ones((INNER, 2 * HIDDEN), np.float32)}
    message = refusal(tmp_path, CheckpointError, weights)
    assert f"blk.0.ffn_up.weight has shape [{INNER}, {2 * HIDDEN}]" in message
    assert f"needs [{INNER}, {HIDDEN}]" in message


def test_vocabulary_of_another_size_than_the_embedding_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, CheckpointError, llama_weights(vocab=len(TOKENS) + 3))
    assert f"{len(TOKENS)} tokens, the embedding {len(TOKENS) + 3} rows" in message


def test_metadata_of_another_kind_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, CheckpointError, edit=lambda writer: writer.add_string("llama.expert_count", "many"))
    assert "llama.expert_count must be of type int, got 'many'" in message


def test_merge_of_unknown_tokens_is_named(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        for section in writer.kv_data:
            section.pop("tokenizer.ggml.merges", None)
        writer.add_token_merges(["a zz"])

    assert "'a zz'" in refusal(tmp_path, CheckpointError, edit=edit)


def test_special_id_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, CheckpointError, edit=lambda writer: writer.add_eot_token_id(10**6))
    assert "eot_token_id is 1000000" in message


def test_file_cut_short_anywhere_is_refused_with_its_name(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", llama_weights()).read_bytes()
    path, folder = tmp_path / "cut.gguf", tmp_path / "converted"
    folder.mkdir()
    for size in [*range(1, 200, 19), *range(200, len(whole), len(whole) // 20), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(
            CheckpointError, match=r"cut\.gguf is not a whole GGUF file: it ends after .* \(cut short\?\)"
        ):
            convert(path, folder, quiet)
        assert not any(folder.iterdir())


def test_corrupt_length_is_noticed_at_once(tmp_path: Path) -> None:
    data = bytearray(write_gguf(tmp_path / "whole.gguf", llama_weights()).read_bytes())
    key = b"tokenizer.ggml.token_type"
    at = data.index(key) + len(key) + 8
    data[at : at + 8] = struct.pack("<Q", 2**40)
    path = tmp_path / "corrupt.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"corrupt\.gguf"):
        converted(path)


def test_random_damage_is_a_model_error_and_nothing_else(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", llama_weights()).read_bytes()
    header = whole.index(b"output_norm.weight")
    draw = random.Random(5)
    path = tmp_path / "damaged.gguf"
    for index in range(60):
        data = bytearray(whole)
        for _ in range(3):
            data[draw.randrange(header)] = draw.randrange(256)
        path.write_bytes(data)
        folder = tmp_path / f"out{index}"
        folder.mkdir()
        with contextlib.suppress(ModelError):
            convert(path, folder, quiet)


def test_other_files_are_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("this is no model, whatever its name says")
    with pytest.raises(CheckpointError, match="magic"):
        converted(path)
