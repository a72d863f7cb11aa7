"""Compiles the operations for this CPU at first use and loads them.

The library lies in the cache under the digest of source, compiler and flags, so it is made once; a build is renamed
into place whole. The C files are compiled side by side, a process each. A variant says for which instructions: the best
that the CPU has, or less, for the tests.
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
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path

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
    library.run.restype = integer
    library.run.argtypes = [integer, ctypes.c_int64, pointer, integer, pointer]


def _loaded(variant: str) -> ctypes.CDLL:
    """Load what is in the cache, or what is built for it, also where the first cannot be loaded."""
    target, build = _build_of(variant)
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(target))
    target.unlink(missing_ok=True)
    build()
    return ctypes.CDLL(str(target))


def _build_of(variant: str) -> tuple[Path, Callable[[], None]]:
    """Return where the library for `variant` belongs, and what compiles it."""
    compiler = _compiler()
    flags = [*OPTIONS, *_machine_flags(variant)]
    sources = {file.name: file.read_bytes() for file in SOURCE.iterdir()}
    made_of = (sorted(sources.items()), compiler, flags, LIBRARIES, _version(compiler))
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]
    target = cache_folder() / "kernels" / digest / f"{variant}.so"
    return target, partial(_compile, compiler, flags, sources, target)


def _compiler() -> list[str]:
    """Return the command of what CC names, else of the first compiler there is."""
    for command in filter(None, (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"])):
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    raise NoKernels("there is no C compiler (cc, gcc, clang, or what CC names)")


def _compile(compiler: Sequence[str], flags: Sequence[str], sources: dict[str, bytes], target: Path) -> None:
    """Compile into `target`, one process at a time; what a killed one left is removed first."""
    kernels = target.parent.parent
    target.parent.mkdir(parents=True, exist_ok=True)
    with (kernels / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in kernels.glob(f"*/{_PARTIAL}*"):
            shutil.rmtree(stale, ignore_errors=True)
        if target.exists():
            return
        logger.info("compiling the operations for this CPU, once, into %s", target)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_PARTIAL, ignore_cleanup_errors=True) as folder:
            _compile_in(Path(folder), compiler, flags, sources, target)
        logger.info("compiled the operations in %.1f s", time.monotonic() - began)


def _compile_in(
    folder: Path, compiler: Sequence[str], flags: Sequence[str], sources: dict[str, bytes], target: Path
) -> None:
    for name, content in sources.items():
        (folder / name).write_bytes(content)
    built, units = folder / target.name, [str(folder / name) for name in sorted(sources) if name.endswith(".c")]
    until = time.monotonic() + COMPILE_TIMEOUT_S
    try:
        _run([[*compiler, *flags, "-c", unit, "-o", f"{unit}.o"] for unit in units], folder, until)
        linked = [*compiler, *flags, "-shared", *(f"{unit}.o" for unit in units), "-o", str(built), *LIBRARIES]
        _run([linked], folder, until)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernels(f"{shlex.join(compiler)} failed: {error}") from error
    if not built.exists():
        raise NoKernels(f"{shlex.join(compiler)} is no C compiler: it made no library")
    built.rename(target)


def _run(commands: Sequence[Sequence[str]], folder: Path, until: float) -> None:
    """Run `commands` side by side; once one is found to have failed, in their order, or at `until`, all are killed.

    They stay in our process group, so that they end with an engine that is killed.
    """
    env = os.environ | {"TMPDIR": str(folder)}  # a killed compiler leaves nothing elsewhere
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env
            )
            stack.enter_context(process)  # waits for it in the end
            stack.callback(_kill, process)
            processes.append(process)
        for process in processes:
            _, said = process.communicate(timeout=max(0.0, until - time.monotonic()))
            if process.returncode != 0:
                reason = said.decode(errors="replace").strip()[-2000:] or f"exit status {process.returncode}"
                if process.returncode < 0 or _KILLED.search(reason):
                    raise CompilerKilled(f"{shlex.join(command[:1])} was killed: {reason}; start again")
                raise subprocess.SubprocessError(reason)


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
