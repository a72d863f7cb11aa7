"""Input and output processors on the null tokenizer: what is refused, what is resolved, how pieces become a whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.client.input_processor import InputProcessor, RequestOptions
from engine.client.output_processor import RequestState
from engine.client.tokenizer import load_tokenizer
from engine.config import EngineConfig, SchedulingPolicy
from engine.errors import Cause, InvalidRequest, PromptTooLong
from engine.outputs import FinishReason, Logprobs
from engine.protocol import EngineCoreOutput, EngineCoreRequest, EngineReady
from engine.sampling_params import OutputKind, SamplingParams

TOKENIZER = load_tokenizer("null")
READY = EngineReady(0, 100, 16, 64, 1, 256, "null", 0)


def processor(seed: int = 0, scheduling_policy: SchedulingPolicy = "fcfs") -> InputProcessor:
    config = EngineConfig(model="null", seed=seed, scheduling_policy=scheduling_policy)
    return InputProcessor(config, READY, TOKENIZER)


def requests_of(params: SamplingParams, prompt: str = "abc", seed: int = 0) -> list[EngineCoreRequest]:
    inputs = processor(seed)
    _, requests = inputs.make_requests(inputs.tokenize(prompt), params, RequestOptions())
    return requests


def test_children_get_their_own_seeds_and_ids() -> None:
    requests = requests_of(SamplingParams(n=3, seed=10))
    assert [request.sampling_params.seed for request in requests] == [10, 11, 12]
    assert len({request.request_id for request in requests}) == 3
    assert all(request.sampling_params.n == 1 for request in requests)


def test_a_seed_is_drawn_from_the_clients_own_generator() -> None:
    first, again, other = (requests_of(SamplingParams(), seed=seed)[0].sampling_params.seed for seed in (1, 1, 2))
    assert first == again != other
    assert 0 <= first < 2**64


def test_a_negative_or_huge_seed_is_folded_into_64_bits() -> None:
    assert requests_of(SamplingParams(seed=-2))[0].sampling_params.seed == 2**64 - 2
    assert requests_of(SamplingParams(seed=-2, n=2))[1].sampling_params.seed == 2**64 - 1
    assert requests_of(SamplingParams(seed=2**64 - 1, n=2))[1].sampling_params.seed == 0


def test_max_tokens_of_none_reaches_to_the_end_of_the_context() -> None:
    assert requests_of(SamplingParams(max_tokens=None), "abcd")[0].sampling_params.max_tokens == 60


@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"), [(63, 1, True), (60, 4, True), (60, 5, False), (64, 1, False), (64, None, False)]
)
def test_prompt_and_tokens_fit_the_context_exactly_or_are_refused(
    length: int, max_tokens: int | None, fits: bool
) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    if fits:
        assert requests_of(params, "x" * length)
        return
    with pytest.raises(PromptTooLong, match="64"):
        requests_of(params, "x" * length)


@pytest.mark.parametrize("prompt", ["", [], [256], [-1], [1.5], [True], None, 3, {"role": "user"}, [[1]], [{}]])
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest):
        processor().tokenize(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(OutputKind))
@given(sizes=st.lists(st.integers(0, 3), min_size=1, max_size=6), fetches=st.lists(st.booleans(), min_size=6))
def test_whatever_the_reader_fetches_and_when_the_whole_is_the_same(
    kind: OutputKind, sizes: list[int], fetches: list[bool]
) -> None:
    (request,) = requests_of(SamplingParams(max_tokens=None))
    state = RequestState("label", "abc", [request], kind, TOKENIZER, 0.0)
    tokens, told, last = [], [], None
    for step, size in enumerate(sizes):
        new = [65 + step] * size
        tokens += new
        ends = step == len(sizes) - 1
        reason = FinishReason.LENGTH if ends else None
        state.add(EngineCoreOutput(request.request_id, new, finish_reason=reason), float(step))
        if (fetches[step] or ends) and (news := state.fetch()) is not None:
            last = news
            told += news.token_ids
    assert last is not None
    assert last.finish_reason is FinishReason.LENGTH
    assert (told if kind is OutputKind.DELTA else last.token_ids) == tokens
    assert state.is_finished
    assert state.fetch() is None


def test_a_failed_request_tells_its_cause_and_keeps_its_text() -> None:
    (request,) = requests_of(SamplingParams())
    state = RequestState("label", None, [request], OutputKind.DELTA, TOKENIZER, 0.0)
    state.add(EngineCoreOutput(request.request_id, [65]), 0.0)
    cause = Cause("BadLogits", "NaN")
    state.add(EngineCoreOutput(request.request_id, finish_reason=FinishReason.ERROR, error=cause), 1.0)
    news = state.fetch()
    assert news is not None
    assert (news.text, news.finish_reason, news.error) == ("A", FinishReason.ERROR, cause)


def test_what_comes_after_a_stop_string_is_not_counted() -> None:
    (request,) = requests_of(SamplingParams(stop="B", max_tokens=None))
    state = RequestState("label", None, [request], OutputKind.DELTA, TOKENIZER, 0.0)
    assert state.add(EngineCoreOutput(request.request_id, [65, 66, 67]), 0.0) is True
    assert state.add(EngineCoreOutput(request.request_id, [68]), 1.0) is False
    news = state.fetch()
    assert news is not None
    assert (news.text, news.stop_reason, state.usage.completion_tokens) == ("A", "B", 2)


@pytest.mark.parametrize(
    "options",
    [{"priority": 2**31}, {"priority": -(2**70)}, {"cache_salt": "\ud800"}, {"client_key": "\udfff"}],
)
def test_options_that_cannot_be_sent_are_refused_by_name(options: dict[str, object]) -> None:
    inputs = processor()
    with pytest.raises(InvalidRequest) as caught:
        inputs.make_requests(inputs.tokenize("a"), SamplingParams(), RequestOptions(**options))  # type: ignore[arg-type]
    assert caught.value.param == next(iter(options))


def test_a_priority_is_obeyed_or_refused() -> None:
    for policy, is_obeyed in (("fcfs", False), ("fair", False), ("priority", True)):
        inputs = processor(scheduling_policy=policy)
        prompt, options = inputs.tokenize("a"), RequestOptions(priority=-3)
        if is_obeyed:
            (request,) = inputs.make_requests(prompt, SamplingParams(), options)[1]
            assert request.priority == -3
            continue
        with pytest.raises(InvalidRequest, match=f"priority -3 has no effect with --scheduling-policy {policy}"):
            inputs.make_requests(prompt, SamplingParams(), options)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2**31},
        {"stop": "x" * 1025},
        {"stop": "\ud800"},
        {"stop": ["a"] * 65},
        {"stop_token_ids": [1] * 129},
        {"stop_token_ids": [2**40]},
    ],
)
def test_parameters_beyond_their_bounds_are_refused_by_name(params: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert caught.value.param == next(iter(params))


def test_bad_words_are_spelled_as_they_stand_at_the_start_and_after_a_space() -> None:
    inputs = InputProcessor(EngineConfig(model="some"), READY, TOKENIZER)
    prompt = inputs.tokenize("a")
    (request,) = inputs.make_requests(prompt, SamplingParams(bad_words=[" ab", "ab", "c"]), RequestOptions())[1]
    assert request.sampling_params.bad_words_token_ids == ((97, 98), (32, 97, 98), (99,), (32, 99))


def logprobs_of(token_ids: list[int]) -> Logprobs:
    ids = np.array(token_ids, dtype=np.int32)
    return Logprobs(ids[:, None], -ids[:, None].astype(np.float32), ids)


@pytest.mark.parametrize("kind", list(OutputKind))
def test_logprobs_are_told_with_their_tokens_and_cut_at_a_stop_string(kind: OutputKind) -> None:
    (request,) = requests_of(SamplingParams(stop="DE", max_tokens=None))
    state = RequestState("label", None, [request], kind, TOKENIZER, 0.0)
    told = []
    for step, token_ids in enumerate([[65], [66, 67], [68, 69, 70]]):
        of_prompt = None if step else logprobs_of([1, 2])
        output = EngineCoreOutput(request.request_id, token_ids, logprobs_of(token_ids), of_prompt)
        state.add(output, float(step))
        if step and (news := state.fetch()) is not None:
            assert news.logprobs is not None
            assert news.logprobs.ranks.tolist() == news.token_ids
            told.append(news.token_ids)
    assert (
        told
        == {
            OutputKind.DELTA: [[65, 66, 67], [68, 69]],
            OutputKind.CUMULATIVE: [[65, 66, 67], [65, 66, 67, 68, 69]],
            OutputKind.FINAL_ONLY: [[65, 66, 67, 68, 69]],
        }[kind]
    )
    assert state.output([]).prompt_logprobs is state.prompt_logprobs is not None


def test_the_first_completion_alone_tells_the_prompt_s_logprobs() -> None:
    inputs = InputProcessor(EngineConfig(model="some"), READY, TOKENIZER)
    params = SamplingParams(n=3, prompt_logprobs=2, logprobs=1)
    _, requests = inputs.make_requests(inputs.tokenize("a"), params, RequestOptions())
    assert [request.sampling_params.prompt_logprobs for request in requests] == [2, None, None]
    assert [request.sampling_params.logprobs for request in requests] == [1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, None),
        ({"truncate_prompt_tokens": 3}, 3),
        ({"truncate_prompt_tokens": 1000}, None),
        ({"truncate_prompt_tokens": -1, "max_tokens": 20}, 44),
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, 63),
    ],
)
def test_of_a_truncated_prompt_the_last_tokens_are_kept(fields: dict[str, int | None], kept: int | None) -> None:
    inputs = processor()
    params = SamplingParams(**fields)
    text = "".join(map(chr, range(32, 112)))
    if kept is None and "truncate_prompt_tokens" not in fields:
        with pytest.raises(PromptTooLong, match="truncate_prompt_tokens"):
            inputs.tokenize(text, params)
        return
    prompt = inputs.tokenize(text, params)
    assert prompt.text == text
    assert prompt.token_ids == list(text.encode())[-(kept or 80) :]
    assert inputs.tokenize(list(text.encode()), params).token_ids == prompt.token_ids


@pytest.mark.parametrize(("server", "asked", "interval"), [(1, None, 1), (1, 5, 5), (10, 5, 10), (10, None, 10)])
@pytest.mark.parametrize("kind", [OutputKind.DELTA, OutputKind.CUMULATIVE])
def test_an_output_waits_for_its_interval_but_not_the_first_and_the_last(
    server: int, asked: int | None, interval: int, kind: OutputKind
) -> None:
    inputs = InputProcessor(EngineConfig(model="null", stream_interval=server), READY, TOKENIZER)
    prompt = inputs.tokenize("abc")
    label, requests = inputs.make_requests(
        prompt, SamplingParams(stream_interval=asked, max_tokens=23), RequestOptions()
    )
    state = RequestState(label, prompt.text, requests, kind, TOKENIZER, 0.0)
    told = []
    for number in range(1, 24):
        reason = FinishReason.LENGTH if number == 23 else None
        state.add(EngineCoreOutput(requests[0].request_id, [64 + number], finish_reason=reason), 0.0)
        if (news := state.fetch()) is not None:
            told.append((number, news.text))
    expected = [number for number in range(1, 24) if (number - 1) % interval == 0 or number == 23]
    assert [number for number, _ in told] == expected
    whole = "".join(chr(64 + number) for number in range(1, 24))
    assert (told[-1][1] if kind is OutputKind.CUMULATIVE else "".join(text for _, text in told)) == whole


def test_without_text_there_are_tokens_alone() -> None:
    (request,) = requests_of(SamplingParams(detokenize=False))
    state = RequestState("a", "abc", [request], OutputKind.DELTA, TOKENIZER, 0.0)
    state.add(EngineCoreOutput(request.request_id, [65, 66], finish_reason=FinishReason.LENGTH), 0.0)
    news = state.fetch()
    assert news is not None
    assert (news.text, news.token_ids, news.finish_reason) == ("", [65, 66], FinishReason.LENGTH)


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(10, 3), (10, 0), (10, 9), (1, 0)])
def test_prompt_tokens_are_counted_once_and_those_of_the_cache_beside(num_prompt: int, num_cached: int) -> None:
    requests = requests_of(SamplingParams(n=2, max_tokens=3), "a" * num_prompt)
    state = RequestState("a", None, requests, OutputKind.DELTA, TOKENIZER, 0.0)
    for request in requests:
        state.add(EngineCoreOutput(request.request_id, [65], num_cached_tokens=num_cached), 1.0)
        state.add(EngineCoreOutput(request.request_id, [66, 67], finish_reason=FinishReason.LENGTH), 2.0)
    assert (state.usage.prompt_tokens, state.usage.cached_tokens) == (num_prompt, num_cached)
    assert (state.usage.completion_tokens, state.usage.total_tokens) == (6, num_prompt + 6)
    assert (state.metrics.first_token_s, state.metrics.finished_s) == (1.0, 2.0)
