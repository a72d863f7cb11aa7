"""Whichever process is killed, or two of them, in whatever order and phase, nothing is left and who lives says so.

    python -m fuzz kills --minutes 2 --seed 7

Each round serves the integer model, opens some streams, and sends SIGKILL to the front, the engine, the reaper or two
of these at drawn moments: while it starts, while front and engine connect, or while it serves. What is checked:

    the front was killed     its processes and sockets are gone; its files too, at the next start if the reaper,
                             which removes them at once, ended before or was not yet started
    only others, the engine  the front ends by itself, with exit code 1, and its streams end
    only the reaper          the front serves on, and stops with exit code 0
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import trio

from engine.handshake import FOLDER_PREFIX
from fuzz.http import Target, get, post, serving
from fuzz.processes import sockets_of
from transport.folder import remove_orphans

GONE_S = 2.0
"""How soon after the kill every other process must have ended."""
ENDS_S = 10.0
"""How soon after the engine's death, or a SIGTERM, the front must have ended."""
LATEST_S = {"starts": 2.0, "connects": 0.4, "serves": 0.2}
"""When in each phase the first is killed, at the latest."""
VICTIMS = [
    ("front",),
    ("front",),
    ("engine",),
    ("reaper",),
    ("front", "engine"),
    ("engine", "front"),
    ("front", "reaper"),
    ("reaper", "front"),
    ("engine", "reaper"),
    ("reaper", "engine"),
]


def _processes(folder: str) -> dict[int, str]:
    """All processes that have `folder` for temporary files, but this one: their ids and what they are."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or process.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes()
                found[int(process.name)] = _role(command)
    return found


def _role(command: bytes) -> str:
    if b"os.killpg" in command:
        return "reaper"
    return "engine" if b"engine_process" in command else "front"


async def _round(draw: random.Random, folder: str, counts: Counter[str]) -> None:
    shared = set(os.listdir("/dev/shm"))
    phase = draw.choice(["starts", "connects", "serves"])
    starts = phase != "serves"
    async with (
        serving("--null-step-ms", "2", wait_until_ready=not starts) as target,
        contextlib.AsyncExitStack() as streams,
    ):
        connections = []
        for _ in range(0 if starts else draw.randint(0, 16)):
            connections.append(await streams.enter_async_context(await target.connect()))
            request = post({"prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True})
            await connections[-1].send_all(request)
        if phase == "connects":
            await _wait_for_sockets(folder)
        await trio.sleep(draw.random() * LATEST_S[phase])
        processes = _processes(folder)
        paths = sockets_of(processes)
        assert starts or sorted(processes.values()) == ["engine", "front", "reaper"], processes
        victims = await _kill(draw, draw.choice(VICTIMS), processes)
        counts["killed " + (" and ".join(victims) or "nobody")] += 1
        counts["rounds"] += 1
        if "front" not in victims:
            await _front_ends(target, engine_died="engine" in victims, starts=starts, streams=connections)
        await target.process.wait()
        await _wait_gone(folder)
    # A front that knew of its engine's death may have been killed between the reaper's end and the removal.
    reaper_ran = victims[:1] == ["front"] and "reaper" in processes.values() and "reaper" not in victims
    removed = _check_files(folder, paths, shared, none_left=reaper_ran or "front" not in victims)
    counts["folders removed by the next start"] += removed


def _check_files(folder: str, paths: set[str], shared: set[str], *, none_left: bool) -> int:
    """Check that nothing is left, or nothing after the next start has cleaned up; return what that had to remove."""
    left = {os.path.join(folder, name) for name in os.listdir(folder)}
    assert not (none_left and left), f"files are left: {left}"
    assert set(remove_orphans(FOLDER_PREFIX)) == left, f"files are left by the next start: {os.listdir(folder)}"
    assert not [path for path in paths if os.path.exists(path)], f"sockets are left: {paths}"
    assert set(os.listdir("/dev/shm")) <= shared, "shared memory is left"
    return len(left)


async def _kill(draw: random.Random, roles: tuple[str, ...], processes: dict[int, str]) -> list[str]:
    """Kill the processes of these roles, in order; return the roles of those that were there."""
    killed = []
    for role in roles:
        for pid in [pid for pid, found in processes.items() if found == role]:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself, as who lost its parent does
                os.kill(pid, signal.SIGKILL)
                killed.append(role)
        if draw.random() < 0.5:
            await trio.sleep(draw.random() * 0.02)
    return killed


async def _front_ends(target: Target, *, engine_died: bool, starts: bool, streams: list[trio.SocketStream]) -> None:
    """Wait for the front's end: by itself after the engine's death, else after SIGTERM; and for its streams' ends."""
    with trio.fail_after(ENDS_S):
        if not engine_died:
            if not starts:
                assert b"HTTP/1.1 200" in await target.ask(get("/health"))
            target.process.send_signal(signal.SIGTERM)
        for stream in streams:
            with contextlib.suppress(trio.BrokenResourceError):
                while await stream.receive_some():
                    pass
        code = await target.process.wait()
    wanted = 1 if engine_died else 0
    assert code == wanted or (starts and code == -signal.SIGTERM), f"the front ended with {code} in place of {wanted}"


async def _wait_for_sockets(folder: str) -> None:
    with trio.fail_after(60):
        while not await trio.to_thread.run_sync(os.listdir, folder):  # noqa: ASYNC110 - another process makes it
            await trio.sleep(0.002)


async def _wait_gone(folder: str) -> None:
    deadline = trio.current_time() + GONE_S
    while left := _processes(folder):
        assert trio.current_time() < deadline, f"processes are left: {left}"
        await trio.sleep(0.005)


def run(minutes: float, seed: int) -> int:
    """Kill processes until the time is over; returns in how many rounds.

    Raises:
        AssertionError: Something was left, or nobody was told.
        trio.TooSlowError: A front did not end.
    """
    deadline = time.monotonic() + 60 * minutes
    draw = random.Random(seed)
    counts = Counter[str]()
    before = os.environ.get("TMPDIR"), tempfile.gettempdir()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            while time.monotonic() < deadline:
                trio.run(_round, draw, folder, counts)
        finally:
            os.environ.pop("TMPDIR")
            if before[0] is not None:
                os.environ["TMPDIR"] = before[0]
            tempfile.tempdir = before[1]
    print("kills:", ", ".join(f"{number} {name}" for name, number in sorted(counts.items())), "- nothing was left")
    return counts["rounds"]
