"""What an operator gets wrong ends with exit code 2 and one clear last line, before a model is loaded."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cli import run

Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """Runs `serve` with arguments that must be refused; returns the last line on standard error."""

    def check(*arguments: str) -> str:
        try:
            code = run(["serve", *arguments])
        except SystemExit as exit:  # argparse's way
            code = exit.code
        errors = capfd.readouterr().err
        assert code == 2
        assert "Traceback" not in errors
        assert "ready:" not in errors
        return errors.splitlines()[-1]

    return check


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no-such-model"], "no-such-model"),
        (["null", "--max-num-seqs", "0"], "--max-num-seqs must be at least 1, got 0"),
        (["null", "--device", "cuda:0"], "only CPU back ends"),
        (["null", "--host", "999.1.1.1"], "999.1.1.1"),
        (["null", "--host", "nosuchhost.invalid"], "choose a --host"),
        (["null", "--dtype", "float16"], "--dtype float16: the model null has no weights"),
        (["null", "--kv-cache-memory-bytes", "99999999999999"], "--kv-cache-memory-bytes 99999999999999 takes"),
        (["null", "--num-gpu-blocks-override", "999999999"], "--num-gpu-blocks-override 999999999 takes"),
        (["null", "--no-such-flag"], "--no-such-flag"),
        (["null", "--max-model-len", "long"], "invalid int value: 'long'"),
        (["null", "--port", "65536"], "--port must be at most 65535, got 65536"),
        (["null", "--chat-template", "/no/such/file"], "/no/such/file: No such file"),
        (["null", "--uds", "/no/such/folder/socket"], "/no/such/folder/socket: No such file"),
        (["null", "--api-key", ""], "--api-key must not be empty"),
        (["null", "--queue-timeout", "-1"], "--queue-timeout must be at least 0, got -1"),
        (["null", "--queue-timeout", "nan"], "got nan"),
    ],
)
def test_wrong_arguments(refused: Refused, arguments: list[str], text: str) -> None:
    assert text in refused(*arguments, *([] if "--port" in arguments else ["--port", "0"]))


def test_chat_template_that_is_none(refused: Refused, tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("{% if %}")
    assert "not valid Jinja" in refused("null", "--port", "0", "--chat-template", str(template))
    template.write_bytes(b"\xff")
    assert "UTF-8" in refused("null", "--port", "0", "--chat-template", str(template))


def test_port_in_use(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert port in refused("no-such-model", "--port", port)  # said before the model is even looked for


def test_two_servers_on_one_socket_path(refused: Refused, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(path)
        first.listen()
        assert "another server listens" in refused("no-such-model", "--uds", path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_more_than_the_memory_settings_hold(refused: Refused) -> None:
    assert "num-gpu-blocks-override 2" in refused(
        "null", "--port", "0", "--max-model-len", "100", "--num-gpu-blocks-override", "2"
    )


def test_folder_that_is_no_model(refused: Refused, tmp_path: Path) -> None:
    assert "has no config.json" in refused(str(tmp_path), "--port", "0")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["truncated", "corrupt", "misshapen", "missing"])
def test_weights_that_are_broken(refused: Refused, smollm2_folder: Path, tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(smollm2_folder, folder, ignore=shutil.ignore_patterns("*.gguf", "*.safetensors"))
    weights, whole = folder / "model.safetensors", smollm2_folder / "model.safetensors"
    says = "truncated or corrupt"
    if fault == "truncated":
        weights.write_bytes(whole.read_bytes()[: 2**20])
    elif fault == "corrupt":
        weights.write_bytes(b"\xff" * 100)
    elif fault == "misshapen":
        weights.symlink_to(whole)
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"intermediate_size": 1536', '"intermediate_size": 1500'))
        says = "[576, 1536], must be [576, 1500]"
    else:
        says = "no *.safetensors"
    assert says in refused(str(folder), "--port", "0", "--num-threads", "1")


def test_gguf_that_is_truncated_or_none(refused: Refused, smollm2_folder: Path, tmp_path: Path) -> None:
    cut, noise = tmp_path / "cut.gguf", tmp_path / "noise.gguf"
    with (smollm2_folder / "model.gguf").open("rb") as whole:
        cut.write_bytes(whole.read(2**16))
    noise.write_bytes(b"noise" * 100)
    for path in (cut, noise):
        assert path.name in refused(str(path), "--port", "0")


def test_cache_that_cannot_be_written(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for cache in ("/proc/nowhere", str(tmp_path / "file")):
        monkeypatch.setenv("METRONOME_CACHE", cache)
        last_line = refused("smollm2", "--port", "0")
        assert cache in last_line
        assert "set METRONOME_CACHE" in last_line
