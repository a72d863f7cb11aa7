"""Whenever the front process is killed, nothing of it is left: no process, no socket, no file.

    python -m fuzz kills --minutes 2 --seed 7

Each round serves the integer model, opens some streams, and sends SIGKILL to the front at a drawn moment; every other
round does so while it starts.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import tempfile
import time
from pathlib import Path

import trio

from fuzz.http import post, serving

GONE_S = 2.0
"""How soon after the kill every descendant must have ended."""


def _descendants(pid: int) -> list[int]:
    found = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _children(task)]
    return found + [further for child in found for further in _descendants(child)]


def _children(task: Path) -> list[str]:
    return (task / "children").read_text().split()


def _listening(pids: list[int]) -> set[str]:
    """The unix sockets of these processes, by path."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[7] for line in lines if len(line) > 7 and line[6] in inodes}


async def _round(draw: random.Random, folder: str) -> None:
    shared = set(os.listdir("/dev/shm"))
    starts = draw.random() < 0.5
    async with (
        serving("--null-step-ms", "2", wait_until_ready=not starts) as target,
        contextlib.AsyncExitStack() as streams,
    ):
        for _ in range(0 if starts else draw.randint(0, 16)):
            stream = await streams.enter_async_context(await target.connect())
            await stream.send_all(post({"prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True}))
        await trio.sleep(draw.random() * (2.0 if starts else 0.2))
        pids = _descendants(target.process.pid)
        paths = _listening([target.process.pid, *pids])
        pidfds = [os.pidfd_open(pid) for pid in pids]
        target.process.kill()
        try:
            for pid, pidfd in zip(pids, pidfds, strict=True):
                assert select.select([pidfd], [], [], GONE_S)[0], f"process {pid} is left"
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
        await target.process.wait()
    assert pids or starts, "there was no engine process"
    _check_files(paths, folder, shared)


def _check_files(paths: set[str], folder: str, shared: set[str]) -> None:
    assert not [path for path in paths if os.path.exists(path)], f"sockets are left: {paths}"
    assert not os.listdir(folder), f"files are left: {os.listdir(folder)}"
    assert set(os.listdir("/dev/shm")) <= shared, "shared memory is left"


def run(minutes: float, seed: int) -> int:
    """Kill fronts until the time is over; returns how many.

    Raises:
        AssertionError: Something was left.
    """
    deadline = time.monotonic() + 60 * minutes
    draw = random.Random(seed)
    num_rounds = 0
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = folder
        try:
            while time.monotonic() < deadline:
                trio.run(_round, draw, folder)
                num_rounds += 1
        finally:
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before
    print(f"kills: {num_rounds} fronts were killed, nothing was left")
    return num_rounds
