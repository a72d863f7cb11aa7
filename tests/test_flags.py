"""Flags come from one table each, a file's values are defaults, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, InvalidRequest
from engine.flags import SAMPLING_HELP, SHARED, flags_of, parse, sampling_from, settings_from
from engine.parser import make_parser
from engine.sampling_params import SamplingParams

NOT_FOR_USERS = {"output_kind", "eos_token_ids", "bad_words_token_ids", "reasoning", "shown_token_ids", "extra_args"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.toml"


def test_every_sampling_parameter_a_user_may_set_has_a_flag() -> None:
    assert {*SAMPLING_HELP} == {*SamplingParams.__struct_fields__} - NOT_FOR_USERS


def test_sampling_flags_make_sampling_params() -> None:
    words = ["--temperature", "1.5", "--top-p", "0.9", "--top-k", "3", "--min-p", "0.1", "--seed", "7", "--max-tokens"]
    words += [
        "9",
        "--min-tokens",
        "2",
        "--stop",
        "a",
        "--stop",
        "b",
        "--stop-token-ids",
        "5",
        "--ignore-eos",
        "--n",
        "2",
    ]
    options = parse(make_parser(), ["generate", "null", "text", *words])
    assert sampling_from(options) == SamplingParams(
        temperature=1.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=7,
        max_tokens=9,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(5,),
        ignore_eos=True,
        n=2,
    )


def test_flags_of_lists_and_maps_of_token_ids(file: Path) -> None:
    words = ["--allowed-token-ids", "5", "--allowed-token-ids", "6", "--bad-words", "a b", "--logit-bias", '{"5": 1.5}']
    words += ["--repetition-penalty", "1.1", "--presence-penalty", "-1", "--frequency-penalty", "0.5"]
    words += ["--logprobs", "3", "--prompt-logprobs", "0"]
    expected = SamplingParams(
        allowed_token_ids=(5, 6),
        bad_words=("a b",),
        logit_bias={5: 1.5},
        repetition_penalty=1.1,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logprobs=3,
        prompt_logprobs=0,
        max_tokens=None,
        temperature=0,
    )
    rest = ["--temperature", "0"]
    params = sampling_from(parse(make_parser(), ["generate", "null", "text", *words, *rest]))
    assert params == msgspec.structs.replace(expected, max_tokens=params.max_tokens)
    file.write_text("allowed-token-ids = [5, 6]\nlogit-bias = {5 = 1.5}\n")
    from_file = sampling_from(parse(make_parser(), ["generate", "null", "text", "--config", str(file)]))
    assert (from_file.allowed_token_ids, from_file.logit_bias) == ((5, 6), {5: 1.5})


def test_a_flag_that_is_not_json_exits_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(make_parser(), ["generate", "text", "--logit-bias", "{5"])
    assert exit_info.value.code == 2
    assert "'{5' is not JSON" in capsys.readouterr().err


def test_a_parameter_out_of_range_is_refused_by_name() -> None:
    options = parse(make_parser(), ["generate", "text", "--top-p", "0"])
    with pytest.raises(InvalidRequest, match="top_p must be greater than 0"):
        sampling_from(options)


@pytest.mark.parametrize("verb", ["serve", "generate", "chat", "bench throughput"])
def test_every_verb_without_flags_has_the_settings_defaults(verb: str) -> None:
    config = settings_from(parse(make_parser(), verb.split()), EngineConfig, without=["log_level", *SHARED])
    of_bench = {"enable_prefix_caching": False, "profile_dir": "metronome-profile"}
    assert config == EngineConfig(**of_bench if verb.startswith("bench") else {})


def test_flags_of_a_config_give_the_config_again() -> None:
    config = EngineConfig(model="null", max_num_seqs=3, enable_prefix_caching=False, null_step_ms=1.5, seed=9)
    assert settings_from(parse(make_parser(), ["serve", *flags_of(config)]), EngineConfig) == config


def test_words_may_stand_before_and_after_flags() -> None:
    for words in (["null", "--n", "2", "text"], ["--n", "2", "null", "text"], ["null", "text", "--n", "2"]):
        assert parse(make_parser(), ["generate", *words]).words == ["null", "text"]


def test_a_file_gives_defaults_and_flags_win(file: Path) -> None:
    file.write_text('model = "null"\nmax-num-seqs = 3\ntop_k = 4\nstop = ["x", "y"]\nnull_step_ms = 2\nchat = true\n')
    options = parse(make_parser(), ["generate", "text", "--config", str(file)])
    assert settings_from(options, EngineConfig, without=["log_level", *SHARED]) == EngineConfig(
        model="null", max_num_seqs=3, null_step_ms=2.0
    )
    assert (sampling_from(options).stop, options.top_k, options.chat) == (("x", "y"), 4, True)
    options = parse(make_parser(), ["generate", "text", "--config", str(file), "--stop", "z", "--max-num-seqs", "5"])
    assert (sampling_from(options).stop, options.max_num_seqs, options.top_k) == (("z",), 5, 4)


def test_a_model_on_the_command_line_wins_over_the_files(file: Path) -> None:
    file.write_text('model = "null"\n')
    assert parse(make_parser(), ["serve", "--config", str(file)]).model == "null"
    assert parse(make_parser(), ["serve", "other", "--config", str(file)]).model == "other"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-num-seq = 2", "unknown key 'max-num-seq'"),
        ("config = 'other.toml'", "unknown key 'config'"),
        ("[server]\nport = 1", "unknown key 'server'"),
        ("max-num-seqs = '2'", "max-num-seqs must be of type int, got '2'"),
        ("max-num-seqs = true", "max-num-seqs must be of type int, got True"),
        ("enable-prefix-caching = 1", "enable-prefix-caching must be of type bool, got 1"),
        ("dtype = 'float8'", "dtype must be one of auto"),
        ("stop = [1]", "stop must be of type str, got 1"),
        ("max-num-seqs = ", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_key(file: Path, content: str, message: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        parse(make_parser(), ["generate", "text", "--config", str(file)])


def test_a_file_that_is_not_there_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        parse(make_parser(), ["serve", "--config", str(file)])


def test_an_unknown_flag_exits_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(make_parser(), ["generate", "text", "--no-such-flag"])
    assert exit_info.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err
