"""The examples of the documents do what they say; files they name exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, ServeConfig, settings_of
from engine.parser import make_parser

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "OPERATIONS.md")
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def block(language: str, containing: str) -> str:
    (found,) = (code for kind, code in BLOCKS if kind == language and containing in code)
    return found


def run(*argv: str) -> str:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def address(start_server: Any) -> str:
    """Of a server that is quick to start and answers to the name that the examples use."""
    return start_server("null", "--served-model-name", "smollm2").url


def test_every_example_is_run_by_a_test_here() -> None:
    kinds = [
        (kind, next(word for word in ("curl", "METRONOME", "openai", "open_engine", "chat") if word in code))
        for kind, code in BLOCKS
    ]
    assert kinds == [
        ("sh", "curl"),
        ("python", "openai"),
        ("python", "open_engine"),
        ("sh", "chat"),
        ("sh", "METRONOME"),
    ]


@pytest.mark.slow
def test_the_terminal_examples_are_commands_that_parse() -> None:
    for line in block("sh", "engine chat").splitlines():
        assert line.startswith("python -m engine ")
        make_parser().parse_args(shlex.split(line, comments=True)[3:])


@pytest.mark.slow
def test_the_curl_example(address: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    answer = json.loads(
        run("sh", "-c", block("sh", "curl").replace("curl ", "curl -sS ").replace("http://127.0.0.1:8000", address))
    )
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_the_openai_example(address: str) -> None:
    code = block("python", "openai").replace("http://127.0.0.1:8000", address)
    assert len(run(sys.executable, "-c", code)) == 200


@pytest.mark.slow
def test_the_trio_example() -> None:
    code = block("python", "open_engine").replace('"smollm2"', '"null"')
    assert len(run(sys.executable, "-c", code)) == 64


@pytest.mark.slow
def test_the_synchronous_example() -> None:
    (code,) = re.findall(r"And in plain Python: `(.*?)`", README, re.DOTALL)
    program = f"import engine; print(len({code.replace('smollm2', 'null')}))"
    assert run(sys.executable, "-c", program) == "2\n"


@pytest.mark.slow
def test_the_serving_example(start_server: Any, tmp_path: Path) -> None:
    command = block("sh", "METRONOME").strip()
    variable, key, *words = re.split(r"[= ]", command, maxsplit=5)
    assert words[:3] == ["python", "-m", "engine"]
    arguments = command.split(" serve ")[1].replace("/run/metronome.sock", str(tmp_path / "socket")).split()
    server = start_server("null", *arguments, env={variable: key})
    server.wait_line(f"ready: .* on unix:{tmp_path}/socket")
    if shutil.which("curl") is not None:
        ask = ("curl", "-sS", "--unix-socket", str(tmp_path / "socket"), "http://x/v1/models")
        assert json.loads(run(*ask))["error"]["code"] == "invalid_api_key"
        assert json.loads(run(*ask, "-H", f"Authorization: Bearer {key}"))["data"][0]["id"] == "small"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_flags_that_a_document_names_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    for path in re.findall(r"`((?:engine|transport|web|tests|fuzz)/[\w/.]*)", text) + re.findall(
        r"\]\((\w+\.md)\)", text
    ):
        assert (ROOT / path).exists(), path
    known = {setting.flag for settings in (EngineConfig, ServeConfig) for setting in settings_of(settings)}
    assert set(re.findall(r"`(--[a-z][\w-]*)", text)) <= known | {"--help", "--config"}
