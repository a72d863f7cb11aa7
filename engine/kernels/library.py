"""Compiles the operations for this CPU at first use and loads them.

The library lies in the cache under the digest of source, compiler and flags, so it is made once; a build is renamed
into place whole. The C files are compiled side by side, a process each, and beside what a start has to do before it
needs them. A variant says for which instructions: the best that the CPU has, or less, for the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from engine.models.cache import cache_folder

logger = logging.getLogger(__name__)

SOURCE = resources.files(__package__).joinpath("source")
"""What is compiled: each .c file, with all others beside it."""
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"),
    "amx": ("amx_tile", "amx_bf16", "amx_int8"),
}
"""Sets of instructions, each on top of those before it, by the names that the kernel gives them in /proc/cpuinfo."""
_FLAGS = {"avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16"}
OPTIONS = ("-O2", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-fPIC", "-pthread")
LIBRARIES = ("-lm",)
COMPILE_TIMEOUT_S = 120.0
"""For all that is compiled, and then linked, of one variant."""
_KILLED = re.compile(r"signal terminated program")
"""How gcc tells that what compiles for it was killed."""
_PARTIAL = ".partial-"
"""Folders of builds under way begin so; whoever holds the lock knows that there are none."""


class NoKernels(Exception):
    """The operations cannot be had here; the message says why."""


class CompilerKilled(NoKernels):
    """A signal ended the compiler, which says nothing of what it was compiling: there is no trying with less."""


class _Failed(Exception):
    """A compiler cannot be started, says no, or does not end."""


def supported_variants() -> list[str]:
    """Return the variants that this CPU runs, best last."""
    has = _cpu_features()
    found = []
    for name, features in VARIANTS.items():
        if not has.issuperset(features):
            break
        found.append(name)
    return found


@cache
def load(variant: str | None = None) -> ctypes.CDLL:
    """Return the library for `variant`, the best by default, compiled if it is not in the cache.

    Raises:
        NoKernels: There is no compiler, it failed, or this is no Linux.
    """
    if platform.system() != "Linux":
        raise NoKernels(f"they wait on futexes, which {platform.system()} does not have")
    reasons = []
    for name in [variant] if variant is not None else supported_variants()[::-1]:
        try:
            library = _loaded(name)
            if library.permitted():
                _declare(library)
                return library
            reasons.append(f"the system does not let this process use {name}")
        except CompilerKilled:
            raise
        except (NoKernels, OSError) as error:  # an older compiler, a cache that cannot be written or run from
            reasons.append(str(error))
        logger.info("not with %s: %s", name, reasons[-1])
    raise NoKernels(reasons[-1])


def _declare(library: ctypes.CDLL) -> None:
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.run.restype = library.guard.restype = integer
    library.guard.argtypes = [pointer, ctypes.c_int64, integer]
    library.run.argtypes = [ctypes.c_int64, pointer, ctypes.c_int64, integer, pointer, integer, pointer]


def _loaded(variant: str) -> ctypes.CDLL:
    """Load what is in the cache, or what is built for it, also where the first cannot be loaded."""
    build = _build_of(variant)
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(build.target))
    build.target.unlink(missing_ok=True)
    _compile(build)
    return ctypes.CDLL(str(build.target))


class _Build(NamedTuple):
    """What a library is made of, and where it belongs."""

    compiler: Sequence[str]
    flags: Sequence[str]
    sources: dict[str, bytes]
    target: Path


def _build_of(variant: str) -> _Build:
    compiler = _compiler()
    flags = [*OPTIONS, *_machine_flags(variant)]
    sources = {file.name: file.read_bytes() for file in sorted(SOURCE.iterdir(), key=lambda file: file.name)}
    made_of = (list(sources.items()), compiler, flags, LIBRARIES, _version(compiler))
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]
    return _Build(compiler, flags, sources, cache_folder() / "kernels" / digest / f"{variant}.so")


def _compiler() -> list[str]:
    """Return the command of what CC names, else of the first compiler there is."""
    try:
        asked = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise NoKernels(f"CC is no command: {error}, got {os.environ['CC']!r:.80}") from error
    for command in filter(None, (asked, ["cc"], ["gcc"], ["clang"])):
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    raise NoKernels("there is no C compiler (cc, gcc, clang, or what CC names)")


def _compile(build: _Build) -> None:
    """Compile into `build.target`, one process at a time."""
    with (_folder_of(build) / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not build.target.exists():
            with _compiling(build):
                pass


@contextlib.contextmanager
def compiling_beside() -> Iterator[None]:
    """Compile what `load` will want, unless it is there or somebody is at it, beside what the block does.

    What goes wrong here `load`, which is called later, finds again and tells.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(NoKernels, OSError):
            build = _build_of(supported_variants()[-1])
            if platform.system() == "Linux" and not build.target.exists():
                lock = stack.enter_context((_folder_of(build) / ".lock").open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stack.enter_context(_compiling(build))
        yield
        with contextlib.suppress(NoKernels, OSError):
            stack.close()


def _folder_of(build: _Build) -> Path:
    """Return where all builds lie, made if it is not there, as the folder of this one is."""
    build.target.parent.mkdir(parents=True, exist_ok=True)
    return build.target.parent.parent


@contextlib.contextmanager
def _compiling(build: _Build) -> Iterator[None]:
    """Compile the files, a process each, beside what the block does, and link them after it; the lock is held.

    What a killed build left is removed first. Where the block raises, or a file fails, all compilers are killed.
    """
    for stale in build.target.parent.parent.glob(f"*/{_PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    logger.info("compiling the operations for this CPU, once, into %s", build.target)
    began = time.monotonic()
    command = [*build.compiler, *build.flags]
    with tempfile.TemporaryDirectory(dir=build.target.parent, prefix=_PARTIAL, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for source, content in build.sources.items():
            (folder / source).write_bytes(content)
        built, units = folder / build.target.name, [str(folder / file) for file in build.sources if file.endswith(".c")]
        linked = [*command, "-shared", *(f"{unit}.o" for unit in units), "-o", str(built), *LIBRARIES]
        try:
            with _running([[*command, "-c", unit, "-o", f"{unit}.o"] for unit in units], folder):
                yield
            with _running([linked], folder):
                pass
        except _Failed as error:
            raise NoKernels(f"{shlex.join(build.compiler)} failed: {error}") from error
        if not built.exists():
            raise NoKernels(f"{shlex.join(build.compiler)} is no C compiler: it made no library")
        built.rename(build.target)
    logger.info("compiled the operations in %.1f s", time.monotonic() - began)


@contextlib.contextmanager
def _running(commands: Sequence[Sequence[str]], folder: Path) -> Iterator[None]:
    """Run `commands` side by side with the block; once one is found to have failed, in their order, all are killed.

    So they are where the block raises, or where they take too long after it. They stay in our process group, so that
    they end with an engine that is killed.
    """
    env = os.environ | {"TMPDIR": str(folder)}  # a killed compiler leaves nothing elsewhere
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env
                )
            except OSError as error:
                raise _Failed(str(error)) from error
            stack.enter_context(process)  # waits for it in the end
            stack.callback(_kill, process)
            processes.append(process)
        yield
        until = time.monotonic() + COMPILE_TIMEOUT_S
        for process in processes:
            try:
                _, said = process.communicate(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise _Failed(str(error)) from error
            if process.returncode != 0:
                reason = said.decode(errors="replace").strip()[-2000:] or f"exit status {process.returncode}"
                if process.returncode < 0 or _KILLED.search(reason):
                    raise CompilerKilled(f"{shlex.join(commands[0][:1])} was killed: {reason}; start again")
                raise _Failed(reason)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a compiler that still runs, with what it has started: gcc's work is done by children of `cc`."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)  # it starts nothing more
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        children = []
    process.kill()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


def _machine_flags(variant: str) -> list[str]:
    features: list[str] = []
    for name, more in VARIANTS.items():
        features += more
        if name == variant:
            return ["-m" + _FLAGS.get(feature, feature).replace("amx_", "amx-") for feature in features]
    raise ValueError(f"no variant {variant!r}: there are {', '.join(VARIANTS)}")


def _version(compiler: Sequence[str]) -> str:
    command = [*compiler, "--version"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except subprocess.TimeoutExpired as error:
        raise NoKernels(f"{shlex.join(command)} does not answer: {error}") from error


def _cpu_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())
