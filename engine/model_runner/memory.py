"""How much of the machine this process may take, as far as the system tells: memory, and cores."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
from collections.abc import Iterator
from pathlib import Path


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that can be had without swapping: the machine's, or the control group's if that is less."""
    machine, group = _of_machine(proc), _of_control_group(proc, cgroup)
    return machine if group is None else min(machine, group)


def num_available_cores(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that this process may run on, or as many whole ones as its control groups give it time for."""
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups(proc, cgroup):
        with contextlib.suppress(OSError, ValueError):  # "max", or a group without the cpu controller
            quota, period = map(int, (group / "cpu.max").read_text().split())
            cores = min(cores, quota / period)
    return max(1, int(cores))


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
    left: float = math.inf
    for group in _control_groups(proc, cgroup):
        with contextlib.suppress(OSError, ValueError):  # "max", or a group without the memory controller
            left = min(left, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return None if left == math.inf else max(0, int(left))


def _control_groups(proc: Path, cgroup: Path) -> Iterator[Path]:
    """Yield the folders of the process's control group (version 2) and of those above it."""
    try:
        path = (proc / "self/cgroup").read_text().splitlines()[-1].partition("::")[2]
    except (OSError, IndexError):
        return
    group = cgroup / path.lstrip("/")
    while True:
        yield group
        if group == cgroup or cgroup not in group.parents:
            return
        group = group.parent
