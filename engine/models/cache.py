"""Our own cache of models: entries that are filled by one process at a time, and are there whole or not at all.

::

    METRONOME_CACHE/models/
        .lock                       held by whoever fills the cache; the others wait for it
        .partial-<entry>/           being filled; whoever holds the lock next removes it
        <name>-<digest>-v<N>/       whole: it got this name by one rename, when everything was on disk
            model.safetensors  config.json  generation_config.json  tokenizer.json  tokenizer_config.json
            chat_template.jinja  model.gguf

An entry is never changed once it has its name, so that readers need no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.errors import ConfigError
from engine.models.fetch import Progress, Wait, run

logger = logging.getLogger(__name__)

GGUF_FILE = "model.gguf"
"""In a converted model's folder the file that it was converted from."""
_CONVERSION = 3
"""Raised whenever convert.py writes something else for the same file: old entries are then no longer found."""

_LOCK_INPUT = "import fcntl; fcntl.flock(0, fcntl.LOCK_EX)"
"""Waits for the lock on the file that is its standard input; whoever shares the open file has it then too."""


def cache_folder() -> Path:
    """Return the cache folder: METRONOME_CACHE, or ~/.cache/metronome. It need not exist.

    Raises:
        ConfigError: There is no home folder to put it in.
    """
    try:
        return Path(os.environ.get("METRONOME_CACHE") or "~/.cache/metronome").expanduser()
    except RuntimeError as error:
        raise ConfigError(f"no model cache can be placed ({error}): set METRONOME_CACHE to a folder") from error


def own_torch_cache() -> None:
    """Have what torch makes at its import of a compiler lie in our cache, where that can be, and not in /tmp."""
    folder = cache_folder() / "torchinductor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def entry_name(name: str, digest: str) -> str:
    """Return the name of the entry of what comes from a file with this SHA-256 digest."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{digest[:16]}-v{_CONVERSION}"


def filled(entry: str, fill: Callable[[Path, int], None], progress: Progress, wait: Wait) -> Path:
    """Return the folder of `entry`, filled by `fill(folder, lock_descriptor)` unless it is there already."""
    models = cache_folder() / "models"
    folder = models / entry
    if folder.is_dir():
        return folder
    with _cache_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / ".lock", progress, wait) as lock_descriptor:
            if not folder.is_dir():
                _fill_atomically(folder, fill, lock_descriptor)
    return folder


def _fill_atomically(folder: Path, fill: Callable[[Path, int], None], lock_descriptor: int) -> None:
    for stale in folder.parent.glob(".partial-*"):
        shutil.rmtree(stale)
    partial = folder.with_name(f".partial-{folder.name}")
    partial.mkdir()
    try:
        fill(partial, lock_descriptor)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file's or folder's content is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress, wait: Wait) -> Iterator[int]:
    """Hold the lock file exclusively, waiting for another holder if there is one; yields its descriptor."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is filling the model cache %s: waiting for it", path.parent)
            progress("wait", 0, 0)
            result = run([sys.executable, "-I", "-S", "-c", _LOCK_INPUT], wait, stdin=file)  # flock alone cannot stop
            if result.returncode != 0:
                raise OSError(f"waiting for {path} failed: {result.stderr.strip()}") from None
        yield file.fileno()


@contextlib.contextmanager
def _cache_errors(models: Path) -> Iterator[None]:
    """Turn failures to write the cache into the operator's error."""
    try:
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        remedy = "free some space" if full else "make it writable"
        raise ConfigError(
            f"the model cache {models} cannot be filled ({error.strerror or error}): {remedy}, or set "
            f"METRONOME_CACHE to a folder with a gigabyte of room"
        ) from error
