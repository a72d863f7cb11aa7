"""The hub's cache as huggingface_hub lays it out, and a hub of one model on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, ConfigError
from engine.models import hub
from engine.models.fetch import wait_in_read
from engine.models.hub import HubModel, parse_id
from engine.models.listing import list_models
from engine.models.store import model_name, pull, resolve

COMMIT, OLDER = "a" * 40, "b" * 40
FILES = {
    "config.json": json.dumps(
        {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, "torch_dtype": "bfloat16"}
    ),
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
}


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of this test's own, and no network; returns the hub's."""
    monkeypatch.setenv("METRONOME_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "hub"


def lay(cache: Path, files: dict[str, str], *, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Put a snapshot of org/tiny into the cache, its files links to blobs."""
    repository = cache / "models--org--tiny"
    for name, content in files.items():
        blob = repository / "blobs" / hashlib.sha256(content.encode()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_text(content)
        link = repository / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    if ref is not None:
        (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return repository / "snapshots" / commit


def test_ids_are_told_from_names_and_paths() -> None:
    assert parse_id("org/name") == HubModel("org/name", "main")
    assert parse_id("Org-1/Some.Model-1.5@v2.0") == HubModel("Org-1/Some.Model-1.5", "v2.0")
    assert parse_id("org/name", "refs/pr/3") == HubModel("org/name", "refs/pr/3")
    for other in ("name", "./org/name", "/org/name", "~/name", "a/b/c", "org/", "../name", "org/na me", ""):
        assert parse_id(other) is None
    assert model_name("org/name@v1") == "org/name"
    assert model_name("models/tiny.gguf") == "tiny.gguf"


@pytest.mark.parametrize("revision", ["..", "../../etc", "a/../b", "-x", "/x", "x/"])
def test_revision_that_is_none_is_refused(revision: str) -> None:
    with pytest.raises(ConfigError, match="is no branch, tag or commit"):
        parse_id("org/name", revision)


def test_two_revisions_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="--revision v2 contradicts the revision in 'org/name@v1'"):
        parse_id("org/name@v1", "v2")


def test_model_in_the_cache_is_used_without_a_network(caches: Path) -> None:
    folder = lay(caches, FILES)
    older = lay(caches, FILES, commit=OLDER, ref="v1")
    assert resolve("org/tiny") == pull("org/tiny") == folder
    assert resolve("org/tiny@v1") == resolve("org/tiny", revision="v1") == resolve(f"org/tiny@{OLDER}") == older


def test_folder_of_the_same_name_is_meant_where_there_is_one(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay(caches, FILES)
    local = tmp_path / "here" / "org" / "tiny"
    local.mkdir(parents=True)
    for name, content in FILES.items():
        (local / name).write_text(content)
    monkeypatch.chdir(tmp_path / "here")
    assert resolve("org/tiny") == Path("org/tiny")
    with pytest.raises(ConfigError, match="--revision v1: 'org/tiny' has no revisions"):
        resolve("org/tiny", revision="v1")


def test_offline_says_what_is_missing_and_what_to_do(caches: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("org/tiny")
    assert str(refused.value) == (
        f"model 'org/tiny' is not in the hub's cache {caches}, and HF_HUB_OFFLINE is set: unset it to download the "
        f"model, or pass a model folder or a .gguf file"
    )
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files = {"config.json": "{}", "model.safetensors.index.json": json.dumps(index), "tokenizer.model": "x"}
    lay(caches, files | {"model-00001-of-00002.safetensors": "x"})
    with pytest.raises(ConfigError, match=r"is not whole \(model-00002-of-00002\.safetensors\) in the hub's cache"):
        resolve("org/tiny")


def test_listing_shows_the_hubs_cache(caches: Path) -> None:
    folder = lay(caches, FILES)
    lay(caches, {"config.json": '{"quantization_config": {"quant_method": "gptq"}}'}, commit=OLDER, ref=None)
    (caches / "models--org--broken" / "snapshots" / COMMIT).mkdir(parents=True)
    (caches / "models--org--broken" / "snapshots" / COMMIT / "config.json").write_text("{")
    listed = {listing.name: listing for listing in list_models()}
    whole = listed["org/tiny"]
    assert (whole.path, whole.is_whole, whole.architecture, whole.context_length) == (
        folder,
        True,
        "LlamaForCausalLM",
        64,
    )
    assert (whole.weights, whole.size_bytes) == ("bfloat16", sum(map(len, FILES.values())))
    part = listed[f"org/tiny@{OLDER}"]
    assert (part.is_whole, part.weights, part.architecture, part.context_length) == (False, "gptq", "", 0)
    assert listed[f"org/broken@{COMMIT}"].architecture == ""


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/x"}, "/b"),
        ({"HF_HOME": "/c"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
    ],
)
def test_cache_lies_where_huggingface_hub_puts_it(
    variables: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_folder() == Path(place)


# -- a hub -------------------------------------------------------------------------------------------------------------


class Hub(http.server.ThreadingHTTPServer):
    """Answers what huggingface_hub asks for org/tiny; `files` by name; other ids are not found."""

    daemon_threads = False
    files: dict[str, str]
    asked: list[str]


class Answer(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        prefix, _, name = path.partition(f"/resolve/{COMMIT}/")
        if path.startswith("/api/models/org/tiny/tree/"):
            self.answer(json.dumps([self.entry(name) for name in self.server.files]))
        elif path in {
            "/api/models/org/tiny",
            "/api/models/org/tiny/revision/main",
            f"/api/models/org/tiny/revision/{COMMIT}",
        }:
            siblings = [{"rfilename": name} for name in self.server.files]
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}))
        elif prefix == "/org/tiny" and name in self.server.files:
            self.answer(self.server.files[name])
        else:
            code = "RevisionNotFound" if path.startswith("/api/models/org/tiny/") else "RepoNotFound"
            self.answer("", 404, {"X-Error-Code": code})

    def entry(self, name: str) -> dict[str, Any]:
        content = self.server.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content.encode()).hexdigest()}

    def answer(self, content: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("ETag", f'"{hashlib.sha256(content.encode()).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content.encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, which huggingface_hub is told to ask."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with Hub(("127.0.0.1", 0), Answer) as server:
        server.files, server.asked = dict(FILES), []
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_model_is_downloaded_once_and_only_what_is_read(
    served: Hub, caches: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served.files |= {
        "pytorch_model.bin": "pickle",
        "onnx/config.json": "{}",
        "modeling.py": "import os",
        "vocab.txt": "x",
    }
    folder = resolve("org/tiny")
    assert folder == caches / "models--org--tiny" / "snapshots" / COMMIT
    assert {path.name: path.read_text() for path in folder.iterdir()} == FILES
    assert [record.getMessage() for record in caplog.records] == ["fetching org/tiny from the Hugging Face hub"]
    served.asked.clear()
    assert resolve("org/tiny") == folder
    assert served.asked == []


@pytest.mark.slow
def test_without_weights_all_else_is_downloaded_and_the_model_is_listed_as_cached_in_part(served: Hub) -> None:
    folder = hub.find(HubModel("org/tiny", "main"), wait_in_read, with_weights=False)
    assert {path.name for path in folder.iterdir()} == FILES.keys() - {"model.safetensors"}
    (listed,) = [listing for listing in list_models() if listing.name == "org/tiny"]
    assert not listed.is_whole
    assert resolve("org/tiny") == folder
    assert (folder / "model.safetensors").exists()


@pytest.mark.slow
def test_refusals_of_the_hub_say_what_to_do(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'org/other' is no folder here, .*: no model has this id, or it is private"):
        resolve("org/other")
    with pytest.raises(ConfigError, match="the model has no such revision"):
        resolve("org/tiny@v9")
    del served.files["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"'org/tiny' of the hub has no \*\.safetensors file"):
        resolve("org/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="it cannot be reached; connect this machine once, or pass a model folder"):
        resolve("org/third")


@pytest.mark.slow
def test_download_is_given_up_when_its_wait_raises(served: Hub, caches: Path) -> None:
    def give_up(descriptor: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("org/tiny", wait=give_up)
    assert not (caches / "models--org--tiny" / "snapshots").exists()
    assert resolve("org/tiny", wait=wait_in_read).name == COMMIT
