"""Every sampling parameter is refused out of its range, with its name, the value and the limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams

HUGE = 10**5000
STRANGE = [HUGE, -HUGE, 10**400, [HUGE], "x" * 10_000, True, float("nan"), float("inf")]
NUMBERS = {
    "n": (0, 129, "from 1 to 128"),
    "temperature": (-0.1, 2.1, "from 0 to 2"),
    "top_k": (-2, 2**31, "from -1 to 2147483647"),
    "top_p": (0, 1.1, "greater than 0 and at most 1"),
    "min_p": (-0.1, 1.1, "from 0 to 1"),
    "presence_penalty": (-2.1, 2.1, "from -2 to 2"),
    "frequency_penalty": (-2.1, 2.1, "from -2 to 2"),
    "repetition_penalty": (0, 101, "from 0.01 to 100"),
    "logprobs": (-1, 21, "from 0 to 20"),
    "prompt_logprobs": (-1, 21, "from 0 to 20"),
    "seed": (-(2**63) - 1, 2**64, f"from {-(2**63)} to {2**64 - 1}"),
    "stream_interval": (0, 65_537, "from 1 to 65536"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_its_range_is_refused_with_value_and_limit(name: str) -> None:
    *wrong, limit = NUMBERS[name]
    for value in wrong:
        with pytest.raises(InvalidRequest, match=name) as refused:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert limit in str(refused.value)
        assert str(value) in str(refused.value)
        assert refused.value.param == name


@pytest.mark.parametrize("name", [*NUMBERS, "max_tokens", "min_tokens", "truncate_prompt_tokens", "logit_bias"])
@pytest.mark.parametrize("value", STRANGE, ids=range(len(STRANGE)))
def test_no_value_is_too_strange_to_be_refused_in_a_short_message(name: str, value: Any) -> None:
    if value in (10**400, HUGE) and name in {"max_tokens", "truncate_prompt_tokens"}:
        return  # no limit of their own: the context's is
    if value is True and name in {"logprobs", "prompt_logprobs"}:
        return  # one, as in vLLM
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{name: {5: value} if name == "logit_bias" else value})
    assert refused.value.param == name
    assert len(str(refused.value)) < 300


class Unread(list[Any]):
    """A list of which nobody may read more than its length."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was read")


LISTS = ["stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids", "structured_outputs"]


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_is_too_long_is_refused_before_it_is_read(name: str) -> None:
    values = Unread([[]] * 20_000)
    with pytest.raises(InvalidRequest, match=r"at most .* got 20000") as refused:
        SamplingParams(**{name: {"choice": values} if name == "structured_outputs" else values})
    assert refused.value.param == name


def test_a_temperature_that_no_float_holds_is_refused_with_the_limit() -> None:
    with pytest.raises(InvalidRequest, match="temperature must be from 0 to 2, got a whole number of 1329 bits"):
        SamplingParams(temperature=10**400)


@pytest.mark.parametrize("value", [0, -2, 1.5, "3"])
def test_a_prompt_is_truncated_to_at_least_one_token_or_to_what_fits(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens must be"):
        SamplingParams(truncate_prompt_tokens=value)


def test_token_ids_to_tell_decide_how_many_logprobs_there_are() -> None:
    assert SamplingParams(logprob_token_ids=[7, 9]).logprobs == 2
    assert SamplingParams(logprob_token_ids=list(range(128)), logprobs=128).logprobs == 128
    for fields, said in (
        ({"logprob_token_ids": [7, 9], "logprobs": 3}, "the number of logprob_token_ids, 2, got 3"),
        ({"logprob_token_ids": [7, 9], "logprobs": True}, "the number of logprob_token_ids, 2, got 1"),
        ({"logprob_token_ids": list(range(129))}, "at most 128 values, got 129"),
        ({"logprob_token_ids": []}, "at least one token id"),
        ({"logprob_token_ids": [-1]}, "token ids from 0"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            SamplingParams(**fields)  # type: ignore[arg-type]


def test_no_string_ends_a_text_that_is_not_made() -> None:
    with pytest.raises(InvalidRequest, match="detokenize is false"):
        SamplingParams(stop=["x"], detokenize=False)


def test_a_seed_of_minus_1_is_none_as_in_vllm() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-2).seed == -2


def test_none_asks_for_nothing_and_true_for_one_logprob_as_in_vllm() -> None:
    nothing: Any = None
    given = SamplingParams(stop=nothing, stop_token_ids=nothing, bad_words=nothing, logit_bias=nothing)
    assert given == SamplingParams()
    assert SamplingParams(logprobs=True, prompt_logprobs=True) == SamplingParams(logprobs=1, prompt_logprobs=1)
    with pytest.raises(InvalidRequest, match="logprobs must be a whole number, got False"):
        SamplingParams(logprobs=False)
