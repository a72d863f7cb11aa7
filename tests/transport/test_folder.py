"""Folders of dead processes are removed at the next start; those of the living, and what is not ours, never."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from transport import folder as folder_module
from transport.folder import open_folder, remove_orphans

OWNER = """
import os, signal, subprocess
from transport.folder import open_folder
with open_folder("ours-") as path:
    open(path + "/requests", "w").close()
    subprocess.Popen(["sleep", "60"], close_fds=False)  # inherits whatever can be
    print(path, flush=True)
    signal.pause()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Owner:
    """A process that holds a folder."""

    def __init__(self) -> None:
        env = {**os.environ, "TMPDIR": tempfile.gettempdir()}
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=env, process_group=0
        )
        self.folder = Path(self._process.stdout.readline().strip())

    def kill(self) -> None:
        """Kill it alone; its child lives on."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def start_owner():
    owners = []

    def start() -> Owner:
        owners.append(Owner())
        return owners[-1]

    yield start
    for owner in owners:
        owner.close()


def test_a_folder_is_this_users_alone_and_goes_with_its_block(temporary):
    descriptors = set(os.listdir("/proc/self/fd"))
    with open_folder("ours-") as path:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
        assert Path(path).parent == temporary
        Path(path, "requests").touch()
    assert not os.listdir(temporary)
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_a_folder_that_was_removed_before_its_block_ended_is_no_error(temporary):
    with open_folder("ours-") as path:
        os.rmdir(path)
    assert not os.listdir(temporary)


def test_the_next_start_removes_what_a_killed_process_left_whose_child_lives_on_and_nothing_of_a_living_one(
    start_owner, temporary
):
    dead, living = start_owner(), start_owner()
    dead.kill()
    assert (dead.folder / "requests").exists()
    with open_folder("ours-") as path:
        assert sorted(os.listdir(temporary)) == sorted([living.folder.name, Path(path).name])
        assert (living.folder / "requests").exists()


def test_what_is_not_ours_is_never_touched(temporary):
    outside = temporary / "outside"
    outside.mkdir()
    (outside / "keep").touch()
    (temporary / "ours-link").symlink_to(outside)
    (temporary / "ours-file").touch()
    os.mkfifo(temporary / "ours-fifo")
    (temporary / "theirs-folder").mkdir()
    (temporary / "ours-with-folder" / "deep").mkdir(parents=True)
    before = sorted(temporary.rglob("*"))
    assert remove_orphans("ours-") == []
    assert sorted(temporary.rglob("*")) == before


def test_a_link_in_an_orphan_is_removed_and_not_followed(temporary):
    outside = temporary / "outside"
    outside.touch()
    orphan = temporary / "ours-orphan"
    orphan.mkdir()
    (orphan / "link").symlink_to(outside)
    assert remove_orphans("ours-") == [str(orphan)]
    assert outside.exists()


def test_another_users_folder_is_left(temporary, monkeypatch):
    (temporary / "ours-of-another").mkdir()
    monkeypatch.setattr(folder_module.os, "geteuid", lambda: os.getuid() + 1)
    assert remove_orphans("ours-") == []


@pytest.mark.parametrize("moment", ["before the lock", "while the lock is taken"])
def test_a_folder_that_a_cleaner_removes_before_it_is_locked_is_made_again(temporary, monkeypatch, moment):
    """Between the making of a folder and its lock it looks like an orphan."""
    flock = fcntl.flock
    made = []

    def interfere(descriptor: int, operation: int) -> None:
        (path,) = os.listdir(temporary)
        made.append(path)
        if len(made) > 1:
            flock(descriptor, operation)
        elif moment == "before the lock":
            os.rmdir(temporary / path)
            flock(descriptor, operation)
        else:
            os.rmdir(temporary / path)
            raise BlockingIOError

    monkeypatch.setattr(folder_module.fcntl, "flock", interfere)
    with open_folder("ours-") as path:
        assert os.listdir(temporary) == [Path(path).name]
    assert len(made) == 2


def test_a_folder_that_cannot_be_locked_is_not_left(temporary, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_module.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"), open_folder("ours-"):
        pass
    assert not os.listdir(temporary)
