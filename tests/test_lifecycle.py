"""How an engine and its server live and end, on real processes: the one order of a teardown, early signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

FRONT_FIRST = ["probes and new work get 503", "streams ended, 0 cut", "listeners closed", "connections closed"]
ENGINE_ASKED = ["engine asked to stop", "intake closed"]
ENGINE = ["step task ended", "last word acknowledged", "grammar back end closed", "executor closed"]
SOCKETS = ["socket closed", "socket closed", "context closed"]
WHOLE = [*FRONT_FIRST, *ENGINE_ASKED, *ENGINE, *SOCKETS, "engine-0 ended", *SOCKETS]
"""The engine's lines come through the front's log, which has read them all once its process has ended."""


def teardown_of(server: Any) -> list[str]:
    return [line.partition(" teardown: ")[2] for line in server.lines if " teardown: " in line]


# -- the one order of a teardown ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drain_s", "max_tokens", "reason"),
    [("0", 8000, "abort"), ("60", 150, "length"), ("0.2", 8000, "abort")],
    ids=["abort", "drain", "expired drain"],
)
def test_a_stop_has_one_order(start_server: Any, drain_s: str, max_tokens: int, reason: str) -> None:
    server = start_server("null", "--null-step-ms", "2", "--shutdown-timeout", drain_s, "--log-level", "debug")
    responses = [server.post("/v1/completions", {**server.LONG, "max_tokens": max_tokens}) for _ in range(4)]
    server.process.send_signal(signal.SIGTERM)
    for response in responses:
        *_, last, done = server.events(response)
        assert (last["choices"][0]["finish_reason"], done) == (reason, "[DONE]")
    assert server.wait() == 0
    assert teardown_of(server) == WHOLE


def test_what_compiled_grammars_ends_after_the_last_word_and_before_the_executor(start_server: Any) -> None:
    server = start_server("null", "--log-level", "debug", "--grammar-answer-time", "60")
    with server.post("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "[a-z]{3}"}}) as response:
        assert response.status == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    after_last_word = WHOLE.index("grammar back end closed")
    trials = ["grammar trial ended"] * 2  # the quick one and the slow one
    assert teardown_of(server) == [*WHOLE[:after_last_word], *trials, *WHOLE[after_last_word:]]


def test_a_stop_while_the_model_loads_has_the_same_order(start_server: Any) -> None:
    server = start_server("smollm2", "--num-threads", "1", "--log-level", "debug")
    server.wait_line("starting: weights")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not any("Traceback" in line for line in server.lines)
    assert teardown_of(server) == ["listeners closed", "engine-0 ended", *SOCKETS]


def test_an_engine_that_dies_while_draining_is_torn_down_in_the_same_order(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "2", "--shutdown-timeout", "600", "--log-level", "debug")
    responses = server.open_streams(4)
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("teardown: probes and new work")
    os.kill(server.engine_pid, signal.SIGKILL)
    for response in responses:
        *_, error, done = server.events(response)
        assert "SIGKILL" in error["error"]["message"]
        assert done == "[DONE]"
    assert server.wait() == 1
    told = teardown_of(server)
    assert "engine-0 ended" in told[: -len(SOCKETS)]  # at its death, whatever the front is at
    assert [line for line in told if line != "engine-0 ended"] == [*FRONT_FIRST, *SOCKETS]


def test_an_engine_that_fails_is_torn_down_in_the_same_order(start_server: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif sys.argv[0] == '-c':\n"
        "    from engine.executor.null import NullModelRunner\n"
        "    sound = NullModelRunner.execute\n"
        "    def execute(self, plan):\n"
        "        if plan.requests:  # what only tells of the first one's end must not be the second failure\n"
        "            raise RuntimeError('the device is on fire')\n"
        "        sound(self, plan)\n"
        "    NullModelRunner.execute = execute\n"
    )
    path = f"{tmp_path}:{os.getcwd()}"
    server = start_server("null", "--log-level", "debug", env={"PYTHONPATH": path})
    for _ in range(2):
        with pytest.raises(OSError, match=r"50\d"):
            server.post("/v1/completions", {"prompt": "x"})
    assert server.wait() == 1
    assert "the device is on fire" in server.lines[-1]
    front = ["probes and new work get 503", "streams ended, 0 cut", "listeners closed", "connections closed"]
    told = teardown_of(server)
    assert [line for line in told if line in front] == front
    assert [line for line in told if line not in front] == [*ENGINE, *SOCKETS, "engine-0 ended", *SOCKETS]


# -- signals from the first line on ------------------------------------------------------------------------------------

SIGNAL_AT_IMPORT = """
import os, signal, sys

class Count:
    left = None

    def find_spec(self, name, path, target=None):
        if name == os.environ["FROM_MODULE"]:
            Count.left = int(os.environ["AT_IMPORT"])
        if Count.left is not None:
            Count.left -= 1
            if Count.left == 0:
                os.kill(os.getpid(), int(os.environ["NUMBER"]))

if sys.argv[0] == os.environ["PROCESS"]:  # later it is the path of the program
    sys.meta_path.insert(0, Count())
"""
"""The process whose first argument is PROCESS sends itself a signal at its n-th import from a module on."""


def signal_at_import(folder: Path, process: str, from_module: str, at_import: int, number: int) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(SIGNAL_AT_IMPORT)
    return {
        "PYTHONPATH": str(folder),
        "PROCESS": process,
        "FROM_MODULE": from_module,
        "AT_IMPORT": str(at_import),
        "NUMBER": str(int(number)),
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("at_import", [1, 40, 300, 700])
def test_a_server_signalled_at_any_of_its_imports_exits_0_and_leaves_nothing(
    start_server: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, at_import: int, number: int
) -> None:
    """Its engine may be there by then: some modules are imported late."""
    temporary = tmp_path_factory.mktemp("t")  # short, for the names of sockets are
    env = signal_at_import(tmp_path, "-m", "engine.cli", at_import, number)
    server = start_server("null", env={**env, "TMPDIR": str(temporary)})
    assert server.wait() == 0
    assert not any("Traceback" in line for line in server.lines)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("at_import", [1, 200])
def test_an_engine_signalled_while_it_starts_is_the_cause(start_server: Any, tmp_path: Path, at_import: int) -> None:
    env = signal_at_import(tmp_path, "-c", "engine.engine_process", at_import, signal.SIGTERM)
    server = start_server("null", env=env)
    assert server.wait() == 1
    died = "the engine died: EngineDied: engine-0 was killed by SIGTERM (while starting: hello)"
    assert server.lines[-1] == f"metronome: {died}"


@pytest.mark.parametrize("at_import", [60, 200])
def test_an_interrupt_is_the_fronts_alone_also_while_an_engine_is_imported(
    start_server: Any, tmp_path: Path, at_import: int
) -> None:
    """As where a service manager sends it to all processes."""
    server = start_server(
        "null", env=signal_at_import(tmp_path, "-c", "engine.engine_process", at_import, signal.SIGINT)
    )
    with server.post("/v1/completions", {"prompt": "x"}) as response:
        assert response.status == 200
    server.process.terminate()
    assert server.wait() == 0
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2], ids=["SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize(
    ("process", "from_module", "at_import"),
    [
        ("-m", "engine.cli", 1),
        ("-m", "engine.cli", 300),
        ("-c", "engine.engine_process", 1),
        ("-c", "engine.engine_process", 200),
    ],
)
def test_a_process_asked_what_it_does_while_it_is_imported_starts_all_the_same(
    start_server: Any, tmp_path: Path, process: str, from_module: str, at_import: int, number: int
) -> None:
    server = start_server("null", env=signal_at_import(tmp_path, process, from_module, at_import, number))
    with server.post("/v1/completions", {"prompt": "x"}) as response:
        assert response.status == 200


SIGNAL_WHEN_LEFT = """
import os, signal, sys
import trio

run = trio.run
def run_and_signal(*arguments):
    result = run(*arguments)
    os.kill(os.getpid(), int(os.environ["NUMBER"]))
    return result

if sys.argv[0] == os.environ["PROCESS"]:
    trio.run = run_and_signal
"""
"""The process whose first argument is PROCESS sends itself a signal when its loop has ended."""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2], ids=["SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize("process", ["-m", "-c"], ids=["front", "engine"])
def test_a_process_asked_what_it_does_when_all_is_stopped_exits_as_it_would_have(
    start_server: Any, tmp_path: Path, process: str, number: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_WHEN_LEFT)
    server = start_server("null", env={"PYTHONPATH": str(tmp_path), "PROCESS": process, "NUMBER": str(int(number))})
    server.wait_line("ready")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "stopped" in server.lines[-1]


def test_a_process_at_work_survives_being_asked_for_its_tasks_and_its_threads_at_once(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "1")
    streams = [server.post("/v1/completions", {**server.LONG, "max_tokens": 8000}) for _ in range(4)]
    for _ in range(200):
        for pid in (server.engine_pid, server.process.pid):
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR2)
        time.sleep(0.005)
    server.process.send_signal(signal.SIGTERM)
    assert all(server.events(stream)[-1] == "[DONE]" for stream in streams)
    assert server.wait() == 0


def ignore_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def test_an_engine_that_dies_is_told_where_whoever_started_us_ignores_the_ends_of_children() -> None:
    """What is ignored stays so in the program that a process becomes."""
    script = """if True:
        import os, signal, trio, engine
        from engine.errors import EngineDeadError
        async def main():
            async with engine.open_engine("null", null_step_ms=5) as llm:
                async with llm.generate([65], engine.SamplingParams(max_tokens=5000)) as stream:
                    await anext(stream)
                    os.kill(llm.ready.pid, signal.SIGKILL)
                    async for _ in stream:
                        pass
        try:
            trio.run(main)
        except* EngineDeadError as group:
            print("told:", group.exceptions[0])
    """
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, preexec_fn=ignore_children)
    assert "killed by SIGKILL" in ended.stdout, ended.stderr


def test_a_signal_to_all_processes_at_once_is_an_orderly_stop_of_a_start(start_server: Any, tmp_path: Path) -> None:
    """A service manager may signal every process of a service at once."""
    env = signal_at_import(tmp_path, "-c", "engine.executor.runners", 1, signal.SIGSTOP)
    server = start_server("null", env=env)
    while len(server.children) < 2:
        time.sleep(0.01)
    for pid in [*server.children, server.process.pid]:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
    assert server.wait() == 0


def test_a_signal_after_the_outcome_is_known_does_not_change_it(start_server: Any, tmp_path: Path) -> None:
    """The front is signalled once more when its last line is written, which says that the engine died."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if sys.argv[0] == '-m':\n"
        "    write = sys.stderr.write\n"
        "    def write_and_signal(text):\n"
        "        done = write(text)\n"
        "        if 'the engine died' in text:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return done\n"
        "    sys.stderr.write = write_and_signal\n"
    )
    server = start_server("null", env={"PYTHONPATH": str(tmp_path)})
    os.kill(server.engine_pid, signal.SIGKILL)
    assert server.wait() == 1
    assert "the engine died" in server.lines[-1]
