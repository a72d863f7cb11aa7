"""`SyncMPClient` on real processes: no event loop, no thread, nothing lost by Ctrl-C, nothing left behind."""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import handshake
from engine.client.interrupts import InterruptsHeld
from engine.client.sync import SyncMPClient
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError, QueueFull, UtilityTimeout
from engine.outputs import FinishReason, RequestId
from engine.protocol import (
    MAX_STEPS_AHEAD,
    AbortReason,
    EngineCoreOutputs,
    EngineCoreRequest,
    Pause,
    PauseMode,
    ResetPrefixCache,
)
from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens
from tests.interrupts import InterruptAt, alarm, interrupt_after, kill_after

ROOT = Path(__file__).parent.parent.parent
GREEDY = SamplingParams(temperature=0, max_tokens=24)
FOREVER = SamplingParams(temperature=0, max_tokens=8000)
_numbers = itertools.count()


def make_client(**settings: Any) -> SyncMPClient:
    config = EngineConfig(model="null", prefix_hash_seed="x", log_level="warning", **settings)
    return SyncMPClient(config, lambda phase, done, total: None)


@pytest.fixture
def client() -> Iterator[SyncMPClient]:
    with make_client(null_step_ms=1) as opened:
        yield opened


def request(prompt: list[int], params: SamplingParams = GREEDY) -> EngineCoreRequest:
    return EngineCoreRequest(RequestId(f"r-0.{next(_numbers)}"), "r", prompt, params, 0.0)


def read_to_the_end(client: SyncMPClient, messages: list[EngineCoreOutputs]) -> None:
    while client.num_live:
        message = client.get_output()
        messages.append(message)


def read_on(client: SyncMPClient) -> None:
    while True:
        client.get_output()


def tokens_of(messages: list[EngineCoreOutputs], request_id: RequestId) -> list[int]:
    return [t for message in messages for o in message.outputs if o.request_id == request_id for t in o.new_token_ids]


def descriptors() -> set[str]:
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:  # of the listing itself
            continue
    return links


@pytest.fixture(autouse=True)
def engine_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Lists the folders of this test's engines; they lie in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="m-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield lambda: os.listdir(folder)


# -- start and end ---------------------------------------------------------------------------------------------------


def test_an_engine_whose_caller_does_other_things_holds_still_and_lives() -> None:
    with make_client(step_timeout=1) as client:
        asked = request([65], SamplingParams(temperature=0, max_tokens=400))
        client.add_request(asked)
        time.sleep(1.5)
        messages = [client.get_output()]
        assert len(client._outputs) <= MAX_STEPS_AHEAD + 1  # and one of the request's arrival
        read_to_the_end(client, messages)
        assert tokens_of(messages, asked.request_id) == expected_tokens([65], asked.sampling_params, 400)


def test_it_starts_answers_and_leaves_no_descriptor_no_folder_and_no_thread(
    engine_folders: Callable[[], list[str]],
) -> None:
    before = descriptors(), threading.enumerate()
    with make_client() as client:
        asked = request([65] * 20)
        client.add_request(asked)
        messages: list[EngineCoreOutputs] = []
        read_to_the_end(client, messages)
        assert tokens_of(messages, asked.request_id) == expected_tokens([65] * 20, GREEDY, 24)
        assert threading.enumerate() == before[1]
    assert client._connection._child.returncode == 0, "its last word was acknowledged: it ended by itself"
    assert (descriptors(), threading.enumerate(), engine_folders()) == (*before, [])
    client.shutdown()
    with pytest.raises(EngineDeadError, match="was shut down"):
        client.add_request(request([1]))


def test_the_callers_process_gets_no_event_loop() -> None:
    program = """
    import sys
    from engine.client.sync import SyncMPClient
    from engine.config import EngineConfig
    with SyncMPClient(EngineConfig(model="null"), lambda *phase: None) as client:
        print(*sorted({"trio", "asyncio", "torch"} & sys.modules.keys()))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, check=True)
    assert run.stdout.decode().split() == []


def test_the_phases_of_the_start_are_told_in_order() -> None:
    phases = []
    config = EngineConfig(model="null", log_level="warning")
    with SyncMPClient(config, lambda phase, done, total: phases.append(phase)):
        assert list(dict.fromkeys(phases)) == ["weights", "kv_specs", "profile", "kv_pages", "warm_up", "scheduler"]


def test_what_the_operator_asked_wrongly_is_said_by_its_own_error_and_leaves_nothing(
    engine_folders: Callable[[], list[str]],
) -> None:
    before = descriptors()
    with pytest.raises(ConfigError, match="max-model-len"):
        make_client(max_model_len=4096, num_gpu_blocks_override=2)
    assert (descriptors(), engine_folders()) == (before, [])


def test_an_engine_that_cannot_even_begin_is_told_with_its_status_and_its_traceback(
    engine_folders: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.handshake._MAIN", "raise RuntimeError('no GPU today')")
    before = descriptors()
    with pytest.raises(EngineDeadError, match="exited with status 1: RuntimeError: no GPU today") as died:
        make_client()
    cause = died.value.cause
    assert (cause.exit_status, cause.phase) == (1, "process")
    assert cause.traceback.startswith("Traceback (most recent call last)")
    assert "no GPU today" in capfd.readouterr().err, "what it wrote is passed on"
    assert (descriptors(), engine_folders()) == (before, [])


def test_an_engine_whose_hello_cannot_be_decoded_is_refused_by_name(
    engine_folders: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    babbles = "from engine import engine_process; engine_process.EngineHello = lambda index, pid: ['good day']; main()"
    monkeypatch.setattr(handshake, "_MAIN", handshake._MAIN.removesuffix("main()") + babbles)
    before = descriptors()
    with pytest.raises(EngineDeadError, match="refused a hello that cannot be decoded"):
        make_client()
    assert (descriptors(), engine_folders()) == (before, [])


_STOPS_AT = """
import signal
from engine.executor.null import NullModelRunner
start = NullModelRunner.start
def stopping(self, progress):
    def tell(phase, done, total):
        progress(phase, done, total)
        if phase == {phase!r}:
            signal.pause()
    return start(self, tell)
NullModelRunner.start = stopping
main()
"""


@pytest.mark.parametrize("at", ["weights", "kv_pages"])
def test_an_engine_that_is_killed_while_starting_is_told_with_the_signal_and_the_phase(
    engine_folders: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    main = handshake._MAIN.removesuffix("; main()") + _STOPS_AT.format(phase=at)
    monkeypatch.setattr(handshake, "_MAIN", main)

    def kill(phase: str, done: int, total: int) -> None:
        if phase == at:
            children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
            (engine,) = [pid for pid in children if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(int(engine), signal.SIGKILL)

    before = descriptors()
    with pytest.raises(EngineDeadError, match=rf"killed by SIGKILL \(while starting: {at}") as died:
        SyncMPClient(EngineConfig(model="null", log_level="warning"), kill)
    assert died.value.cause.exit_status == -signal.SIGKILL
    assert (descriptors(), engine_folders()) == (before, [])


def test_an_interrupted_start_leaves_nothing(engine_folders: Callable[[], list[str]]) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        signal.raise_signal(signal.SIGINT)

    before = descriptors()
    with pytest.raises(KeyboardInterrupt):
        SyncMPClient(EngineConfig(model="null", log_level="warning"), interrupt)
    assert (descriptors(), engine_folders()) == (before, [])


def test_only_the_main_thread_may_open_it() -> None:
    errors = []

    def opens() -> None:
        try:
            make_client()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=opens)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_the_engine_dies_with_a_caller_that_is_killed_and_its_folder_goes(
    engine_folders: Callable[[], list[str]],
) -> None:
    program = """
    import signal
    from engine.client.sync import SyncMPClient
    from engine.config import EngineConfig
    client = SyncMPClient(EngineConfig(model="null", log_level="warning"), lambda *phase: None)
    print(client.ready.pid, flush=True)
    signal.pause()
    """
    argv = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        pidfd = os.pidfd_open(int(caller.stdout.readline()))
        try:
            caller.kill()
            assert select_readable(pidfd, 10), "the engine outlived its caller"
        finally:
            os.close(pidfd)
    assert engine_folders() == []


def test_a_caller_that_forgets_the_shutdown_ends_and_so_does_its_engine() -> None:
    program = """
    import engine
    llm = engine.LLM("null", isolation="process", log_level="warning")
    print(llm.ready.pid, llm.generate("a", use_tqdm=False)[0].finished)
    """
    argv = [sys.executable, "-c", textwrap.dedent(program)]
    run = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=30, check=True)
    pid, finished = run.stdout.decode().split()
    assert finished == "True"
    assert not Path(f"/proc/{pid}").exists() or b"engine_process" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def select_readable(descriptor: int, timeout_s: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


# -- death -----------------------------------------------------------------------------------------------------------


def test_the_death_of_the_engine_ends_whoever_waits_and_all_later_calls(client: SyncMPClient) -> None:
    client.add_request(request([65], FOREVER))
    client.get_output()
    with kill_after(0.05, client.ready.pid), pytest.raises(EngineDeadError, match="killed by SIGKILL") as died:
        read_on(client)
    assert died.value.cause.exit_status == -signal.SIGKILL
    assert client.num_live == 0
    for act in (
        lambda: client.add_request(request([1])),
        lambda: client.call(ResetPrefixCache()),
        client.get_output,
    ):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            act()
    client.abort_requests([RequestId("r")], AbortReason.CLIENT)


def test_the_death_of_the_engine_ends_a_call_that_waits(client: SyncMPClient) -> None:
    client.add_request(request([65], FOREVER))
    client.get_output()
    client.get_output()
    with kill_after(0.05, client.ready.pid), pytest.raises(EngineDeadError, match="SIGKILL"):
        client.call(Pause(PauseMode.WAIT))


def test_what_the_engine_said_before_it_died_is_still_read(client: SyncMPClient) -> None:
    asked = request([65])
    client.add_request(asked)
    assert client.call(ResetPrefixCache()) in {True, False}
    while not any(o.finish_reason for m in client._outputs for o in m.outputs):
        client.call(ResetPrefixCache())
    os.kill(client.ready.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        client.call(Pause())
    messages: list[EngineCoreOutputs] = []
    read_to_the_end(client, messages)
    assert tokens_of(messages, asked.request_id) == expected_tokens([65], GREEDY, 24)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        read_on(client)


def test_what_came_before_a_message_that_cannot_be_read_counts(
    client: SyncMPClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request([65], SamplingParams(temperature=0, max_tokens=5))
    client.add_request(asked)
    connection = client._connection
    frames = []
    while b"length" not in b"".join(map(bytes, frames[-1] if frames else [])):
        assert connection.wait(time.monotonic() + 5)
        frames.append(connection._pull.take())
    with monkeypatch.context() as patched:
        patched.setattr(connection, "wait", lambda deadline_s: True)
        patched.setattr(connection._pull, "take", iter([*frames, [b"\xc1"]]).__next__)
        messages = [client.get_output() for _ in frames]
        with pytest.raises(EngineDeadError, match="cannot be decoded"):
            client.get_output()
    assert tokens_of(messages, asked.request_id) == expected_tokens([65], asked.sampling_params, 5)
    assert client.num_live == 0


def test_an_engine_that_does_not_stop_is_killed_and_said_so() -> None:
    client = make_client(null_step_ms=30000)
    client.add_request(request([65]))
    client.call(ResetPrefixCache())
    with pytest.raises(EngineDeadError, match=r"did not stop within 0\.1 seconds"):
        client.shutdown(0.1)
    client.shutdown()


def test_an_interrupted_shutdown_kills_the_engine() -> None:
    client = make_client(null_step_ms=30000)
    client.add_request(request([65]))
    client.call(ResetPrefixCache())
    with interrupt_after(0.05), pytest.raises(KeyboardInterrupt):
        client.shutdown()
    assert client._connection._child.returncode == -signal.SIGKILL


def test_a_call_that_is_not_answered_in_time_says_so_and_the_next_one_is_answered(client: SyncMPClient) -> None:
    client.add_request(request([65], FOREVER))
    client.get_output()
    client.get_output()
    with pytest.raises(UtilityTimeout, match="Call to Pause failed"):
        client.call(Pause(PauseMode.WAIT), timeout_s=0.05)
    assert client.call(ResetPrefixCache()) is False


def test_what_the_engine_logs_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with SyncMPClient(EngineConfig(model="null"), lambda *phase: None) as client:
        assert "starting: weights" in capfd.readouterr().err
        assert "starting: weights" in "\n".join(client._connection._output.tail)


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_interrupts_at_drawn_instants_lose_no_token_and_double_none() -> None:
    draw = random.Random(5)
    num_interrupts = 0
    with make_client() as client, alarm(lambda: signal.raise_signal(signal.SIGINT)):
        for _ in range(120):
            asked = [request([draw.randrange(256) for _ in range(draw.randrange(1, 40))]) for _ in range(3)]
            for each in asked:
                client.add_request(each)
            messages: list[EngineCoreOutputs] = []
            is_done = False
            while not is_done:
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 1.5e-3))
                    read_to_the_end(client, messages)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    is_done = True
                except KeyboardInterrupt:
                    num_interrupts += 1
            for each in asked:
                assert tokens_of(messages, each.request_id) == expected_tokens(each.prompt_token_ids, GREEDY, 24)
    assert num_interrupts > 200


def outcome_with_interrupt_at(number: int, client: Any) -> bool:
    """Ask, interrupted once; return whether it was. The tokens must be those of the definition all the same."""
    params = SamplingParams(temperature=0, max_tokens=2)
    asked = request([65, number % 256], params)
    messages: list[EngineCoreOutputs] = []
    injection = InterruptAt(number)
    try:
        with injection:
            client.add_request(asked)
            read_to_the_end(client, messages)
    except KeyboardInterrupt:
        if asked.request_id not in client._live and not messages:
            return True  # it was not even added
    read_to_the_end(client, messages)
    assert tokens_of(messages, asked.request_id) == expected_tokens(asked.prompt_token_ids, params, 2)
    reasons = [o.finish_reason for m in messages for o in m.outputs if o.finish_reason is not None]
    assert reasons == [FinishReason.LENGTH]
    return injection.left <= 0


@pytest.mark.slow
def test_an_interrupt_wherever_python_could_raise_one_loses_no_token_and_doubles_none() -> None:
    with make_client() as client:
        for number in itertools.count(1):
            if not outcome_with_interrupt_at(number, client):
                break
            assert number < 5000
    assert number > 60, "there are more such points than that"


def test_a_held_interrupt_comes_when_the_block_is_left_and_nested_blocks_wait_for_the_outer() -> None:
    reached = []

    def interrupted() -> None:
        with InterruptsHeld():
            with InterruptsHeld():
                signal.raise_signal(signal.SIGINT)
                reached.append("inner")
            reached.append("outer")
        reached.append("after")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_callers_own_is_run_later_and_stays() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with InterruptsHeld():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert len(calls) == 2
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_stays_as_it_is(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with InterruptsHeld():
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_is_held_for_nothing_interrupts_it() -> None:
    held = []

    def run() -> None:
        with InterruptsHeld():
            held.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert held == [signal.default_int_handler]


# -- requests --------------------------------------------------------------------------------------------------------


def test_requests_beyond_the_limit_are_refused_before_anything_is_sent() -> None:
    with make_client(max_num_seqs=1, max_num_waiting=1) as client:
        for _ in range(2):
            client.add_request(request([65], FOREVER))
        with pytest.raises(QueueFull, match="max-num-waiting 1"):
            client.add_request(request([65]))
        assert client.num_live == 2


def test_a_request_that_cannot_be_sent_does_not_count_as_live(
    client: SyncMPClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(message: object) -> None:
        raise OverflowError("cannot be sent")

    monkeypatch.setattr(client._connection, "send", refuse)
    with pytest.raises(OverflowError):
        client.add_request(request([65]))
    assert client.num_live == 0
    monkeypatch.undo()
