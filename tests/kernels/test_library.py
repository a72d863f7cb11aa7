"""The library is compiled once, whole or not at all, and where it cannot be had the reason is said."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from engine.kernels import library
from engine.kernels.library import NoKernels, load, supported_variants

SMALL_SOURCE = {
    "first.c": "int permitted(void) { return 1; } int guard(void) { return 1; }",
    "second.c": '#include "second.h"\nint run(void) { return NUMBER; }',
    "second.h": "enum { NUMBER = 0 };",
}
"""As much as the library needs to be loaded: the operations themselves are compiled for the other tests."""


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, content in SMALL_SOURCE.items():
        (folder / name).write_text(content)
    monkeypatch.setattr(library, "SOURCE", folder)
    return folder


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


def test_a_compiler_that_is_killed_ends_the_attempt_instead_of_a_lesser_library(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C, or for want of memory; gcc tells of its own part by these words."""
    told = "echo cc: fatal error: Killed signal terminated program cc1 >&2; exit 1"
    monkeypatch.setattr(library, "supported_variants", lambda: ["plain", "avx2"])
    for script in (told, "kill -9 $$"):
        monkeypatch.setenv("CC", fake_compiler(tmp_path, f'[ "$1" = --version ] || {{ {script}; }}'))
        with pytest.raises(library.CompilerKilled, match="start again"):
            library.load()
    assert built(own_cache) == [".lock"]


def hanging_compiler(folder: Path, then: str, *, in_a_child: bool = False) -> str:
    """Return a compiler that hangs on second.c, or waits for a child that does, and then does `then` on first.c."""
    os.mkfifo(folder / "begun")
    pid, hang = ("$!", "wait") if in_a_child else ("$$", "exec sleep 60")
    child = "sleep 60 &" if in_a_child else ":;"
    return fake_compiler(
        folder,
        f"""
        case "$*" in
        *-c*first.c*) read pid < {folder}/begun; {then} ;;
        *-c*second.c*) {child} echo {pid} > {folder}/pid; echo > {folder}/begun; {hang} ;;
        esac""",
    )


def test_when_one_file_fails_the_others_are_not_compiled_to_their_end(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", hanging_compiler(tmp_path, "echo it broke >&2; exit 1"))
    with pytest.raises(NoKernels, match="it broke"):
        library.load("plain")
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    assert built(own_cache) == [".lock"]


def test_a_compiler_that_does_not_end_is_ended_in_time(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "COMPILE_TIMEOUT_S", 0.1)
    monkeypatch.setenv("CC", fake_compiler(tmp_path, '[ "$1" = --version ] || exec sleep 60'))
    with pytest.raises(NoKernels, match="timed out"):
        library.load("plain")
    assert built(own_cache) == [".lock"]


def test_a_compiler_that_is_ended_takes_with_it_what_it_has_started(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `cc` starts the process that compiles, and waits for it."""
    monkeypatch.setenv("CC", hanging_compiler(tmp_path, "echo it broke >&2; exit 1", in_a_child=True))
    with pytest.raises(NoKernels, match="it broke"):
        library.load("plain")
    pid = int((tmp_path / "pid").read_text())
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            assert select.select([process], [], [], 20)[0], "what the compiler has started goes on"
        finally:
            os.close(process)


def test_what_an_engine_that_is_killed_while_it_compiles_leaves_is_removed_by_the_next(
    own_cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "told")
    monkeypatch.setenv("CC", hanging_compiler(tmp_path, f"echo all > {tmp_path}/told; exec sleep 60"))
    script = f"from pathlib import Path; library.SOURCE = Path({str(source)!r}); library.load('plain')"
    engine = [sys.executable, "-c", f"from engine.kernels import library; {script}"]
    with subprocess.Popen(engine, process_group=0) as process:
        (tmp_path / "told").read_text()
        os.killpg(process.pid, signal.SIGKILL)
    assert len(built(own_cache)) > 1
    monkeypatch.setenv("CC", fake_compiler(tmp_path, "exit 1"))
    with pytest.raises(NoKernels):
        library.load("plain")
    assert built(own_cache) == [".lock"]


def test_a_compiler_that_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc 'x")
    with pytest.raises(NoKernels, match="CC is no command: No closing quotation, got"):
        library.load("plain")
    with library.compiling_beside():
        pass


def test_a_library_that_cannot_be_loaded_is_built_again() -> None:
    target = library._build_of("plain").target
    target.parent.mkdir(parents=True)
    target.touch()
    library.load("plain")
    assert target.stat().st_size > 0


def test_a_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    monkeypatch.setenv("CC", fake_compiler(tmp_path, f'echo "$1" >> {told}; exec gcc "$@"') + " -DSOMETHING")
    library.load("plain")
    assert set(told.read_text().split()) == {"-DSOMETHING"}
    assert library._build_of("plain").target.exists()
    monkeypatch.setenv("CC", os.environ["CC"] + " -DSOMETHING_ELSE")
    assert not library._build_of("plain").target.exists()


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


def answer() -> int:
    found: int = library.load("plain").run(0, None, 0, 1, None, 0, None)
    return found


def test_another_file_is_another_library_and_so_are_other_options_and_libraries(
    own_cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer() == 0
    (source / "second.h").write_text("enum { NUMBER = 1 };")
    assert answer() == 1
    monkeypatch.setattr(library, "OPTIONS", (*library.OPTIONS, "-DOTHER"))
    library.load("plain")
    monkeypatch.setattr(library, "LIBRARIES", (*library.LIBRARIES, "-lc"))
    library.load("plain")
    assert len([name for name in os.listdir(own_cache / "kernels") if name != ".lock"]) == 4


def test_a_compile_has_its_time_after_what_it_runs_beside(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: None
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(library.time, "monotonic", lambda: now_s[0])
    monkeypatch.setenv("CC", fake_compiler(tmp_path, 'exec gcc "$@"'))
    with library.compiling_beside():
        now_s[0] += 2 * library.COMPILE_TIMEOUT_S
    assert built(own_cache) == [".lock", "plain.so"]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "supported_variants", lambda: ["plain"])


def test_it_is_compiled_beside_what_a_start_has_to_do_before(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: None
) -> None:
    os.mkfifo(tmp_path / "go")
    waits = f'case "$*" in *" -c "*first.c*) read go < {tmp_path}/go ;; esac'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, f'{waits}; echo "$1" >> {tmp_path}/told; exec gcc "$@"'))
    with library.compiling_beside():
        (tmp_path / "go").write_text("it has begun, and waits for this\n")
    assert built(own_cache) == [".lock", "plain.so"]
    (tmp_path / "told").unlink()
    library.load()
    with library.compiling_beside():
        pass
    assert set((tmp_path / "told").read_text().split()) == {"--version"}


@pytest.mark.parametrize("error", [OSError, NoKernels, KeyboardInterrupt])
def test_what_is_compiled_beside_a_block_that_raises_is_given_up(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: None, error: type[BaseException]
) -> None:
    os.mkfifo(tmp_path / "begun")
    tells = f"echo $$ > {tmp_path}/pid; echo > {tmp_path}/begun"
    compiles = f'case "$*" in *" -c "*second.c*) {tells}; exec sleep 60 ;; *" -c "*) exec sleep 60 ;; esac'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, compiles))

    def raise_once_it_is_compiled() -> None:
        with library.compiling_beside():
            (tmp_path / "begun").read_text()
            raise error("of the block")

    with pytest.raises(error, match="of the block"):
        raise_once_it_is_compiled()
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    assert built(own_cache) == [".lock"]


@pytest.mark.parametrize("script", ["exit 1", "exit 0", '[ "$1" = --version ] || kill -9 $$'])
def test_what_fails_beside_is_told_by_who_needs_it(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: None, script: str
) -> None:
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))
    with library.compiling_beside():
        pass
    with pytest.raises(NoKernels):
        library.load()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.delenv("CC")
    with library.compiling_beside():
        pass
    assert built(own_cache) == [".lock"]


def test_nobody_waits_for_what_another_compiles_before_it_is_needed(own_cache: Path, plain: None) -> None:
    (own_cache / "kernels").mkdir(parents=True)
    with (own_cache / "kernels" / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with library.compiling_beside():
            pass
    assert built(own_cache) == [".lock"]
