from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from engine.client.detokenizer import Detokenizer, Increment
from engine.client.tokenizer import Tokenizer, load_tokenizer
from engine.sampling_params import SamplingParams

NULL = load_tokenizer("null")


def with_decoder(decoder: Any, words: Sequence[str], special: Sequence[str] = ("<s>", "</s>")) -> Tokenizer:
    """A tokenizer of the given words and all byte tokens, made to decode by `decoder`."""
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=words[0]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(list(special))
    backend.add_tokens(["<tool>", "é"])
    return Tokenizer(backend, {}, ())


LLAMA2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
SPACED = ["a", "▁", "▁a", "▁the", "s", "▁▁", "é", "日", "本", "\ufffd", "\n"]

WINDOWED = {
    "llama2": with_decoder(LLAMA2, SPACED),
    "gemma": with_decoder(GEMMA, SPACED),
    "metaspace": with_decoder(decoders.Metaspace(), SPACED),
    "wordpiece": with_decoder(decoders.WordPiece(), ["play", "##ing", "##s", ".", "do", "n't", "'", "日"]),
    "bpe suffix": with_decoder(decoders.BPEDecoder(), ["low</w>", "lo", "w</w>", "est</w>", "日</w>"]),
    "none": with_decoder(None, ["one", "two", "三"]),
}


def run(detokenizer: Detokenizer, token_ids: Sequence[int], sizes: Sequence[int] = (1,)) -> list[Increment]:
    """Feed `token_ids` in updates of the given sizes in turn, the last one finished; stop at a stop string."""
    increments = []
    start = turn = 0
    while start < len(token_ids) or not increments:
        stop = start + sizes[turn % len(sizes)]
        increments.append(detokenizer.update(token_ids[start:stop], stop >= len(token_ids)))
        if increments[-1].stop_string is not None:
            break
        start, turn = stop, turn + 1
    return increments


def text_of(increments: Sequence[Increment]) -> str:
    return "".join(increment.text for increment in increments)


def check_is_streamed(tokenizer: Tokenizer, token_ids: list[int], sizes: list[int], skip: bool) -> None:
    """The increments are the text of all ids, and what is out is never taken back."""
    params = SamplingParams(skip_special_tokens=skip)
    increments = run(Detokenizer(tokenizer, [], params), token_ids, sizes)
    assert text_of(increments) == tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert sum(increment.num_tokens_used for increment in increments) == len(token_ids)


EXHAUSTIVE = settings(deadline=None, derandomize=True, max_examples=300)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@pytest.mark.slow
def test_streamed_text_of_the_default_model_is_the_text_of_all_ids(smollm2_folder: Path) -> None:
    tokenizer = load_tokenizer(smollm2_folder)
    draw = random.Random(11)
    pools = [
        range(17),
        range(17, 300),
        range(tokenizer.vocab_size),
        range(tokenizer.vocab_size, tokenizer.vocab_size + 9),
    ]
    texts = ["日本語👩‍👩‍👧 naïve", "def f(x):\n\treturn 'é'", "<|im_end|> 한국어"]
    for _ in range(2000):
        ids: list[int] = []
        for _ in range(draw.randrange(1, 8)):
            pool = draw.choice([*pools, None])
            ids += tokenizer.encode(draw.choice(texts)) if pool is None else draw.choices(pool, k=draw.randrange(1, 9))
        check_is_streamed(tokenizer, ids, draw.choices(range(1, 5), k=3), draw.random() < 0.5)


@EXHAUSTIVE
@given(data=st.binary(max_size=40), sizes=SIZES)
def test_streamed_bytes_are_the_text_of_all_bytes(data: bytes, sizes: list[int]) -> None:
    check_is_streamed(NULL, list(data), sizes, True)
    assert text_of(run(Detokenizer(NULL, [], SamplingParams()), list(data), sizes)) == data.decode(errors="replace")


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.slow
@EXHAUSTIVE
@given(data=st.data())
def test_streamed_text_of_other_decoders_is_the_text_of_all_ids(name: str, data: st.DataObject) -> None:
    tokenizer = WINDOWED[name]
    word = st.integers(0, 11)
    added = st.integers(tokenizer.vocab_size - 5, tokenizer.vocab_size + 1)
    first_byte = tokenizer._backend.token_to_id("<0x00>")
    byte = st.sampled_from([0x41, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x98, 0x80, 0xFF]).map(lambda value: first_byte + value)
    ids = data.draw(st.lists(st.one_of(word, added, byte), max_size=30))
    check_is_streamed(tokenizer, ids, data.draw(SIZES), data.draw(st.booleans()))


def test_character_is_held_until_its_last_byte() -> None:
    detokenizer = Detokenizer(NULL, [], SamplingParams())
    texts = [detokenizer.update([byte], False).text for byte in "a😀é".encode()]
    assert texts == ["a", "", "", "", "😀", "", "é"]


def test_incomplete_character_at_the_end_is_flushed_as_a_replacement() -> None:
    detokenizer = Detokenizer(NULL, [], SamplingParams())
    assert detokenizer.update([0x61, 0xF0, 0x9F], False).text == "a"
    assert detokenizer.update([], True) == Increment("\ufffd", None, 0)


def test_first_word_after_a_prompt_brings_its_space() -> None:
    tokenizer = WINDOWED["llama2"]
    the, a, begin = SPACED.index("▁the"), SPACED.index("▁a"), tokenizer.vocab_size - 4
    assert text_of(run(Detokenizer(tokenizer, [], SamplingParams()), [the, a])) == "the a"
    assert text_of(run(Detokenizer(tokenizer, [begin], SamplingParams()), [the, a])) == "the a"
    assert text_of(run(Detokenizer(tokenizer, [a, begin], SamplingParams()), [the, a])) == " the a"


def test_run_of_byte_tokens_costs_no_more_than_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_decoder(LLAMA2, SPACED)
    decoded: list[int] = []
    decode = tokenizer.decode

    def counting(token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoded.append(len(token_ids))
        return decode(token_ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counting)
    ids = [len(SPACED) + 0xFF] * 500 + [0, 1, 2, 3] * 100
    run(Detokenizer(tokenizer, [], SamplingParams()), ids)
    assert sum(decoded) <= 4 * len(ids)


def expected_stop(text: str, stops: Sequence[str], min_tokens: int) -> tuple[int, str] | None:
    """By definition: the first end after the first `min_tokens` characters, then the first in the list."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop) and (not min_tokens or end > min_tokens):
                return end, stop
    return None


def check_stops(text: str, stops: list[str], include: bool, min_tokens: int, sizes: list[int]) -> None:
    params = SamplingParams(
        stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )
    increments = run(Detokenizer(NULL, [], params), list(text.encode()), sizes)
    found = expected_stop(text, stops, min_tokens)
    used = sum(increment.num_tokens_used for increment in increments)
    if found is None:
        assert (text_of(increments), increments[-1].stop_string, used) == (text, None, len(text))
    else:
        end, stop = found
        shown = text[:end] if include else text[: end - len(stop)]
        assert (text_of(increments), increments[-1].stop_string, used) == (shown, stop, end)


@pytest.mark.slow
def test_stop_strings_end_the_text_where_the_definition_says() -> None:
    draw = random.Random(12)

    def word(low: int, high: int) -> str:
        return "".join(draw.choices("ab", k=draw.randrange(low, high)))

    for _ in range(5000):
        stops = [word(2, 7) for _ in range(draw.randrange(1, 4))]
        check_stops(
            word(0, 25), stops, draw.random() < 0.5, draw.choice([0, 0, 1, 5, 12]), draw.choices(range(1, 5), k=3)
        )


def test_only_what_may_still_become_a_stop_string_is_held() -> None:
    detokenizer = Detokenizer(NULL, [], SamplingParams(stop=("END", "ENTER")))
    texts = [detokenizer.update(list(chunk.encode()), False).text for chunk in ("xE", "N", "T", "ENEN", "y", "EN")]
    assert texts == ["x", "", "", "ENTEN", "ENy", ""]
    assert detokenizer.update(list(b"D and more"), False) == Increment("", "END", 1)


def test_stop_string_that_is_included_is_not_waited_for() -> None:
    detokenizer = Detokenizer(NULL, [], SamplingParams(stop=("END",), include_stop_str_in_output=True))
    assert detokenizer.update(list(b"xEN"), False).text == "xEN"
    assert detokenizer.update(list(b"Dy"), False) == Increment("D", "END", 1)


def test_tokens_after_a_stop_string_add_nothing() -> None:
    detokenizer = Detokenizer(NULL, [], SamplingParams(stop=("b",)))
    assert detokenizer.update(list(b"abc"), False) == Increment("a", "b", 2)
    assert detokenizer.update(list(b"def"), True) == Increment("", "b", 0)


def test_held_text_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(NULL, [], SamplingParams(stop=("END",)))
    assert detokenizer.update(list(b"xEN"), False).text == "x"
    assert detokenizer.update([], True) == Increment("EN", None, 0)


def test_replacement_flushed_at_the_end_may_complete_a_stop_string() -> None:
    detokenizer = Detokenizer(NULL, [], SamplingParams(stop=("a\ufffd",)))
    assert detokenizer.update([0x61, 0xF0], True) == Increment("", "a\ufffd", 2)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"stop_token_ids": (ord("!"),)}, "ab"),
        ({"stop_token_ids": (ord("!"),), "include_stop_str_in_output": True}, "ab!"),
        ({"eos_token_ids": (ord("!"),)}, "ab"),
        ({"eos_token_ids": (ord("!"),), "ignore_eos": True}, "ab!"),
        ({"stop_token_ids": (ord("!"),), "min_tokens": 3}, "ab"),
        ({"stop_token_ids": (ord("!"),), "min_tokens": 4}, "ab!"),
        ({"stop_token_ids": (ord("b"),), "min_tokens": 3}, "ab!"),
    ],
)
def test_stop_token_that_ended_the_text_is_shown_only_if_asked(options: dict[str, Any], shown: str) -> None:
    increments = run(Detokenizer(NULL, [], SamplingParams(**options)), list(b"ab!"))
    assert text_of(increments) == shown
    assert sum(increment.num_tokens_used for increment in increments) == 3


def test_stop_token_inside_a_text_that_goes_on_is_shown() -> None:
    params = SamplingParams(stop_token_ids=(ord("!"),), min_tokens=4)
    assert text_of(run(Detokenizer(NULL, [], params), list(b"a!b!"))) == "a!b"


def test_special_tokens_are_shown_only_if_asked(smollm2_folder: Path) -> None:
    tokenizer = load_tokenizer(smollm2_folder)
    ids = tokenizer.encode("Paris.<|im_end|>")
    assert text_of(run(Detokenizer(tokenizer, [], SamplingParams()), ids)) == "Paris."
    shown = SamplingParams(skip_special_tokens=False)
    assert text_of(run(Detokenizer(tokenizer, [], shown), ids)) == "Paris.<|im_end|>"
    ended = SamplingParams(skip_special_tokens=False, eos_token_ids=tokenizer.eos_token_ids)
    assert text_of(run(Detokenizer(tokenizer, [], ended), ids)) == "Paris."


@pytest.mark.slow
@pytest.mark.parametrize("name", ["null", *WINDOWED])
def test_what_a_token_costs_does_not_grow_with_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = NULL if name == "null" else WINDOWED[name]
    costs: list[int] = []

    def counting(function: Any, size: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            costs[-1] += size(arguments[0])
            return function(*arguments, **options)

        return counted

    monkeypatch.setattr(tokenizer, "decode", counting(tokenizer.decode, len), raising=False)
    monkeypatch.setattr(tokenizer, "token_bytes", counting(tokenizer.token_bytes, lambda token_id: 1), raising=False)
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["never comes", "a" * 50]))
    draw = random.Random(5)
    for _ in range(20_000):
        costs.append(0)
        detokenizer.update([draw.randrange(10)], False)
        assert len(detokenizer._held) < 60
    assert 0 < sum(costs[-1000:]) <= 1.2 * sum(costs[:1000])


@pytest.mark.parametrize("num_bytes_before", [1, 2])
def test_a_prompt_that_ends_inside_a_character_adds_nothing_to_the_text(num_bytes_before: int) -> None:
    prompt = "long prompt 日".encode()
    cut = len(prompt) - 3 + num_bytes_before
    increments = run(Detokenizer(NULL, list(prompt[:cut]), SamplingParams()), [*prompt[cut:], *b"ok"])
    assert text_of(increments) == "\ufffd" * (3 - num_bytes_before) + "ok"


def test_bytes_without_end_that_are_no_text_come_out_one_by_one() -> None:
    detokenizer = Detokenizer(NULL, [], SamplingParams())
    texts = [detokenizer.update([0x80], False).text for _ in range(50)]
    assert texts == ["\ufffd"] * 50
    assert detokenizer.update(list("é".encode()), False).text == "é"


def test_a_special_token_that_a_parser_looks_for_is_shown_beside_hidden_ones() -> None:
    tokenizer = WINDOWED["gemma"]
    start, end = (tokenizer.token_id(token) for token in ("<s>", "</s>"))
    assert {start, end} == tokenizer.special_token_ids
    params = SamplingParams(shown_token_ids=(start,))
    assert text_of(run(Detokenizer(tokenizer, [], params), [0, start, 0, end, 0])) == "a<s>aa"
