"""Forms of the text with the default model: together with everything that changes logits, and beside other requests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import engine
from engine.errors import InvalidGrammar
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.structured_output.conftest import start
from tests.structured_output.test_json_schemas import drawn_schema

pytestmark = pytest.mark.slow

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"}, {"type": "null"}]},
]
ASK = [{"role": "user", "content": "Describe a person as JSON."}]


@pytest.fixture(scope="module")
def llm(smollm2_folder: Path) -> engine.LLM:
    return engine.LLM(str(smollm2_folder), max_model_len=512, num_gpu_blocks_override=200, num_threads=1)


def run(llm: engine.LLM, asked: dict[str, Any], **fields: Any) -> list[engine.CompletionOutput]:
    params = SamplingParams(structured_outputs=asked, **{"max_tokens": 100, "seed": 1} | fields)  # type: ignore[arg-type]
    return llm.chat(ASK, params, use_tqdm=False)[0].outputs


@pytest.mark.parametrize("schema", SCHEMAS, ids=[json.dumps(schema)[:40] for schema in SCHEMAS])
def test_documents_at_temperature_1_are_valid_and_hold_no_special_token(
    llm: engine.LLM, schema: dict[str, Any]
) -> None:
    outputs = run(llm, {"json": schema, "disable_any_whitespace": True}, n=12, temperature=1.0, max_tokens=24)
    complete = [output for output in outputs if output.finish_reason == FinishReason.STOP]
    assert len(complete) >= 10, [output.text for output in outputs]
    for output in complete:
        jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
        assert llm.tokenizer.special_token_ids.isdisjoint(output.token_ids)
        assert llm.tokenizer.decode(output.token_ids, skip_special_tokens=False) == output.text


def test_documents_by_drawn_schemas_at_temperature_1_are_valid(llm: engine.LLM) -> None:
    schemas = [schema for seed in range(40) if is_compiled(schema := drawn_schema(random.Random(7000 + seed)))][:30]
    forms = [StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True) for schema in schemas]
    wanted = [SamplingParams(seed=i, max_tokens=40, structured_outputs=form) for i, form in enumerate(forms)]
    num_complete = 0
    for schema, output in zip(schemas, generate_together(llm, wanted), strict=True):
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        if output.finish_reason == FinishReason.STOP:
            num_complete += 1
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(output.text))
        else:
            assert output.finish_reason == FinishReason.LENGTH, output.error
    assert len(schemas) == 30
    assert num_complete >= 15


def is_compiled(schema: dict[str, Any]) -> bool:
    try:
        start({"json": schema})
    except InvalidGrammar:
        return False
    return True


def test_a_text_that_may_end_or_go_on_ends_with_an_end_token_and_never_in_between(llm: engine.LLM) -> None:
    outputs = run(llm, {"regex": "(yes|no)( (yes|no))*"}, n=12, temperature=1.0, max_tokens=10)
    for output in outputs:
        if output.finish_reason == FinishReason.STOP:
            assert output.token_ids[-1] in llm.tokenizer.eos_token_ids
            assert {*output.text.split(" ")} <= {"yes", "no"}
    assert any(output.finish_reason == FinishReason.STOP for output in outputs)


def test_min_tokens_and_ignored_ends_go_on_only_while_the_form_lets_them(llm: engine.LLM) -> None:
    form = {"regex": "(yes|no)( (yes|no)){0,3}"}
    (short,) = run(llm, form, temperature=1.0)
    for fields in ({"min_tokens": 30}, {"ignore_eos": True}):
        (output,) = run(llm, form, temperature=1.0, **fields)
        assert output.finish_reason == FinishReason.STOP
        assert len(output.text.split(" ")) == 4 >= len(short.text.split(" "))
        assert {*llm.tokenizer.eos_token_ids}.isdisjoint(output.token_ids)


def test_what_else_changes_logits_is_obeyed_inside_the_form(llm: engine.LLM) -> None:
    (yes,) = llm.tokenizer.encode("yes")
    (no,) = llm.tokenizer.encode("no")
    form = {"choice": ["yes", "no", "maybe"]}
    greedy: dict[str, Any] = {"temperature": 0}
    assert run(llm, form, logit_bias={yes: 100}, **greedy)[0].text == "yes"
    assert run(llm, form, logit_bias={no: 100}, **greedy)[0].text == "no"
    assert run(llm, form, allowed_token_ids=[yes, 500], **greedy)[0].text == "yes"
    assert run(llm, form, bad_words=["yes", "y", "ye"], allowed_token_ids=[yes, no], **greedy)[0].text == "no"
    (output,) = run(llm, form, logprobs=3, presence_penalty=1.5, **greedy)
    assert output.logprobs is not None
    assert output.logprobs.token_ids[:, 0].tolist() == output.token_ids


def test_a_row_that_form_and_lists_leave_empty_fails_its_request_with_the_reason(llm: engine.LLM) -> None:
    (output,) = run(llm, {"choice": ["yes", "no"]}, allowed_token_ids=[500])
    assert output.finish_reason == FinishReason.ERROR
    assert output.error is not None
    assert "structured_outputs, allowed_token_ids" in output.error.message
    assert run(llm, {"choice": ["yes"]})[0].text == "yes"


def test_a_mixed_batch_gives_each_request_exactly_what_it_gets_alone(llm: engine.LLM) -> None:
    kinds: list[dict[str, Any]] = [
        {"structured_outputs": {"json": SCHEMAS[0]}},
        {},
        {"structured_outputs": {"regex": "[a-z ]{5,20}\\."}, "logprobs": 2},
        {"logit_bias": {30: 5.0, 700: -4.0}},
        {"structured_outputs": {"choice": ["one", "two", "three"]}, "temperature": 0},
        {"min_tokens": 8, "frequency_penalty": 0.5},
        {"structured_outputs": {"json_object": True}, "repetition_penalty": 1.2},
        {"top_p": 0.9, "top_k": 40, "logprobs": 20},
        {"bad_words": ["the", "I"], "min_p": 0.02, "temperature": 1.7},
        {"temperature": 0, "logprob_token_ids": [5, 30, 700]},
    ]
    wanted = [SamplingParams(**{"max_tokens": 8, "seed": index} | kind) for index, kind in enumerate(kinds)]
    alone = [llm.chat(ASK, params, use_tqdm=False)[0].outputs[0] for params in wanted]
    together = generate_together(llm, wanted)
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.text for output in together] == [output.text for output in alone]
    told = [(mixed.logprobs, lone.logprobs) for mixed, lone in zip(together, alone, strict=True)]
    assert sum(mixed is not None for mixed, _ in told) == 3
    for mixed, lone in told:
        assert (mixed is None) == (lone is None)
        if mixed is not None and lone is not None:
            assert np.array_equal(mixed.token_ids, lone.token_ids)
            assert np.array_equal(mixed.logprobs, lone.logprobs)


def generate_together(llm: engine.LLM, wanted: list[SamplingParams]) -> list[engine.CompletionOutput]:
    """Run one request with each of these parameters in the same steps, which `LLM` itself has no form for."""
    stepper = llm._engine
    for index, params in enumerate(wanted):
        stepper.add_request(str(index), ASK, params)
    outputs = {}
    while stepper.has_unfinished_requests():
        outputs.update({output.request_id: output.outputs[0] for output in stepper.step()})
    return [outputs[str(index)] for index in range(len(wanted))]
