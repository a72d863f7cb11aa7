from __future__ import annotations

from pathlib import Path

import pytest

from engine.kv_cache.block_pool import BlockPool
from fuzz import faults
from fuzz.faults import FAULTS, assert_found, planted, replaced
from fuzz.scheduler import Add, Finish, Plan, Settings, Simulation


def test_every_fault_has_a_history_that_finds_it() -> None:
    """Made by `python -m fuzz faults --record`."""
    recorded = {path.name for path in (Path(__file__).parent / "examples").glob("test_the_fault_*.py")}
    assert recorded == {f"test_the_fault_{'_'.join(name.split())}_is_found.py" for name in FAULTS}


def test_a_fault_is_there_while_it_is_planted_and_gone_after() -> None:
    release = BlockPool.release
    with planted("a reference is not dropped"):
        assert BlockPool.release is not release
    assert BlockPool.release is release


def test_a_fault_in_a_method_that_is_gone_says_so() -> None:
    with pytest.raises(LookupError, match="BlockPool has no method give_back"), replaced(BlockPool, "give_back", print):
        pass


def test_a_fault_that_no_longer_fits_the_code_is_not_taken_for_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = faults.Fault(BlockPool, "release", lambda release, pool, blocks, is_cached: pool.no_such_thing)
    monkeypatch.setitem(FAULTS, "broken", fault)
    with pytest.raises(LookupError, match="no longer fits"):
        assert_found("broken", Simulation, Settings(), [Add(), Plan(), Finish()])


def test_a_history_that_does_not_find_a_fault_is_told_so() -> None:
    with pytest.raises(AssertionError, match="is not found"):
        assert_found("a reference is not dropped", Simulation, Settings(), [])


def test_the_long_driver_finds_a_fault_and_records_a_history_that_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults, "FAULTS", {"a reference is not dropped": FAULTS["a reference is not dropped"]})
    monkeypatch.setattr(faults, "EXAMPLES", tmp_path)
    assert faults.run(1.0, 5, record=True) == 1
    assert "1 of 1 found" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    assert path.name == "test_the_fault_a_reference_is_not_dropped_is_found.py"


def test_a_fault_that_is_not_found_ends_the_program_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = faults.Fault(BlockPool, "release", lambda release, *args: release(*args))
    monkeypatch.setattr(faults, "FAULTS", {"none": harmless})
    with pytest.raises(SystemExit):
        faults.run(0.001, 5)
    assert "none: NOT FOUND" in capsys.readouterr().out
