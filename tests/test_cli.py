"""The verbs `generate`, `chat` and `models` as a person runs them: real processes on the integer model."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.executor.null import expected_tokens
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent
MODULE = [sys.executable, "-m", "engine"]
TIMEOUT_S = 60

pytestmark = pytest.mark.slow


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MODULE, *arguments], cwd=ROOT, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def answer(prompt: str, num_tokens: int) -> str:
    return bytes(expected_tokens(prompt.encode(), SamplingParams(temperature=0), num_tokens)).decode()


def chat_answer(messages: list[tuple[str, str]], num_tokens: int) -> str:
    prompt = "".join(f"{role}: {content}\n" for role, content in messages) + "assistant: "
    return answer(prompt, num_tokens)


# -- generate ---------------------------------------------------------------------------------------------------------


def test_generate_takes_its_prompt_from_words_a_file_or_standard_input(tmp_path: Path) -> None:
    expected = answer("hello", 7) + "\n"
    (tmp_path / "prompt").write_text("hello")
    for words, text in (
        (["null", "hello"], ""),
        (["null", "--file", str(tmp_path / "prompt")], ""),
        (["null", "-"], "hello"),
    ):
        result = run("generate", *words, "--max-tokens", "7", text=text)
        assert (result.returncode, result.stdout, result.stderr) == (0, expected, "")


def test_generate_prints_several_completions_one_after_the_other() -> None:
    result = run("generate", "null", "hello", "--n", "2", "--max-tokens", "5", "--chat")
    text = chat_answer([("user", "hello")], 5)
    assert result.stdout == f"[0: length]\n{text}\n[1: length]\n{text}\n"


def test_generate_prints_a_table_of_logprobs_after_the_text(byte_llama: Path) -> None:
    words = ["--logprobs", "1", "--prompt-logprobs", "0", "--allowed-token-ids", "97", "--num-threads", "1"]
    result = run("generate", str(byte_llama), "hi", "--max-tokens", "2", *words, "--num-gpu-blocks-override", "64")
    assert result.returncode == 0, result.stderr
    title, prompt, reason, text, *table = result.stdout.splitlines()
    assert (title, reason, text, len(table)) == ("[prompt]", "[0: length]", "aa", 2)
    assert re.fullmatch(r"-\d+\.\d{4} 'i'\trank \d+", prompt)
    assert re.fullmatch(r"-\d+\.\d{4} 'a'\trank \d+\t-\d+\.\d{4} .+", table[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no PROMPT"),
        (["a", "b", "c"], "3 words beside flags"),
        (["null", "b", "--file", "x"], "2 words beside flags"),
        (["--file", "no-such-file"], "--file no-such-file cannot be read"),
        (["null", "hi", "--temperature", "3"], "temperature must be from 0 to 2, got 3.0"),
        (["null", "hi", "--max-tokens", "9999"], "max_tokens is 9999"),
        (["null", ""], "the prompt is empty"),
    ],
)
def test_a_wrong_generate_exits_2_with_one_clear_line(words: list[str], message: str) -> None:
    result = run("generate", *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\xfe")
    result = run("generate", "null", "--file", str(tmp_path / "prompt"))
    assert result.returncode == 2
    assert "is not UTF-8 text" in result.stderr


@pytest.fixture
def start() -> Iterator[Any]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT} | options
        processes.append(subprocess.Popen([*MODULE, *arguments], **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_generate_with_130_and_no_traceback(start: Any) -> None:
    process = start("generate", "null", "hi", "--max-tokens", "8000", "--null-step-ms", "5")
    assert process.stdout.read(3) == answer("hi", 3).encode()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (130, b"")


def test_ctrl_c_ends_a_generate_that_waits_for_its_prompt(start: Any) -> None:
    process = start("generate", "null", "-", "--log-level", "info", stdin=subprocess.PIPE)
    assert b"reading the prompt" in process.stderr.readline()
    process.stdin.write(b"half a prompt")
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130


def test_a_reader_that_has_gone_ends_generate_quietly(start: Any) -> None:
    process = start("generate", "null", "hi", "--max-tokens", "8000", "--null-step-ms", "1")
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stdout = None


def test_each_ended_request_is_logged_at_debug() -> None:
    result = run("generate", "null", "hello", "--max-tokens", "7", "--log-level", "debug")
    (line,) = [line for line in result.stderr.splitlines() if "ended: " in line]
    assert "ended: length, 5 prompt tokens (0 cached), 7 generated, first token 0." in line


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_from_a_pipe_answers_each_line_and_remembers() -> None:
    result = run(
        "chat", "null", "--temperature", "0", "--max-tokens", "6", "--system", "be", text="one\n\ntwo\n/reset\none\n"
    )
    first = chat_answer([("system", "be"), ("user", "one")], 6)
    second = chat_answer([("system", "be"), ("user", "one"), ("assistant", first), ("user", "two")], 6)
    assert result.stdout == f"{first}\n{second}\n{first}\n"
    assert result.returncode == 0


def test_chat_drops_the_oldest_messages_with_the_numbers_and_refuses_what_alone_is_too_long() -> None:
    lines = ["a" * 30, "b" * 30, "c" * 30, "d" * 200, "b"]
    flags = ["--max-model-len", "120", "--max-tokens", "10", "--temperature", "0"]
    result = run("chat", "null", *flags, text="\n".join(lines))
    first, second, third, fourth = result.stdout.splitlines()
    assert second == chat_answer([("user", lines[0]), ("assistant", first), ("user", lines[1])], 10)
    assert "forgot the 2 oldest messages" in result.stderr
    assert third == chat_answer([("user", lines[1]), ("assistant", second), ("user", lines[2])], 10)
    assert "refused: the message has 218 tokens and the context holds 120, of which 10 are kept" in result.stderr
    assert len(fourth) == 10


def test_chat_says_what_it_does_not_know() -> None:
    result = run("chat", "null", text="/what now\n/help\n/exit\nnot read\n")
    assert "unknown command /what" in result.stderr
    assert (result.returncode, result.stdout) == (0, "")


class Terminal:
    """A chat on a terminal of its own; what it shows is read as it comes."""

    def __init__(self, *arguments: str) -> None:
        self.shown = ""
        self._main, side = os.openpty()
        self.process = subprocess.Popen(
            [*MODULE, "chat", "null", *arguments],
            cwd=ROOT,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=_take_terminal,  # so that Ctrl-C reaches it
        )
        os.close(side)

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def wait(self, text: str) -> None:
        """Read until `text` is shown, and forget what was shown up to it."""
        while text not in self.shown:
            readable, _, _ = select.select([self._main], [], [], TIMEOUT_S)
            assert readable, self.shown
            self.shown += os.read(self._main, 4096).decode()
        self.shown = self.shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def open_terminal() -> Iterator[Any]:
    terminals: list[Terminal] = []

    def open_terminal(*arguments: str) -> Terminal:
        terminals.append(Terminal(*arguments))
        return terminals[-1]

    yield open_terminal
    for terminal in terminals:
        terminal.close()


def test_ctrl_c_stops_the_answer_and_then_warns_and_then_ends_the_chat(open_terminal: Any) -> None:
    terminal = open_terminal("--null-step-ms", "5", "--temperature", "0")
    terminal.wait("> ")
    terminal.type("hi\n")
    terminal.wait(chat_answer([("user", "hi")], 3))
    terminal.type("\x03")
    terminal.wait("(stopped)")
    terminal.wait("> ")
    terminal.type("\x03")
    terminal.wait("(Ctrl-C again or Ctrl-D to leave)")
    terminal.wait("> ")
    terminal.type("/reset\n")  # a line in between: the next Ctrl-C is a first one again
    terminal.wait("> ")
    terminal.type("\x03")
    terminal.wait("(Ctrl-C again or Ctrl-D to leave)")
    terminal.type("\x03")
    assert terminal.process.wait(TIMEOUT_S) == 0


def test_ctrl_d_ends_the_chat(open_terminal: Any) -> None:
    terminal = open_terminal()
    terminal.wait("> ")
    terminal.type("\x04")
    assert terminal.process.wait(TIMEOUT_S) == 0


def test_sigterm_ends_a_chat_amid_an_answer(open_terminal: Any) -> None:
    terminal = open_terminal("--null-step-ms", "5", "--temperature", "0")
    terminal.wait("> ")
    terminal.type("hi\n")
    terminal.wait(chat_answer([("user", "hi")], 3))
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(TIMEOUT_S) == 0


def test_a_chat_whose_engine_dies_exits_1_with_the_cause(open_terminal: Any) -> None:
    terminal = open_terminal("--log-level", "info")
    terminal.wait("> ")
    pid = terminal.process.pid
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    engines = [child for child in children if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes()]
    os.kill(engines[0], signal.SIGKILL)
    terminal.wait("the engine died: ")
    terminal.wait("SIGKILL")
    assert terminal.process.wait(TIMEOUT_S) == 1


# -- models -----------------------------------------------------------------------------------------------------------


def test_models_are_listed_as_a_table_and_checked() -> None:
    header, *rows = run("models").stdout.splitlines()
    assert header.split() == [
        "NAME",
        "CACHED",
        "SIZE",
        "ARCHITECTURE",
        "CONTEXT",
        "WEIGHTS",
        "LICENSE",
        "ALSO",
        "CALLED",
    ]
    assert any(row.startswith("SmolLM2-135M-Instruct") for row in rows)
    assert run("models", "check", "null").stdout == "null: the integer model runs it; it has no weights\n"
    result = run("models", "check", str(ROOT / "tests"))
    assert result.returncode == 2
    assert "is not a model folder" in result.stderr


def test_check_says_what_would_run_a_model_without_loading_it(tmp_path: Path) -> None:
    config = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    result = run("models", "check", str(tmp_path))
    assert result.returncode == 2
    assert "config.json names OwnForCausalLM; " in result.stderr
    assert "code of its own (auto_map), which is never executed" in result.stderr


@pytest.mark.slow
def test_check_of_the_default_model_names_the_own_decoder(smollm2_folder: Path) -> None:
    shown = run("models", "check", str(smollm2_folder)).stdout
    assert (
        "LlamaForCausalLM, the own decoder runs it; context 8192 tokens, bfloat16 from Q4_1, 269 MB in 1 file" in shown
    )
    assert "vocabulary 49152, a chat template" in shown
    shown = run("models", "check", str(smollm2_folder / "model.gguf")).stdout
    assert "model.gguf: LlamaForCausalLM, the own decoder runs it; context 8192 tokens, bfloat16 from Q4_1" in shown


@pytest.mark.parametrize("verb", ["generate", "chat", "serve"])
def test_flags_are_not_abbreviated_and_the_model_is_no_flag(verb: str) -> None:
    result = run(verb, "--model", "null", "x")
    assert result.returncode == 2
    assert "unrecognized arguments: --model" in result.stderr
    assert "the model is the first word behind the verb, without a flag" in result.stderr


def test_code_of_a_model_is_refused_with_the_reason() -> None:
    result = run("generate", "null", "x", "--trust-remote-code")
    assert result.returncode == 2
    assert "code that comes with a model is never executed here" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_no_reason_to_fail(closed: str) -> None:
    command = f"exec {sys.executable} -m engine generate null hi --max-tokens 3 {closed}"
    ended = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, timeout=60, check=False)
    assert (ended.returncode, len(ended.stdout) > 0) == (0, ">&-" not in closed.replace("2>&-", ""))


@pytest.mark.parametrize(("most_files", "flags", "need"), [(11, "", 64), (63, "", 64), (71, "-dp 2", 72)])
def test_too_few_files_that_may_be_open_are_told_in_one_line(most_files: int, flags: str, need: int) -> None:
    command = f"ulimit -n {most_files}; exec {sys.executable} -m engine generate null hi {flags}"
    ended = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"metronome: this process may have {most_files} files open, and ")
    assert ended.stderr.endswith(f" need {need}: raise `ulimit -n`\n")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["models"], ["generate", "null", "hi", "--max-tokens", "3"]], ids=lambda words: words[0]
)
def test_an_output_that_takes_no_more_is_told_of_and_no_folder_beside_it(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*MODULE, *words], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert "No space left on device: 'standard output': it takes no more" in ended.stderr
    assert "TMPDIR" not in ended.stderr


def test_the_exit_code_is_the_same_where_standard_error_takes_nothing() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*MODULE, "serve", "null", "--host", "999.1.1.1"], cwd=ROOT, stderr=full, check=False)
    assert ended.returncode == 2
