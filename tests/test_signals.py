"""The ladder of signals, on a body that takes no notice of anything."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
