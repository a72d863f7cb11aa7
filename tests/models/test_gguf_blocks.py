"""A GGUF file's blocks of 4 bits in the operations in C: taken as they are, whatever stands beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization

from engine.config import EngineConfig
from engine.kernels.operations import GROUP, Form
from engine.kernels.weights import Int4, PackedWeight, interleaved
from engine.model_runner.model_runner import ModelRunner
from engine.models.cache import GGUF_FILE
from engine.models.compiled_decoder import CompiledDecoder
from tests.models.test_gguf import LAYERS, converted, llama_weights, write_gguf

FORMS = (Quantization.Q4_0, Quantization.Q4_1)
Q8 = Quantization.Q8_0


def start(folder: Path, **settings: Any) -> CompiledDecoder:
    config = EngineConfig(kernels="compiled", num_threads=1, num_gpu_blocks_override=20, max_model_len=64, **settings)
    runner = ModelRunner(config, folder)
    runner.start(lambda *call: None)
    assert isinstance(runner._model, CompiledDecoder)
    return runner._model


def folder_of(tmp_path: Path, tied: bool, forms: Mapping[str, Quantization]) -> Path:
    path = write_gguf(tmp_path / "tiny.gguf", llama_weights(tied=tied), quantization=Quantization.Q4_0, forms=forms)
    folder = converted(path)
    path.rename(folder / GGUF_FILE)  # as the cache keeps it
    return folder


def blocks(weight: np.ndarray[Any, Any], form: Quantization) -> Int4:
    """Return what a file has of `weight`: of each block a factor, in Q4_1 a least value, and 16 bytes of numbers."""
    found = gguf.quants.quantize(weight, form).reshape(len(weight), weight.shape[1] // GROUP, -1)
    scales = torch.from_numpy(found[..., :-16].copy().view(np.float16))
    least = -8 * scales[..., 0] if form is Quantization.Q4_0 else scales[..., 1]
    return Int4(torch.from_numpy(found[..., -16:].copy()), scales[..., 0], least)


def quantized(weight: np.ndarray[Any, Any], form: Quantization) -> Int4:
    """Return what is made of `weight`, which a file holds otherwise: the checkpoint has it in bfloat16."""
    values = gguf.quants.dequantize(gguf.quants.quantize(weight, form), form)
    return Int4.of(torch.from_numpy(values).bfloat16())


def packed(*parts: Int4, gated: bool = False) -> torch.Tensor:
    whole = Int4.joined(parts)
    if gated:
        whole = Int4(*map(interleaved, whole))
    shape = len(whole.factor), whole.factor.shape[1] * GROUP
    return PackedWeight(torch.empty(shape), None, Form.INT4, whole).data


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_4_bits_is_the_files_own(
    tmp_path: Path, form: Quantization, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    name = "token_embd.weight" if tied else "output.weight"
    folder = folder_of(tmp_path, tied, {name: form})
    with caplog.at_level("INFO"):
        model = start(folder, quantization="int4", head_quantization="int4")
    expected = packed(blocks(llama_weights(tied=tied)[name], form))
    head = next(weight for weight in model._memory[::-1] if isinstance(weight, PackedWeight) and is_head(weight, model))
    assert torch.equal(head.data.flatten(), expected.flatten())
    assert f"; {1 + 7 * LAYERS} tensors in 4 bits as they are stored" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        start(folder, quantization="int8", head_quantization="int4")
    assert "layers int8, head int4, keys and values int8; 1 tensors in 4 bits as they are stored" in caplog.text


def is_head(weight: PackedWeight, model: CompiledDecoder) -> bool:
    return weight.form is Form.INT4 and weight.num_outputs == model.config.vocab_size


def test_of_a_fused_weight_what_the_file_has_in_4_bits_is_its_own_and_the_rest_is_quantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forms = {"blk.0.attn_v.weight": Q8, "blk.0.ffn_gate.weight": Q8, "blk.1.attn_q.weight": Quantization.Q4_1}
    forms |= {f"blk.1.{name}.weight": Q8 for name in ("ffn_up", "ffn_gate", "ffn_down")}
    with caplog.at_level("INFO"):
        model = start(folder_of(tmp_path, True, forms), quantization="int4")
    weights = llama_weights(tied=True)

    def part(index: int, name: str) -> Int4:
        source = f"blk.{index}.{name}.weight"
        form = forms.get(source, Quantization.Q4_0)
        return (quantized if form is Q8 else blocks)(weights[source], form)

    expected = [
        tensor
        for index in range(LAYERS)
        for tensor in (
            packed(*(part(index, f"attn_{letter}") for letter in "qkv")),
            packed(part(index, "attn_output")),
            packed(part(index, "ffn_gate"), part(index, "ffn_up"), gated=True),
            packed(part(index, "ffn_down")),
        )
    ]
    found = [weight.data for weight in model._memory if isinstance(weight, PackedWeight) and weight.form is Form.INT4]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.flatten(), other.flatten())
    assert f"head int8, keys and values int8; {7 * LAYERS - 5} tensors in 4 bits as they are stored" in caplog.text
