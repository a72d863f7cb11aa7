"""Models by their id on the Hugging Face hub: taken from its cache, else downloaded into it by huggingface_hub.

The cache's layout is huggingface_hub's (models--org--name/refs/main names a commit, snapshots/<commit>/ holds files),
so that what other programs have downloaded is found. The download runs as a process of its own: it brings an HTTP stack
that nothing else here needs, and it can be ended at any time; what it has got so far it goes on from. Nothing that is
downloaded is executed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import CheckpointError, ConfigError
from engine.models.fetch import Wait, run

logger = logging.getLogger(__name__)

_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>\S+))?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_YES = frozenset({"1", "ON", "YES", "TRUE"})
_STDERR = 2

_WEIGHTS = ("*.safetensors",)
_TEXTS = ("*.json", "*.jinja", "tokenizer.model")
_UNWANTED = ("*/*.safetensors", "*/*.json", "consolidated*")

_DOWNLOAD = """
import json, sys
errors, sys.stderr = sys.stderr, sys.stdout
from huggingface_hub import snapshot_download
try:
    snapshot_download(**json.loads(sys.argv[1]))
except Exception as error:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    print(f"{type(error).__name__}: {lines[-1]}", file=errors)
    sys.exit(1)
"""
"""Progress goes to standard output, so that standard error holds the one line that says what went wrong."""

_UNREACHABLE = "it cannot be reached; connect this machine once"
_REASONS = {
    "RepositoryNotFoundError": "no model has this id, or it is private; check the id and set HF_TOKEN",
    "GatedRepoError": "the model is gated; accept its terms on its page and set HF_TOKEN",
    "RevisionNotFoundError": "the model has no such revision; check it",
    "LocalEntryNotFoundError": _UNREACHABLE,
    "ConnectError": _UNREACHABLE,
}


class HubModel(NamedTuple):
    """A model on the hub.

    Attributes:
        repository: Organisation and name.
        revision: Branch, tag or commit.
    """

    repository: str
    revision: str

    def __str__(self) -> str:
        """The id as one writes it."""
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"


class CachedModel(NamedTuple):
    """A snapshot in the hub's cache."""

    model: HubModel
    folder: Path
    is_whole: bool


def parse_id(model: str, revision: str | None = None) -> HubModel | None:
    """Return the hub model that `model`, `org/name` or `org/name@revision`, names; None if it is no such id.

    Raises:
        ConfigError: The revision is no name of one, or given twice.
    """
    found = _ID.fullmatch(model)
    if found is None:
        return None
    if revision is not None and found["revision"] is not None and revision != found["revision"]:
        raise ConfigError(f"--revision {revision} contradicts the revision in {model!r}: give one of them")
    chosen = revision or found["revision"] or "main"
    if _REVISION.fullmatch(chosen) is None or ".." in chosen:
        raise ConfigError(f"revision {chosen!r} of model {found['repository']!r} is no branch, tag or commit")
    return HubModel(found["repository"], chosen)


def find(model: HubModel, wait: Wait, *, with_weights: bool = True) -> Path:
    """Return the folder of `model` in the hub's cache, downloading what is missing; what `wait` raises gives up.

    What lies whole in the cache is taken without asking the hub whether its branch has moved. Without weights, all
    else is enough.

    Raises:
        ConfigError: It is not in the cache and cannot be downloaded; says why and what to do.
        CheckpointError: The hub has it, but not with files that are read here.
    """
    folder = _snapshot(model)
    if folder is not None and not _missing(folder, with_weights):
        return folder
    if _is_offline():
        lacks = "is not" if folder is None else f"is not whole ({', '.join(_missing(folder, with_weights))})"
        raise ConfigError(
            f"model {str(model)!r} {lacks} in the hub's cache {cache_folder()}, and HF_HUB_OFFLINE is set: unset it to "
            f"download the model, or pass a model folder or a .gguf file"
        )
    _download(model, _WEIGHTS + _TEXTS if with_weights else _TEXTS, wait)
    folder = _snapshot(model)
    missing = ["its snapshot"] if folder is None else _missing(folder, with_weights)
    if folder is None or missing:
        raise CheckpointError(f"model {str(model)!r} of the hub has no {', '.join(missing)}: it cannot be read here")
    return folder


def cached() -> list[CachedModel]:
    """List what the hub's cache holds a configuration of."""
    found = []
    for config in sorted(cache_folder().glob("models--*--*/snapshots/*/config.json")):
        folder = config.parent
        _, organisation, name = folder.parent.parent.name.split("--", 2)
        repository = f"{organisation}/{name}"
        is_main = _snapshot(HubModel(repository, "main")) == folder
        model = HubModel(repository, "main" if is_main else folder.name)
        found.append(CachedModel(model, folder, not _missing(folder)))
    return found


def missing_weights(folder: Path) -> list[str]:
    """Name the weight files that a snapshot lacks, as far as it tells."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return sorted({str(name) for name in files.values() if not (folder / str(name)).is_file()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return ["readable model.safetensors.index.json"]
    return [] if any(folder.glob("*.safetensors")) else ["*.safetensors file"]


def cache_folder() -> Path:
    """Return the hub's cache folder, from the variables that huggingface_hub reads; it need not exist."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get("HF_HOME") or Path(general, "huggingface")).expanduser() / "hub"
    except RuntimeError as error:
        raise ConfigError(f"no hub cache can be placed ({error}): set HF_HOME to a folder") from error


def _snapshot(model: HubModel) -> Path | None:
    repository = cache_folder() / f"models--{model.repository.replace('/', '--')}"
    commit = model.revision
    if _COMMIT.fullmatch(commit) is None:
        try:
            commit = (repository / "refs" / model.revision).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
    folder = repository / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None


def _missing(folder: Path, with_weights: bool = True) -> list[str]:
    """Name what a model folder lacks to be served."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += missing_weights(folder) if with_weights else []
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        missing.append("tokenizer.json or tokenizer.model")
    return missing


def _is_offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in _YES for name in names)


def _download(model: HubModel, wanted: tuple[str, ...], wait: Wait) -> None:
    """Let huggingface_hub download: its own progress bars on a terminal, one log line elsewhere."""
    on_terminal = os.isatty(_STDERR)
    if not on_terminal:
        logger.info("fetching %s from the Hugging Face hub", model)
    asked = {
        "repo_id": model.repository,
        "revision": model.revision,
        "cache_dir": str(cache_folder()),
        "allow_patterns": wanted,
        "ignore_patterns": _UNWANTED,
    }
    silence = {} if on_terminal else {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    result = run(
        [sys.executable, "-P", "-W", "ignore", "-c", _DOWNLOAD, json.dumps(asked)],
        wait,
        stdin=subprocess.DEVNULL,
        stdout=_STDERR if on_terminal else subprocess.DEVNULL,
        env={**os.environ, **silence},
    )
    if result.returncode != 0:
        raise ConfigError(
            f"model {str(model)!r} is no folder here, and the Hugging Face hub does not give it: {_reason(result)}, "
            f"or pass a model folder or a .gguf file"
        )


def _reason(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    said = lines[-1] if lines else f"the download ended with exit code {result.returncode}"
    return _REASONS.get(said.partition(":")[0], said)
