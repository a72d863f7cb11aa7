from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from engine.client.tokenizer import Tokenizer, load_tokenizer
from engine.errors import CheckpointError, InvalidRequest, UnsupportedModel

DrawTexts = Callable[[int, int], list[str]]


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    return load_tokenizer(smollm2_folder)


@pytest.fixture(scope="module")
def oracle(smollm2_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.mark.slow
def test_ids_equal_those_of_transformers_on_two_thousand_drawn_texts(
    smollm2: Tokenizer, oracle: Any, draw_texts: DrawTexts
) -> None:
    texts = draw_texts(2000, 20)
    expected = oracle(texts)["input_ids"]
    for text, ids in zip(texts, expected, strict=True):
        assert smollm2.encode(text) == ids, text
        assert smollm2.encode(text, add_special_tokens=False) == ids, text
        for skip in (True, False):
            assert smollm2.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.slow
def test_ids_equal_those_of_transformers_own_gguf_reading_where_no_digits_meet(
    smollm2: Tokenizer, smollm2_folder: Path, draw_texts: DrawTexts
) -> None:
    """It reads neither this file's pre-tokenizer nor all its control tokens; apart from these it is right."""
    from transformers import AutoTokenizer

    gguf_oracle = AutoTokenizer.from_pretrained(smollm2_folder, gguf_file="model.gguf")
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>"]
    texts = [
        text
        for text in draw_texts(2000, 21)
        if not any(character.isnumeric() for character in text) and not any(token in text for token in special[3:])
    ]
    assert len(texts) > 500
    for text, ids in zip(texts, gguf_oracle(texts)["input_ids"], strict=True):
        assert smollm2.encode(text) == ids, text


def test_round_trip_gives_the_text_back(smollm2: Tokenizer, draw_texts: DrawTexts) -> None:
    for text in draw_texts(200, 22):
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_default_model_says_what_ends_and_what_is_special(smollm2: Tokenizer) -> None:
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.vocab_size == 49152
    assert smollm2.token(2) == "<|im_end|>"
    assert smollm2.token(49152) is None


def test_chat_is_encoded_with_the_templates_special_tokens_alone(smollm2: Tokenizer, oracle: Any) -> None:
    messages = [{"role": "user", "content": "Hi <|im_end|>"}]
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert smollm2.encode_chat(messages) == expected
    assert smollm2.apply_chat_template(messages, add_generation_prompt=False) == oracle.apply_chat_template(
        messages, tokenize=False
    )


def test_template_variables_that_would_replace_the_messages_are_refused(smollm2: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidRequest, match="messages cannot be set"):
        smollm2.apply_chat_template(messages, **{"messages": []})


def test_lone_surrogates_are_refused_as_the_callers_fault(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"'a\\ud800'"):
        smollm2.encode("a\ud800")


def test_negative_ids_are_refused_and_ids_beyond_the_vocabulary_have_no_text(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="from 0 to 49151"):
        smollm2.decode([-1])
    assert smollm2.decode([smollm2.encode("a")[0], 10**6]) == "a"
    assert smollm2.token_bytes(10**6) == b""


def write_folder(folder: Path, **files: Any) -> Path:
    """A model folder with a byte-level tokenizer, <s> 256 and </s> 257 its special tokens, and the given JSON files."""
    folder.mkdir(exist_ok=True)
    backend = tokenizers.Tokenizer.from_str(load_tokenizer("null")._backend.to_str())
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_folder_without_configuration_adds_nothing(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    assert tokenizer.encode("abcdef") == list(b"abcdef")
    assert tokenizer.eos_token_ids == ()
    with pytest.raises(InvalidRequest, match="no chat template: use completions, or start the server with --chat-temp"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("configured", [True, False])
def test_only_the_tokenizer_file_decides_on_begin_tokens_as_in_transformers(
    tmp_path: Path, begins: bool, configured: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    names = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": configured}
    folder = write_folder(tmp_path / "model", tokenizer_config={**kind, **names})
    if begins:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 256)])
        backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("ab") == [256] * begins + [97, 98]
    assert tokenizer.encode("ab", add_special_tokens=False) == [97, 98]
    assert PreTrainedTokenizerFast.from_pretrained(folder)("ab")["input_ids"] == tokenizer.encode("ab")
    assert tokenizer.eos_token_ids == (257,)


def test_end_tokens_are_gathered_from_all_places_that_name_them(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        generation_config={"eos_token_id": [7, 9]},
        config={"eos_token_id": 9},
        special_tokens_map={"eos_token": "</s>"},
    )
    assert load_tokenizer(folder).eos_token_ids == (7, 9, 257)


def test_named_token_of_the_vocabulary_becomes_special(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"pad_token": "~"})
    assert load_tokenizer(folder).special_token_ids == {256, 257, ord("~")}


def test_template_for_tools_is_used_when_tools_are_given(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    tokenizer = load_tokenizer(write_folder(tmp_path, tokenizer_config={"chat_template": templates}))
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "f"


def test_template_file_stands_above_the_configuration_and_an_own_one_above_both(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"chat_template": "old", "bos_token": "<s>"})
    (folder / "chat_template.jinja").write_text("{{ bos_token }}new")
    messages = [{"role": "user", "content": "a"}]
    assert load_tokenizer(folder).apply_chat_template(messages) == "<s>new"
    own = load_tokenizer(folder, chat_template="own{{ bos_token }}")
    assert own.apply_chat_template(messages) == "own<s>"
    assert own.encode_chat(messages) == [*b"own", 256]


def test_further_templates_of_a_folder_have_the_names_of_their_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "chat_template.json").write_text('{"chat_template": "processor"}')
    messages = [{"role": "user", "content": "a"}]
    assert load_tokenizer(folder).apply_chat_template(messages) == "processor"
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(messages) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "with tools"


def test_template_that_is_none_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"chat_template": [{"name": "default"}]})
    with pytest.raises(CheckpointError, match="chat_template must be text or a list of named texts"):
        load_tokenizer(folder)


def test_generation_config_gives_defaults_and_the_rest_of_it_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wished = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None, "do_sample": True, "eos_token_id": [1, 2]}
    ignored = {
        "output_attentions": False,
        "output_hidden_states": False,
        "no_repeat_ngram_size": 3,
        "max_new_tokens": 2048,
        "length_penalty": None,
    }
    folder = write_folder(tmp_path, generation_config=wished | ignored | {"transformers_version": "4.51"})
    assert load_tokenizer(folder).sampling_defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "generation_config.json asks for what is not obeyed: max_new_tokens, no_repeat_ngram_size"
    )
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature must be a finite number"):
        load_tokenizer(folder)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)
    folder = write_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, got list"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    with pytest.raises(CheckpointError, match=f"{tmp_path}: the chat template is not valid Jinja"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize("file", ["config", "generation_config"])
@pytest.mark.parametrize("ids", ["x", 1.5, -1, 10**12, True, {}, [2, "x"]])
def test_end_tokens_that_are_no_token_ids_are_refused_when_loaded(tmp_path: Path, file: str, ids: Any) -> None:
    folder = write_folder(tmp_path, **{file: {"eos_token_id": ids}})
    with pytest.raises(
        CheckpointError, match=rf"{file}\.json: eos_token_id must hold whole numbers from 0 to 2147483647"
    ):
        load_tokenizer(folder)


@pytest.mark.parametrize("token", [{"x": 1}, {"content": 5}, 5, ["a"]])
def test_a_named_token_that_is_no_text_is_refused(tmp_path: Path, token: Any) -> None:
    with pytest.raises(CheckpointError, match="pad_token must be text"):
        load_tokenizer(write_folder(tmp_path, tokenizer_config={"pad_token": token}))


def test_text_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8 text"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(folder)


def test_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteLevel(), tokenizers.decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="ByteLevel must stand alone"):
        load_tokenizer(tmp_path)


def test_null_model_speaks_bytes() -> None:
    tokenizer = load_tokenizer("null")
    assert tokenizer.encode("hé\x00") == [*"hé\x00".encode()]
    assert tokenizer.decode(list(range(128))) == bytes(range(128)).decode()
    assert tokenizer.decode([0x68, 0xC3, 0xA9, 0xFF]) == "hé\ufffd"
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.special_token_ids) == (256, (), frozenset())
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == "user: Hi\nassistant: "


@pytest.mark.slow
def test_text_side_and_model_files_never_reach_torch_or_transformers(smollm2_folder: Path) -> None:
    program = (
        "import sys, engine.models.store\n"
        "from engine.client.detokenizer import Detokenizer\n"
        "from engine.client.tokenizer import load_tokenizer\n"
        "load_tokenizer(sys.argv[1]).encode_chat([{'role': 'user', 'content': 'a'}])\n"
        "print(sorted({'torch', 'transformers', 'asyncio', 'trio'} & sys.modules.keys()))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, str(smollm2_folder)], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "[]\n"


def test_converted_folder_is_all_that_the_tokenizer_needs(smollm2_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_folder / name, tmp_path / name)
    assert load_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "Hi"}])[0] == 1
