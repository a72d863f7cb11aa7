"""Processors that a Python program adds to sampling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.errors import ConfigError, InvalidRequest
from engine.outputs import FinishReason
from engine.sampling.sampler import SamplingRow
from engine.sampling_params import SamplingParams

SETTINGS: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 64, "num_threads": 1}


class Wants:
    """Raises the logit of the token that a request names; keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        for i, row in enumerate(rows):
            self.shown.append(row.tokens.tolist())
            if row.params.extra_args:
                logits[i, row.params.extra_args["token"]] += 1000


def test_a_processor_changes_the_rows_that_ask_for_it_and_sees_all_their_tokens(byte_llama: Path) -> None:
    wants = Wants()
    with engine.LLM(str(byte_llama), logits_processors=[wants], **SETTINGS) as llm:
        params = SamplingParams(extra_args={"token": 65}, max_tokens=5)
        (asking,) = llm.generate("hi", params, use_tqdm=False)
        assert asking.outputs[0].text == "AAAAA"
        assert wants.shown == [[*b"hi", *b"A" * n] for n in range(5)]
        plain = SamplingParams(temperature=0, max_tokens=5)
        (output,) = llm.generate("hi", plain, use_tqdm=False)
    with engine.LLM(str(byte_llama), **SETTINGS) as llm:
        assert llm.generate("hi", plain, use_tqdm=False)[0].outputs[0].text == output.outputs[0].text
        with pytest.raises(InvalidRequest, match="extra_args are for logits processors"):
            llm.generate("hi", params, use_tqdm=False)


def test_what_is_forbidden_stays_forbidden(byte_llama: Path) -> None:
    with engine.LLM(str(byte_llama), logits_processors=[Wants()], **SETTINGS) as llm:
        params = SamplingParams(
            extra_args={"token": 65}, structured_outputs={"regex": "[x-z]{4}"}, max_tokens=5, temperature=0
        )
        (output,) = llm.generate("hi", params, use_tqdm=False)[0].outputs
        assert {*output.text} <= {*"xyz"}
        params = SamplingParams(extra_args={"token": 65}, allowed_token_ids=[70], max_tokens=3)
        assert llm.generate("hi", params, use_tqdm=False)[0].outputs[0].text == "FFF"


def test_a_row_that_a_processor_spoils_fails_alone(byte_llama: Path) -> None:
    def spoils(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        for i, row in enumerate(rows):
            if row.params.extra_args:
                logits[i, 3] = torch.nan

    with engine.LLM(str(byte_llama), logits_processors=[spoils], **SETTINGS) as llm:
        stepper = llm._engine
        stepper.add_request("bad", "hi", SamplingParams(extra_args={}, max_tokens=3))
        stepper.add_request("spoilt", "hi", SamplingParams(extra_args={"x": 1}, max_tokens=3))
        outputs = {}
        while stepper.has_unfinished_requests():
            outputs.update({output.request_id: output.outputs[0] for output in stepper.step()})
    assert outputs["bad"].finish_reason is FinishReason.LENGTH
    assert outputs["spoilt"].finish_reason is FinishReason.ERROR
    assert "a logits processor gave NaN" in outputs["spoilt"].error.message


def test_a_processor_that_raises_ends_the_requests_of_its_step_with_the_cause(byte_llama: Path) -> None:
    def raises(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        if rows[0].num_output_tokens == 1:
            raise ZeroDivisionError("by a user")

    with engine.LLM(str(byte_llama), logits_processors=[raises], **SETTINGS) as llm:
        (output,) = llm.generate("hi", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs
        assert output.error.type == "ZeroDivisionError"
        assert llm.generate("hi", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].error is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"isolation": "process", "logits_processors": [print]}, "isolation"),
        ({"logits_processors": [print]}, "the integer model has none"),
        ({"model": "default", "logits_processors": [5]}, "5 cannot be"),
    ],
)
def test_processors_that_could_not_be_called_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine.LLM(**{"model": "null"} | settings)
