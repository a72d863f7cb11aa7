"""What every test runs under: explicit threads, no network hub, and a check that nothing is left behind."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

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
