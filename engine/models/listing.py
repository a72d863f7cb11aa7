"""What is cached, ours and the Hugging Face hub's, as far as files tell without being loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from engine.models import hub, store
from engine.models.cache import cache_folder


class ModelListing(NamedTuple):
    """One line of the list of models.

    Attributes:
        name: To be passed as the model; of a converted GGUF file, its entry in the cache.
        aliases: Other names for it.
        path: Its folder, or None while it is not in a cache.
        is_whole: Whether it can be served without a network.
        size_bytes: On disk; of the download while it is not in a cache.
        architecture: From config.json; empty where it is not known.
        context_length: Longest prompt plus output in tokens, likewise; 0 where it is not known.
        weights: Type of the weights, and the quantization they are or come from; empty where it is not known.
        license: SPDX identifier, empty if not known.
    """

    name: str
    aliases: tuple[str, ...]
    path: Path | None
    is_whole: bool
    size_bytes: int
    architecture: str = ""
    context_length: int = 0
    weights: str = ""
    license: str = ""


def list_models() -> list[ModelListing]:
    """List the known models and whatever else the caches hold, by name."""
    by_entry = {known.entry: known for known in store.KNOWN_MODELS}
    entries = {config.parent.name: config.parent for config in cache_folder().glob("models/[!.]*/config.json")}
    listed = []
    for entry, known in by_entry.items():
        folder = entries.get(entry)
        if folder is None:
            size_bytes = known.wheel.size_bytes
            listed.append(ModelListing(known.name, known.aliases, None, False, size_bytes, license=known.license))
        else:
            listed.append(_of(folder, known.name)._replace(aliases=known.aliases, license=known.license))
    listed += [_of(folder, entry) for entry, folder in entries.items() if entry not in by_entry]
    listed += [_of(snapshot.folder, str(snapshot.model), snapshot.is_whole) for snapshot in hub.cached()]
    return sorted(listed, key=lambda listing: listing.name.lower())


def weights_of(config: dict[str, Any]) -> str:
    """Say in a few words what a config.json tells of the weights: `bfloat16 from Q4_K_M`, `gptq`, `float32`."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        return str(quantization.get("quant_method", "quantized"))
    dtype, origin = config.get("dtype") or config.get("torch_dtype") or "", config.get("gguf_file_type")
    return f"{dtype} from {origin}" if origin not in {None, "F32", "F16", "BF16"} else str(dtype)


def context_of(config: dict[str, Any]) -> int:
    """Return the longest context that a config.json names, 0 if none."""
    text = config.get("text_config")
    nested = text if isinstance(text, dict) else {}
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    found = [values[name] for values in (config, nested) for name in names if type(values.get(name)) is int]
    return int(found[0]) if found else 0


def _of(folder: Path, name: str, is_whole: bool = True) -> ModelListing:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = {}
    config = config if isinstance(config, dict) else {}
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    size_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return ModelListing(name, (), folder, is_whole, size_bytes, architecture, context_of(config), weights_of(config))
