"""The ladder of signals: the first asks, the second cancels, and a body that takes no notice is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from engine.signals import run_until_stopped

BODY = """
import sys, trio
from engine import signals

signals.AT_ONCE_S = float(sys.argv[1])

async def body(stop):
    print("started", flush=True)
    with trio.CancelScope(shield=True):
        await stop.wait()
        print("asked", flush=True)
        await trio.sleep_forever()

sys.exit(trio.run(signals.run_until_stopped, body))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(("at_once_s", "num_signals"), [(0.05, 2), (1e9, 3)])
def test_a_body_that_does_not_stop_is_ended(number: int, at_once_s: float, num_signals: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BODY, str(at_once_s)],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(number)
        if num_signals == 3:
            assert process.stderr.readline().endswith("stopping at once\n")
            process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("verb", ["serve", "generate"])
def test_a_signal_while_modules_are_imported_ends_it_at_once(verb: str, number: int, tmp_path: Path) -> None:
    """The import of the first module of the command line is made to wait for the signal."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "class Wait:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'engine.cli':\n"
        "            print('importing', flush=True)\n"
        "            time.sleep(30)\n"
        "sys.meta_path.insert(0, Wait())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", verb, "null", "hi"],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(number)
        assert process.wait(timeout=20) == (0 if verb == "serve" else 128 + number)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


async def test_the_first_signal_asks_the_body_to_stop() -> None:
    async def body(stop: trio.Event) -> int:
        send(signal.SIGTERM)
        await stop.wait()
        return 7

    assert await run_until_stopped(body) == 7


async def test_a_second_signal_cancels_the_body() -> None:
    async def body(stop: trio.Event) -> int:
        send(signal.SIGTERM)
        await stop.wait()
        send(signal.SIGINT)
        await trio.sleep_forever()
        return 7

    assert await run_until_stopped(body) == 128 + signal.SIGINT


async def test_a_signal_that_was_taken_is_not_counted() -> None:
    taken: list[int] = []
    was_taken = trio.Event()

    def takes(number: int) -> bool:
        taken.append(number)
        was_taken.set()
        return len(taken) == 1

    async def body(stop: trio.Event) -> int:
        send(signal.SIGINT)
        await was_taken.wait()
        assert not stop.is_set()
        send(signal.SIGINT)
        await stop.wait()
        return 7

    assert await run_until_stopped(body, takes) == 7
    assert taken == [signal.SIGINT, signal.SIGINT]


STUCK = BODY.replace("await stop.wait()", "import time; time.sleep(60)")


@pytest.mark.slow
def test_the_third_signal_ends_a_process_whose_loop_stands_still() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, "1e9"], cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "started\n"
        while process.poll() is None:  # equal signals of which none was handled yet are one
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.02)
        assert process.returncode == 128 + signal.SIGTERM
