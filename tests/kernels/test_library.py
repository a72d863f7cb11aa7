"""The library is compiled once, whole or not at all, and where it cannot be had the reason is said."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels import library
from engine.kernels.library import NoKernels, load, supported_variants

SOURCE = Path(library.__file__).parent / "source"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METRONOME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "load", load.__wrapped__)
    return tmp_path / "cache"


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def built(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file())


def test_plain_c_is_always_there_and_the_best_comes_last() -> None:
    assert supported_variants()[0] == "plain"
    assert list(library.VARIANTS)[: len(supported_variants())] == supported_variants()


def test_a_second_load_compiles_nothing(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    monkeypatch.setenv("CC", fake_compiler(tmp_path, f'echo "$1" >> {told}; exec gcc "$@"'))
    library.load("plain")
    assert built(own_cache) == [".lock", "plain.so"]
    told.unlink()
    library.load("plain")
    assert told.read_text() == "--version\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo it broke >&2; exit 1", "it broke"),
        ('[ "$1" = --version ] || exit 3', "exit status 3"),
        ("exit 0", "made no library"),
        ('[ "$1" = --version ] || kill -9 $$', "exit status -9"),
        ('case "$*" in *-shared*) echo no linker >&2; exit 1 ;; esac', "no linker"),
    ],
)
def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))
    with pytest.raises(NoKernels, match=reason):
        library.load("plain")
    assert built(own_cache) == [".lock"]


def hanging_compiler(folder: Path, first: str) -> str:
    """Return a compiler that hangs on each file but the first, on which it does `first` once the others have begun."""
    os.mkfifo(folder / "begun")
    others = sorted(file.name for file in SOURCE.glob("*.c"))[1:]
    wait = "; ".join(["read pid <&3"] * len(others))
    return fake_compiler(
        folder,
        f"""
        [ "$1" = --version ] && exit
        exec 3<> {folder}/begun
        case "$*" in
        *-c*/attention.c*) {wait}; {first} ;;
        *) echo $$ >> {folder}/pids; echo $$ >&3; exec sleep 60 ;;
        esac""",
    )


def running(pids: Path) -> list[str]:
    return [pid for pid in pids.read_text().split() if Path("/proc", pid).exists()]


def test_when_one_file_fails_the_others_are_not_compiled_to_their_end(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", hanging_compiler(tmp_path, "echo it broke >&2; exit 1"))
    with pytest.raises(NoKernels, match="it broke"):
        library.load("plain")
    assert not running(tmp_path / "pids")
    assert built(own_cache) == [".lock"]


def test_a_compiler_that_does_not_end_is_ended_in_time(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "COMPILE_TIMEOUT_S", 0.1)
    monkeypatch.setenv("CC", fake_compiler(tmp_path, '[ "$1" = --version ] || exec sleep 60'))
    with pytest.raises(NoKernels, match="timed out"):
        library.load("plain")
    assert built(own_cache) == [".lock"]


def test_what_an_engine_that_is_killed_while_it_compiles_leaves_is_removed_by_the_next(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "told")
    monkeypatch.setenv("CC", hanging_compiler(tmp_path, f"echo all > {tmp_path}/told; exec sleep 60"))
    compiles = [sys.executable, "-c", "from engine.kernels.library import load; load('plain')"]
    with subprocess.Popen(compiles, process_group=0) as process:
        (tmp_path / "told").read_text()
        os.killpg(process.pid, signal.SIGKILL)
    assert len(built(own_cache)) > 1
    monkeypatch.setenv("CC", fake_compiler(tmp_path, "exit 1"))
    with pytest.raises(NoKernels):
        library.load("plain")
    assert built(own_cache) == [".lock"]


def test_a_library_that_cannot_be_loaded_is_built_again() -> None:
    target, _ = library._build_of("plain")
    target.parent.mkdir(parents=True)
    target.touch()
    library.load("plain")
    assert target.stat().st_size > 0


def test_a_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    monkeypatch.setenv("CC", fake_compiler(tmp_path, f'echo "$1" >> {told}; exec gcc "$@"') + " -DSOMETHING")
    library.load("plain")
    assert set(told.read_text().split()) == {"-DSOMETHING"}
    assert library._build_of("plain")[0].exists()
    monkeypatch.setenv("CC", os.environ["CC"] + " -DSOMETHING_ELSE")
    assert not library._build_of("plain")[0].exists()


def test_a_compiler_that_does_not_answer_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 10)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(NoKernels, match="does not answer"):
        library.load("plain")


def test_what_a_killed_build_left_is_removed_by_the_next(own_cache: Path) -> None:
    left = own_cache / "kernels" / "another" / ".partial-x"
    left.mkdir(parents=True)
    (left / "kernels.c").touch()
    library.load("plain")
    assert not left.exists()


def test_without_a_compiler_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(NoKernels, match="no C compiler"):
        library.load("plain")


def test_a_cache_that_cannot_be_written_is_a_reason(own_cache: Path) -> None:
    own_cache.write_text("a file, not a folder")
    with pytest.raises(NoKernels, match="cache"):
        library.load("plain")


def test_other_source_is_another_library(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.load("plain")
    monkeypatch.setattr(library, "OPTIONS", (*library.OPTIONS, "-DOTHER"))
    library.load("plain")
    assert len([name for name in os.listdir(own_cache / "kernels") if name != ".lock"]) == 2
