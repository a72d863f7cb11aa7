from __future__ import annotations

from pathlib import Path

import pytest

from engine.model_runner.memory import available_memory_bytes, num_available_cores


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


def test_without_a_limit_it_is_what_the_machine_has(proc: Path, tmp_path: Path) -> None:
    limit(tmp_path / "cgroup" / "slice" / "service", "max", 5)
    assert available_memory_bytes(proc, tmp_path / "cgroup") == 800 * 1024


def test_the_tightest_control_group_counts(proc: Path, tmp_path: Path) -> None:
    limit(tmp_path / "cgroup" / "slice" / "service", "900000", 0)
    limit(tmp_path / "cgroup" / "slice", "500000", 100000)
    assert available_memory_bytes(proc, tmp_path / "cgroup") == 400000


def test_an_exhausted_control_group_leaves_nothing(proc: Path, tmp_path: Path) -> None:
    limit(tmp_path / "cgroup" / "slice" / "service", "1000", 2000)
    assert available_memory_bytes(proc, tmp_path / "cgroup") == 0


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
