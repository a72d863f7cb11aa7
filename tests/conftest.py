"""What every test runs under: explicit threads, no network hub, and a check that nothing is left behind."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import zmq

from engine.models import DEFAULT
from engine.models.store import resolve

_ALLOWED_THREADS = ("Trio thread", "pyzmq", "tqdm", "pydevd")


def _threads() -> set[str]:
    return {t.name for t in threading.enumerate() if not t.name.startswith(_ALLOWED_THREADS)}


def _children() -> set[int]:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return set()
    found: set[int] = set()
    for task in tasks.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since has no children
            found.update(int(pid) for pid in (task / "children").read_text().split())
    return found


def _sockets() -> set[str]:
    fds = Path("/proc/self/fd")
    if not fds.exists():
        return set()
    links = set()
    for fd in fds.iterdir():
        try:
            link = os.readlink(fd)
        except OSError:
            continue
        if link.startswith(("socket:", "anon_inode:[pidfd]", "anon_inode:[eventfd]")):
            links.add(f"{fd.name} {link}")
    return links


@pytest.fixture(scope="session", autouse=True)
def pyzmq_collector() -> None:
    """Start pyzmq's collector thread, which the first zero-copy frame starts and which lives to the end."""
    zmq.Frame(bytes(zmq.COPY_THRESHOLD), copy=False)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or a socket of ours behind."""
    threads, children, sockets = _threads(), _children(), _sockets()
    yield
    left = {
        "threads": sorted(_threads() - threads),
        "children": sorted(_children() - children),
        "descriptors": sorted(_sockets() - sockets),
    }
    left = {kind: names for kind, names in left.items() if names}
    if left:
        pytest.fail(f"{request.node.nodeid} left behind: {left}")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real default model; fetched and converted once into METRONOME_CACHE or the default cache folder."""
    return resolve(DEFAULT)


@pytest.fixture(scope="session")
def byte_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny llama of random float32 weights whose tokens are the 256 bytes."""
    import tokenizers
    import torch
    import transformers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("byte-llama")
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


ROOT = Path(__file__).parent.parent
CHANGED_MAIN = """
import os, signal, sys
sys.path.insert(0, {root!r})
from transport.process import child_guard
child_guard()
import msgspec
from engine import engine_process, protocol
from engine.executor.null import NullModelRunner
rank = int(sys.argv[1])
start, execute = NullModelRunner.start, NullModelRunner.execute
{change}
engine_process.main()
"""


@pytest.fixture
def change_engines(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has engine processes run some code before their main; it knows its `rank`."""

    def change(code: str) -> None:
        monkeypatch.setattr("engine.handshake._MAIN", CHANGED_MAIN.format(root=str(ROOT), change=code))

    return change


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process's temporary files are; nothing may be left there. Its path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)
        assert not os.listdir(folder)


class ServerProcess:
    """`python -m engine serve` as a user runs it; its log is read as it comes."""

    LONG: ClassVar[dict[str, Any]] = {"prompt": "go on", "max_tokens": 8000, "stream": True, "ignore_eos": True}

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        where = () if "--uds" in arguments or "--port" in arguments else ("--port", "0")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine", "serve", *arguments, *where],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def wait_line(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.lines)), None)

        with self._news:
            self._news.wait_for(lambda: found() or self._has_ended, timeout=60)
            match = found()
            assert match, "\n".join(self.lines)
            return match

    @property
    def url(self) -> str:
        return self.wait_line(r"ready: .* on (http://[\d.:]+)")[1]

    @property
    def engine_pid(self) -> int:
        return int(self.wait_line(r"engine process (\d+)")[1])

    @property
    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def get(self, path: str) -> Any:
        return urllib.request.urlopen(self.url + path, timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=60)

    @staticmethod
    def events(response: Any) -> list[Any]:
        """Read a stream to its end and return its events' data, decoded; `[DONE]` stays text."""
        datas = [line.decode().strip()[6:] for line in response if line.startswith(b"data: ")]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]

    def open_streams(self, number: int) -> list[Any]:
        """Open streams and read a first event of each, so that all are under way."""
        responses = [self.post("/v1/completions", self.LONG) for _ in range(number)]
        for response in responses:
            assert response.readline().startswith(b"data: ")
        return responses

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()

    def wait(self) -> int:
        """Wait for the orderly end and return the exit code."""
        code = self.process.wait(timeout=20)
        self._reader.join()
        return code


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    """Starts `serve` with the given arguments; what still runs after the test is killed."""
    servers: list[ServerProcess] = []

    def start(*arguments: str, env: dict[str, str] | None = None) -> ServerProcess:
        servers.append(ServerProcess(*arguments, env=env))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def hasty(tmp_path: Path) -> dict[str, str]:
    """The environment of a server that waits for its engine's last aborts for a tenth of its usual time."""
    folder = tmp_path / "hasty"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\nif sys.argv[0] == '-m':\n    import web.serve\n    web.serve.ABORT_GRACE_S /= 10\n"
    )
    return {"PYTHONPATH": f"{folder}:{os.getcwd()}"}
