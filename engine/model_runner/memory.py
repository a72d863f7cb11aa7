"""How much of the machine this process may take, as far as the system tells: memory, and cores."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.config import MAX_THREADS

_TIMES = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
_MEMORY = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""Of a control group, of version 2 and of version 1: the files with the limit, and with the period or what is taken."""


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that can be had without swapping: the machine's, or the control group's if that is less."""
    machine, group = _of_machine(proc), _of_control_group(proc, cgroup)
    return machine if group is None else min(machine, group)


def num_available_cores(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that this process may run on, or as many whole ones as its control groups give it time for."""
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups(proc, cgroup, "cpu"):
        for quota, period in _limits(group, _TIMES):
            if quota > 0:  # -1 is no limit in version 1
                cores = min(cores, quota / period)
    return max(1, int(cores))


def step_threads(num_cores: int, num_engines: int) -> int:
    """Return the threads for a step of one of `num_engines` that share the cores: one core in 16 is left to the rest.

    Front end, messages and text take 7 to 10 % of the processor time at many streams of a small model: on few cores
    they find a moment between two steps, and every core is worth more to the step (see ARCHITECTURE.md).
    """
    return min(MAX_THREADS, max(1, (num_cores - num_cores // 16) // num_engines))


def held_memory_bytes(proc: Path = Path("/proc")) -> int:
    """Return the resident memory of this process; 0 where the system does not tell."""
    try:
        num_pages = int((proc / "self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def give_back_memory() -> None:
    """Return to the system what was let go: the C library keeps it for itself otherwise, where it can be told."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim is not None:
        trim(0)


def _of_machine(proc: Path) -> int:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # no Linux: take all that is installed
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_control_group(proc: Path, cgroup: Path) -> int | None:
    """Return what the process's control groups leave; None where nothing limits."""
    left = [
        limit - taken + _cached_bytes(group)
        for group in _control_groups(proc, cgroup, "memory")
        for limit, taken in _limits(group, _MEMORY)
    ]
    return max(0, min(left)) if left else None


def _cached_bytes(group: Path) -> int:
    """Return how much of what a group has taken is files that were read or written: given up when memory is wanted."""
    sizes_bytes: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, size_bytes = line.partition(" ")
            sizes_bytes[name] = int(size_bytes)
    prefix = "total_" if "total_active_file" in sizes_bytes else ""  # version 1 tells apart what is of groups below
    return sum(sizes_bytes.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))


def _limits(group: Path, files: tuple[Sequence[str], ...]) -> Iterator[list[int]]:
    """Yield the numbers in `files` of a control group, where it tells any."""
    for names in files:
        with contextlib.suppress(OSError, ValueError):  # "max", or a group without the controller
            yield [int(word) for name in names for word in (group / name).read_text().split()]


def _control_groups(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's control group, and of those above it, that `controller` may limit.

    Of version 2 there is one tree; of version 1 each controller has a tree of its own, of which a container sees its
    own part alone, as the root.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup / controller if controllers else cgroup
        group = root / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder == root or root in folder.parents)
