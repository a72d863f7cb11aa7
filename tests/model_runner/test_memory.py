from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.model_runner.memory import available_memory_bytes, num_available_cores, step_threads


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:     800 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/slice/service\n")
    return tmp_path / "proc"


def limit(group: Path, maximum: str, current: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")


def in_version_1(proc: Path) -> None:
    lines = ["5:memory:/docker/12ab", "4:cpu,cpuacct:/docker/12ab", "3:name=systemd:/docker/12ab", "0::/"]
    (proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")


def test_without_a_limit_it_is_what_the_machine_has(proc: Path, tmp_path: Path) -> None:
    limit(tmp_path / "cgroup" / "slice" / "service", "max", 5)
    assert available_memory_bytes(proc, tmp_path / "cgroup") == 800 * 1024


def test_the_tightest_control_group_counts(proc: Path, tmp_path: Path) -> None:
    limit(tmp_path / "cgroup" / "slice" / "service", "900000", 0)
    limit(tmp_path / "cgroup" / "slice", "500000", 100000)
    assert available_memory_bytes(proc, tmp_path / "cgroup") == 400000


@pytest.mark.parametrize(
    "stat", ["active_file {}\nx 5\ninactive_file {}\n", "active_file 1\ntotal_active_file {}\ntotal_inactive_file {}"]
)
def test_files_that_were_read_are_given_up_when_memory_is_wanted(proc: Path, tmp_path: Path, stat: str) -> None:
    group = tmp_path / "cgroup" / "slice" / "service"
    limit(group, "500000", 500000)
    (group / "memory.stat").write_text(stat.format(100000, 200000))
    assert available_memory_bytes(proc, tmp_path / "cgroup") == 300000


def test_an_exhausted_control_group_leaves_nothing(proc: Path, tmp_path: Path) -> None:
    limit(tmp_path / "cgroup" / "slice" / "service", "1000", 2000)
    assert available_memory_bytes(proc, tmp_path / "cgroup") == 0


@pytest.mark.parametrize("seen_as", ["docker/12ab", ""])
@pytest.mark.parametrize(("maximum", "expected"), [("500000", 400000), (f"{2**63 - 4096}", 800 * 1024)])
def test_groups_of_version_1_count_too(proc: Path, tmp_path: Path, seen_as: str, maximum: str, expected: int) -> None:
    """A container sees its own group as the root, under whatever name /proc has for it."""
    in_version_1(proc)
    group = tmp_path / "cgroup" / "memory" / seen_as
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{maximum}\n")
    (group / "memory.usage_in_bytes").write_text("100000\n")
    assert available_memory_bytes(proc, tmp_path / "cgroup") == expected


def test_where_nothing_tells_all_installed_memory_counts(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path / "none", tmp_path / "none") > 2**28


def test_this_machine_tells() -> None:
    assert available_memory_bytes() > 0


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [("max 100000", "200000 100000", 2), ("150000 100000", "400000 100000", 1), ("20000 100000", "max 100000", 1)],
)
def test_cores_are_those_that_the_control_groups_give_time_for(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outer: str, inner: str, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)
    group = tmp_path / "cgroup" / "slice" / "service"
    group.mkdir(parents=True)
    assert num_available_cores(proc, tmp_path / "cgroup") == 8
    (group.parent / "cpu.max").write_text(outer)
    (group / "cpu.max").write_text(inner)
    assert num_available_cores(proc, tmp_path / "cgroup") == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("250000", 2), ("1000", 1)])
def test_cores_are_those_that_groups_of_version_1_give_time_for(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)
    in_version_1(proc)
    group = tmp_path / "cgroup" / "cpu" / "docker" / "12ab"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert num_available_cores(proc, tmp_path / "cgroup") == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there is no affinity here")
def test_cores_are_those_that_the_process_is_bound_to() -> None:
    code = "from engine.model_runner.memory import num_available_cores; print(num_available_cores())"
    bound = f"import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); {code}"
    assert subprocess.run([sys.executable, "-c", bound], capture_output=True, check=True).stdout == b"1\n"


@pytest.mark.parametrize(
    ("num_cores", "num_engines", "expected"),
    [(1, 1, 1), (2, 1, 2), (2, 4, 1), (15, 1, 15), (16, 1, 15), (64, 1, 60), (64, 4, 15), (1000, 1, 256)],
)
def test_a_step_has_all_cores_but_one_in_sixteen(num_cores: int, num_engines: int, expected: int) -> None:
    assert step_threads(num_cores, num_engines) == expected
