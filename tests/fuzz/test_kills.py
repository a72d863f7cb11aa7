from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from engine.handshake import FOLDER_PREFIX
from fuzz.kills import _check_files, _processes, run


def test_processes_are_told_by_their_folder_and_their_role(tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    codes = {"reaper": "'os.killpg'", "engine": "'engine_process'", "front": "1"}
    running = {
        role: subprocess.Popen([sys.executable, "-c", f"{code}; input()"], env=env, stdin=subprocess.PIPE)
        for role, code in codes.items()
    }
    try:
        assert _processes(str(tmp_path)) == {process.pid: role for role, process in running.items()}
        assert _processes(str(tmp_path / "other")) == {}
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def test_what_is_left_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = set(os.listdir("/dev/shm"))
    (tmp_path / f"{FOLDER_PREFIX}x").mkdir()
    with pytest.raises(AssertionError, match="files are left"):
        _check_files(str(tmp_path), set(), shared, none_left=True)
    assert _check_files(str(tmp_path), set(), shared, none_left=False) == 1
    (tmp_path / "other").touch()
    with pytest.raises(AssertionError, match="files are left by the next start"):
        _check_files(str(tmp_path), set(), shared, none_left=False)
    (tmp_path / "other").unlink()
    with pytest.raises(AssertionError, match="sockets are left"):
        _check_files(str(tmp_path), {"/dev/null"}, shared, none_left=True)


@pytest.mark.slow
def test_a_round_leaves_the_environment_as_it_was(capfd):
    before = os.environ.get("TMPDIR"), tempfile.gettempdir()
    assert run(0.001, 7) == 1
    assert "1 rounds" in capfd.readouterr().out
    assert (os.environ.get("TMPDIR"), tempfile.gettempdir()) == before
